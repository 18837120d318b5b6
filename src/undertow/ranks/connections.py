"""Connections of a rank to its two neighbors, over TCP, with the standard library alone.

Ranks meet in the store of torch.distributed and leave there where they listen, with a random token.
Every rank then does two things at once, so that ranks cannot wait for each other in a circle:

- it connects to the next rank, and sends that rank's token;
- it accepts connections until one has brought its own token.

Then it meets the others again: if one of them was not reached, all give up.

Outsiders can connect too. `handshake.py` says why they hold up no rank. The listening socket lives
for the handshake only.

A message is a line of JSON.

Reasons: docs/design/lost-ranks.md.
"""

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from undertow.ranks import patience
from undertow.ranks.handshake import Handshake, Place

OnWait = Callable[[Sequence[int]], object]

_MAX_UNSENT = 1 << 20  # bytes for a neighbor that does not read; further messages to it are dropped
_READ = 1 << 18
_BACKLOG = 128
# reserved for documents: the route to them is the default one
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_GET_ADDRESS = 0x8915  # Linux: SIOCGIFADDR
# Firewalls forget connections that say nothing for minutes, so the kernel says something, also
# while Python does not run. It ends a connection whose other machine has not answered for half an
# hour.
_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 15,
    "TCP_USER_TIMEOUT": 1_800_000,
}


class Connection:
    """The connection to the next or the previous rank. Any thread may send.

    The guard's thread reads.
    """

    def __init__(self, link: socket.socket, rank: int) -> None:
        self.rank = rank
        self._link = link
        self._sending = threading.Lock()  # nobody waits for it
        self._unsent = bytearray()
        self._received = b""
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
        """Sends as much as the kernel takes now; `flush` sends the rest.

        Drops the message if the neighbor is stopped.
        """
        if len(self._unsent) < _MAX_UNSENT:
            self._unsent.extend(message + b"\n")
        self.flush()

    def flush(self) -> None:
        """Sends as much as the kernel takes. A connection that is gone takes nothing; reading tells
        that.

        Another caller may be sending, perhaps further up in this thread, because freeing a group in
        the middle of a send calls this again: that one sends this message too, or the guard's next
        round.
        """
        if not self._sending.acquire(blocking=False):
            return
        try:
            while self._unsent:
                del self._unsent[: self._link.send(self._unsent[:_READ])]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        finally:
            self._sending.release()

    def finish(self, within_s: float) -> None:
        """Waits until the kernel has everything, and ends the connection."""
        until_s = time.monotonic() + within_s
        self.flush()
        while self._unsent and time.monotonic() < until_s:
            time.sleep(0.005)
            self.flush()
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self.close()

    def receive(self) -> tuple[list[bytes], bool]:
        """Returns the messages that have arrived, and False if the connection has ended."""
        try:
            data = self._link.recv(_READ)
        except BlockingIOError:
            return [], True
        except OSError:
            data = b""
        *messages, self._received = (self._received + data).split(b"\n")
        return messages, bool(data)

    def close(self) -> None:
        """Closes this process's copy."""
        self._link.close()


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A meeting of ranks in a store, which they ask for nothing that waits.

    `on_wait` is called from time to time with the ranks that have not arrived; it may raise.
    """

    store: Store
    key: str
    rank: int
    num_ranks: int
    on_wait: OnWait

    def arrive(self, place: str, told: str = "") -> None:
        """Leaves the text `told` at a place, and waits until all ranks have arrived there."""
        key = f"{self.key}/{place}"
        self.store.set(f"{key}/{self.rank}", told)
        num_here = self.store.add(key, 1)
        pause_s = 0.001
        look_s = time.monotonic() + patience.PROBE_S
        while num_here < self.num_ranks:
            time.sleep(pause_s)
            pause_s = min(0.25, 1.5 * pause_s)
            num_here = self.store.add(key, 0)
            if num_here < self.num_ranks and time.monotonic() > look_s:
                look_s = time.monotonic() + patience.PROBE_S
                ranks = range(self.num_ranks)
                self.on_wait([rank for rank in ranks if not self.store.check([f"{key}/{rank}"])])

    def told_by(self, rank: int, place: str) -> str:
        """Returns the text that a rank has left at a place where all have arrived."""
        return str(self.store.get(f"{self.key}/{place}/{rank}").decode())

    @property
    def has_failed(self) -> bool:
        return bool(self.store.check([f"{self.key}/why"]))

    def fail(self, why: str) -> None:
        """Tells all ranks the reason, unless they have one: later ranks fail because of it."""
        if not self.has_failed:
            self.store.set(f"{self.key}/why", why)


def connect_ring(meeting: Rendezvous) -> list[Connection]:
    """Connects this rank to its neighbors and returns them, the next one first; every rank of the
    ring calls it.

    Raises ConnectionError on every rank, with one reason, if some pair cannot connect.
    """
    rank = meeting.rank
    links = dict[int, socket.socket]()
    here = Place(rank, "", 0, secrets.token_hex())
    with contextlib.ExitStack() as undo:
        try:
            listener = undo.enter_context(_listening(own_address(host_of(meeting.store))))
            address, port, *_ = listener.getsockname()
            here = Place(rank, address, port, here.token)
        except OSError as error:
            meeting.fail(f"rank {rank} cannot listen for other ranks: {error}")
        meeting.arrive("at", json.dumps([here.address, here.port, here.token]))
        try:
            if not meeting.has_failed:
                links = _neighbors(listener, here, meeting)
        except OSError as error:
            meeting.fail(f"rank {rank} {error}")
        for link in links.values():
            undo.callback(link.close)
        meeting.arrive("through")
        if meeting.has_failed:
            raise ConnectionError(meeting.store.get(f"{meeting.key}/why").decode())
        undo.pop_all()
        listener.close()
    return [Connection(link, other) for other, link in links.items()]


def _neighbors(
    listener: socket.socket, here: Place, meeting: Rendezvous
) -> dict[int, socket.socket]:
    """Returns the connections to the next rank and to the one before, by rank.

    Returns none if another rank has failed meanwhile. Raises OSError if a neighbor is not connected
    in time.
    """
    # Two ranks are neighbors on both sides, and one connection is enough.
    are_two = meeting.num_ranks == 2
    after, before = (here.rank + 1) % meeting.num_ranks, (here.rank - 1) % meeting.num_ranks
    with contextlib.closing(Handshake(here, before)) as handshake:
        if not are_two or here.rank == 0:
            handshake.connect(Place(after, *json.loads(meeting.told_by(after, "at"))))
        if not are_two or here.rank == 1:
            handshake.accept(listener)
        until_s = time.monotonic() + patience.CONNECT_S
        while time.monotonic() < until_s and not meeting.has_failed:
            if handshake.is_done_within(patience.LOOK_S):
                return handshake.taken()
        if not meeting.has_failed:
            raise handshake.why_not()
    return {}


def own_address(host: str) -> str:
    """Returns the address by which other ranks reach this machine; `host` serves their store, if
    that is known.

    The interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names decides, if it has an IPv4
    address.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    if address := _address_of(names.split(",")[0].removeprefix("=")):
        return address
    is_local = host == "localhost" or _is_loopback(host)
    for towards in (host, *_ELSEWHERE):
        found = _address_towards(towards)
        # Some systems give the machine's own name an address that no other machine reaches.
        if found and (is_local or not _is_loopback(found)):
            return found
    return "127.0.0.1"


def host_of(store: Store) -> str:
    """Returns the host that serves a store, or the one that MASTER_ADDR names, or an empty text."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", os.environ.get("MASTER_ADDR", "")))


def _address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface, or an empty text."""
    if sys.platform == "linux" and interface:
        import fcntl  # Windows lacks it

        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)[20:24])
    return ""


def _address_towards(host: str) -> str:
    """Returns this machine's address on the route to `host`, or an empty text; sends nothing."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host or None, 9, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
