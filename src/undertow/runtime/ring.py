"""Connections of every rank to its two neighbours, by which ranks learn at once that another one is gone.

    rank 0 ── rank 1 ── rank 2 ── ... ── rank 0        one TCP connection for each line

The kernel closes a process's connections when it ends, whatever has ended it: no heartbeat, no polling, and no server that
could be lost with a rank. The store of torch.distributed is needed while the ring is made, and never again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Neighbour", "Store", "close_all", "make_ring"]

Message = dict[str, Any]

_MAX_LINE = 1 << 16
_CONNECT_S = 5.0
_ACCEPT_S = 6.0  # all ranks are there
_PROBE_S = 2.0  # between two looks whether a rank that has not come is there at all
_SIOCGIFADDR = 0x8915


class Store(Protocol):
    """What of torch.distributed's stores is needed; none of it waits."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def add(self, key: str, amount: int, /) -> int: ...


class Neighbour:
    """The connection to the next rank, or the one before. Messages are lines of JSON: nothing is unpickled."""

    def __init__(self, connection: socket.socket, rank: int, process: int | None = None) -> None:
        self.rank = rank
        self._process = process  # its number, where it runs on this machine
        self._socket = connection
        self._sending = threading.Lock()
        self._received = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """From any thread. What cannot be sent is dropped: whoever reads learns that the connection is gone."""
        line = json.dumps(message).encode() + b"\n"
        if len(line) > _MAX_LINE:
            return
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(line)

    def read(self) -> tuple[list[Message], bool]:
        """The messages that have come, and whether the connection still stands; waits where none has come."""
        try:
            received = self._socket.recv(_MAX_LINE)
        except TimeoutError:
            return [], True
        except OSError:
            received = b""
        if not received:
            return [], False
        *lines, self._received = (self._received + received).split(b"\n")
        if len(self._received) > _MAX_LINE:
            self._received = b""
        return [message for line in lines if (message := _message(line)) is not None], True

    def is_stopped(self) -> bool:
        """Whether a signal keeps its process from running, as far as can be seen from here."""
        try:
            status = Path(f"/proc/{self._process}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def make_ring(
    store: Store,
    key: str,
    *,
    rank: int,
    num_ranks: int,
    is_gone: Callable[[int], bool],
    each: Callable[[Sequence[int]], object],
) -> list[Neighbour] | int | None:
    """The two neighbours of `rank`, the next one first; a call for every rank of the ring.

    None where some rank cannot be reached by connections of ours: then no rank has a ring. The number of a rank that
    `is_gone`, where one is. `each` is called now and then with the ranks that have not come, and may raise.
    """
    with _listening() as server:
        token = secrets.token_hex(16)
        here = {"host": socket.gethostname(), "process": os.getpid(), "addresses": _addresses()}
        here |= {"port": server.getsockname()[1], "token": token}
        store.set(f"{key}/at/{rank}", json.dumps(here))
        store.add(f"{key}/here", 1)

        def missing() -> list[int]:
            return [other for other in range(num_ranks) if not store.check([f"{key}/at/{other}"])]

        found = _meet(store, f"{key}/here", num_ranks, is_gone=is_gone, missing=missing, each=each)
        if found is not None:
            return found
        neighbours = _connect(store, key, server, token, rank=rank, num_ranks=num_ranks)
        if neighbours is None:
            store.add(f"{key}/apart", 1)
        store.add(f"{key}/done", 1)
        others = [other for other in range(num_ranks) if other != rank]
        found = _meet(store, f"{key}/done", num_ranks, is_gone=is_gone, missing=lambda: others, each=each)
    if found is None and neighbours is not None and store.add(f"{key}/apart", 0) == 0:
        return neighbours
    close_all(neighbours or ())
    return found


def close_all(neighbours: Sequence[Neighbour]) -> None:
    for neighbour in neighbours:
        neighbour.close()


def _meet(
    store: Store,
    key: str,
    num_ranks: int,
    *,
    is_gone: Callable[[int], bool],
    missing: Callable[[], Sequence[int]],
    each: Callable[[Sequence[int]], object],
) -> int | None:
    """Returns when all ranks have counted `key` up, or with a rank that is gone."""
    pause_s, probe_s = 0.001, time.monotonic() + _PROBE_S
    while store.add(key, 0) < num_ranks:
        time.sleep(pause_s)
        pause_s = min(0.25, 1.5 * pause_s)
        if time.monotonic() > probe_s:
            probe_s = time.monotonic() + _PROBE_S
            late = missing()
            gone = next((other for other in late if is_gone(other)), None)
            if gone is not None:
                return gone
            each(late)
    return None


def _connect(store: Store, key: str, server: socket.socket, token: str, *, rank: int, num_ranks: int) -> list[Neighbour] | None:
    before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    theirs = json.loads(store.get(f"{key}/at/{after}"))
    # Both at once: each of us waits for the next one's word, who would wait in turn.
    with ThreadPoolExecutor(max_workers=1) as accepting:
        coming = accepting.submit(_accepted, server, token, before)
        to_next = _connected(theirs, {"token": theirs["token"], "rank": rank})
        from_previous = coming.result()
    if to_next is None or from_previous is None:
        for connection in (to_next, from_previous):
            if connection is not None:
                connection.close()
        return None
    for connection in (to_next, from_previous):
        connection.settimeout(2.0)  # a neighbour that is stopped must not stop us, which send to it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    is_here = theirs["host"] == socket.gethostname()
    return [Neighbour(to_next, after, theirs["process"] if is_here else None), Neighbour(from_previous, before)]


def _connected(theirs: Message, hello: Message) -> socket.socket | None:
    for address in theirs["addresses"]:
        if address.startswith("127.") and theirs["host"] != socket.gethostname():
            continue
        connection = None
        try:
            connection = socket.create_connection((address, theirs["port"]), timeout=_CONNECT_S)
            connection.sendall(json.dumps(hello).encode() + b"\n")
            if connection.recv(1) == b"+":  # it is who we think
                return connection
        except OSError:
            pass
        if connection is not None:
            connection.close()
    return None


def _accepted(server: socket.socket, token: str, rank: int) -> socket.socket | None:
    server.settimeout(1.0)
    until_s = time.monotonic() + _ACCEPT_S
    while time.monotonic() < until_s:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        if _is_expected(connection, token, rank):
            return connection
        connection.close()
    return None


def _is_expected(connection: socket.socket, token: str, rank: int) -> bool:
    try:
        connection.settimeout(_CONNECT_S)
        hello = _message(connection.recv(1024).rstrip(b"\n"))  # short, and sent in one piece
        if hello is None or not secrets.compare_digest(str(hello.get("token")), token) or hello.get("rank") != rank:
            return False
        connection.sendall(b"+")
    except OSError:
        return False
    return True


def _listening() -> socket.socket:
    """A port that is open until the neighbour has come."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=has_both)


def _addresses() -> list[str]:
    """Where other ranks may reach this machine, the likeliest first."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    found = [address for name in names if (address := _address_of(name)) is not None]
    # To the master, which may know itself by an address that nobody else reaches, and to the world outside.
    for target in () if found else (os.environ.get("MASTER_ADDR"), "192.0.2.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if target:
                probe.connect((target, 9))  # sends nothing: it chooses a route
                found.append(probe.getsockname()[0])
    if not found:  # last, for a name that nobody knows may be looked for long
        with contextlib.suppress(OSError):
            found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _address_of(interface: str) -> str | None:
    try:
        import fcntl  # not on Windows

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    except (ImportError, OSError):
        return None


def _message(line: bytes) -> Message | None:
    with contextlib.suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    return None
