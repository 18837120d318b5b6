"""Connections of a rank to its two neighbors, over TCP, with the standard library alone.

Ranks meet in the store of torch.distributed and leave there where they listen, with a random token. Every rank then

1. connects to the next rank, and sends a proof that it has read that rank's token;
2. accepts connections until one brings the proof for its own token, and answers with a proof;
3. waits for the answer of the next rank.

No rank waits before it has connected, so that ranks cannot wait for each other in a circle. A
connection without the proof is closed: nothing that a port scanner sends is parsed. The listening
socket lives for the handshake only.

A message is four bytes of length, most significant first, and that many bytes, at most 65,536.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import platform
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from undertow.runtime.peers import patience

Look = Callable[[Sequence[int]], object]

_LENGTH = struct.Struct("!I")
_MAX_MESSAGE = 1 << 16
_MAX_UNSENT = 1 << 20  # bytes for a neighbor that does not read; further messages to it are dropped
_READ = 1 << 18
_BACKLOG = 128
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # reserved for documents: the route to them is the default one
_GET_ADDRESS = 0x8915  # Linux: SIOCGIFADDR
# Firewalls forget connections that say nothing for minutes, so the kernel says something, also while
# Python does not run. It ends a connection whose other machine has not answered for half an hour.
_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 15,
    "TCP_USER_TIMEOUT": 1_800_000,
}


class Connection:
    """The connection to the next or the previous rank. Any thread may send; the guard's thread reads and closes."""

    def __init__(self, link: socket.socket, rank: int, process: int | None = None) -> None:
        self.rank = rank
        self._process = process  # its process id if it runs on this machine
        self._link = link
        self._sending = threading.RLock()  # reentrant: freeing a group in the middle of a send may call this again
        self._is_sending = False
        self._unsent = bytearray()
        self._received = bytearray()
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # one between two threads is not TCP
            for name, value in _OPTIONS.items():
                if hasattr(socket, name):
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Sends as much as the kernel takes now and keeps the rest for `flush`. Drops the message if the neighbor is stopped."""
        with self._sending:
            if len(message) <= _MAX_MESSAGE and len(self._unsent) < _MAX_UNSENT:
                self._unsent += _LENGTH.pack(len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Sends as much as the kernel takes. A connection that is gone takes nothing; reading tells that."""
        with self._sending:
            if self._is_sending:
                return
            self._is_sending = True
            try:
                while self._unsent:
                    del self._unsent[: self._link.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()
            finally:
                self._is_sending = False

    def finish(self, within_s: float) -> None:
        """Waits until the kernel has everything, and ends the connection; the reading thread then closes it."""
        until_s = time.monotonic() + within_s
        self.flush()
        while self._unsent and time.monotonic() < until_s:
            time.sleep(0.005)
            self.flush()
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def receive(self) -> tuple[list[bytes], bool]:
        """Returns the messages that have arrived, and False if the connection has ended."""
        try:
            data = self._link.recv(_READ)
        except BlockingIOError:
            return [], True
        except OSError:
            data = b""
        self._received += data
        messages = []
        while len(self._received) >= _LENGTH.size:
            stop = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if stop > _LENGTH.size + _MAX_MESSAGE:  # no rank sends that: from now on only the end counts
                del self._received[_LENGTH.size :]
            if stop > len(self._received):
                break
            messages.append(bytes(self._received[_LENGTH.size : stop]))
            del self._received[:stop]
        return messages, bool(data)

    def is_stopped(self) -> bool:
        """Returns True if a signal has stopped the neighbor's process, as far as this machine can see."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self._process}/stat").read_text()
            return status.rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def close(self) -> None:
        with self._sending:  # otherwise a send in another thread could reach the next file that is opened
            self._link.close()

    def forget(self) -> None:
        """Closes the copy that a child process has. No lock: a thread that the child does not have may hold it."""
        self._link.close()


@dataclass(frozen=True, slots=True)
class _Place:
    """The address of a rank, as it leaves it in the store."""

    rank: int
    node: str
    process: int
    address: str  # empty if it cannot listen
    port: int
    token: str

    @property
    def shown(self) -> str:
        return f"rank {self.rank} at {self.address} port {self.port}"

    def proof(self, direction: str) -> bytes:
        return hashlib.sha256(f"{self.token}/{direction}".encode()).digest()


def connect_ring(store: Store, key: str, *, rank: int, num_ranks: int, look: Look) -> tuple[list[Connection], str]:
    """Connects `rank` to its neighbors and returns them, the next one first; every rank of the ring calls it.

    If some pair cannot connect, no rank gets connections, and every rank gets the reason. Calls
    `look` from time to time with the ranks that have not arrived; it may raise. The store is asked
    for nothing that waits.
    """
    meet = partial(_meet, store, rank=rank, num_ranks=num_ranks, look=look)
    has_given_up = partial(store.add, f"{key}/apart", 0)
    links, reason = list[tuple[socket.socket, _Place]](), ""
    with contextlib.ExitStack() as undo:
        here = _Place(rank, platform.node(), os.getpid(), "", 0, secrets.token_hex(32))
        try:
            listener = undo.enter_context(_listening(own_address(host_of(store))))
            address, port, *_ = listener.getsockname()
            here = replace(here, address=address, port=port)
        except OSError as error:
            reason = f"rank {rank} cannot listen for other ranks: {error}"
        meet(f"{key}/at", json.dumps(astuple(here)))
        neighbors = [(rank + 1) % num_ranks, (rank - 1) % num_ranks]
        after, before = (_Place(*json.loads(store.get(f"{key}/at/{other}"))) for other in neighbors)
        # Two ranks are neighbors on both sides, and one connection is enough.
        connects = not reason and (num_ranks > 2 or rank == 0)
        accepts = not reason and (num_ranks > 2 or rank == 1)
        try:
            if connects:
                links.append((undo.enter_context(_connected(after)), after))
            if accepts:
                links.append((undo.enter_context(_accepted(listener, here, has_given_up)), before))
            if connects and not _brings(links[0][0], after.proof("accepts"), patience.CONNECT_S):
                raise ConnectionError(f"cannot connect to {after.shown}: that is not a rank of this run")
        except OSError as error:
            reason = f"rank {rank} {error}"
        if reason and not has_given_up():  # later ranks fail because this one has
            store.set(f"{key}/why", reason)
        store.add(f"{key}/apart", int(bool(reason)))
        meet(f"{key}/through", "")
        if has_given_up():
            return [], store.get(f"{key}/why").decode()
        undo.pop_all()
        listener.close()
    connections = list[Connection]()
    for link, place in links:
        process = place.process if place.node == here.node else None
        connections.append(Connection(link, place.rank, process))
    return connections, ""


def _connected(place: _Place) -> socket.socket:
    """Returns a connection to that rank, which has the proof and has not answered yet."""
    try:
        link = socket.create_connection((place.address, place.port), patience.CONNECT_S)
        link.sendall(place.proof("connects"))
    except OSError as error:
        raise ConnectionError(f"cannot connect to {place.shown}: {error}") from error
    return link


def _accepted(listener: socket.socket, here: _Place, has_given_up: Callable[[], int]) -> socket.socket:
    """Returns the first connection that brings the proof, and answers it; closes all others."""
    until_s = time.monotonic() + patience.CONNECT_S
    while time.monotonic() < until_s and not has_given_up():
        with contextlib.suppress(TimeoutError):
            link, _ = listener.accept()
            if _brings(link, here.proof("connects"), patience.PROOF_S):
                link.sendall(here.proof("accepts"))
                return link
            link.close()
    raise TimeoutError(f"is not reached at {here.address} port {here.port} by the rank before it")


def _brings(link: socket.socket, proof: bytes, within_s: float) -> bool:
    said = b""
    link.settimeout(within_s)
    with contextlib.suppress(OSError):
        while len(said) < len(proof) and (part := link.recv(len(proof) - len(said))):
            said += part
    return hmac.compare_digest(said, proof)


def own_address(host: str) -> str:
    """Returns the address by which other ranks reach this machine; `host` serves their store, if that is known.

    An interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names decides. Raises OSError if it
    has no address.
    """
    interface = _interface()
    if interface and sys.platform == "linux":
        return _address_of(interface)
    found = _address_towards(host)
    is_local = host == "localhost" or _is_loopback(host)
    if found and (is_local or not _is_loopback(found)):
        return found
    # Some systems give the machine's own name an address that no other machine reaches.
    return next(filter(None, map(_address_towards, _ELSEWHERE)), found or "127.0.0.1")


def host_of(store: Store) -> str:
    """Returns the host that serves a store, or the one that MASTER_ADDR names, or an empty text."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", os.environ.get("MASTER_ADDR", "")))


def _interface() -> str:
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "").split(",")[0]
    if gloo or nccl.startswith("^"):  # all but that one
        return gloo
    if nccl.startswith("="):
        return nccl[1:]
    names = [name for _, name in socket.if_nameindex() if nccl and name.startswith(nccl)]
    return names[0] if names else nccl


def _address_of(interface: str) -> str:
    import fcntl  # there is none on Windows

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope != "20":  # an address of the link needs the other side's name for it
                return str(ipaddress.IPv6Address(int(digits, 16)))
    raise OSError(f"the interface {interface!r}, of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, has no address")


def _address_towards(host: str) -> str:
    """Returns this machine's address on the route to `host`, or an empty text; sends nothing."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else []
        for family, kind, protocol, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    listener.settimeout(patience.LOOK_S)
    return listener


def _meet(store: Store, key: str, told: str, *, rank: int, num_ranks: int, look: Look) -> None:
    """Waits until all ranks have arrived at `key`. Each leaves its text `told` there."""
    store.set(f"{key}/{rank}", told)
    num_here = store.add(key, 1)
    pause_s, look_s = 0.001, time.monotonic() + patience.PROBE_S
    while num_here < num_ranks:
        time.sleep(pause_s)
        pause_s = min(0.25, 1.5 * pause_s)
        num_here = store.add(key, 0)
        if num_here < num_ranks and time.monotonic() > look_s:
            look_s = time.monotonic() + patience.PROBE_S
            look([other for other in range(num_ranks) if not store.check([f"{key}/{other}"])])
