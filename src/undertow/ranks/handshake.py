"""The handshake of a rank with its neighbors: it connects to the next one, while the one before it
connects to it.

Ranks meet in the store of torch.distributed and leave there where they listen, with a random token.
Every rank then does two things at once, so that ranks cannot wait for each other in a circle:

- it connects to the next rank, and sends that rank's token;
- it accepts connections until one has brought its own token.

Then it meets the others again: if one of them was not reached, all give up. The listening socket
lives for the handshake only.

Any number of outsiders can reach the port too, and can send slowly, or nothing. They hold up no
rank, because all connections are served together:

- each has `PROOF_S` for its whole token, however its bytes arrive;
- if too many wait for their token, a new one replaces the oldest;
- bytes of an outsider are never parsed, and only the whole token is compared.

Reasons: docs/design/lost-ranks.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch.distributed.distributed_c10d import Store

from undertow.ranks import patience
from undertow.ranks.connections import Connection
from undertow.ranks.meeting import HOSTS, Meeting, innermost

_BACKLOG = 128
_MAX_UNPROVEN = 64  # connections without a token; far fewer than a process may have open
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK)  # the second one on Windows
# reserved for documents: the route to them is the default one
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_GET_ADDRESS = 0x8915  # Linux: SIOCGIFADDR


def connect_ring(meeting: Meeting) -> list[Connection]:
    """Connects this rank to its neighbors and returns them, the next one first; every rank of the
    ring calls it.

    Raises ConnectionError on every rank, with one reason, if some pair cannot connect.
    """
    rank = meeting.rank
    links, hosts = dict[int, socket.socket](), dict[int, str]()
    here = Place(rank, "", 0, secrets.token_hex(), socket.gethostname())
    with contextlib.ExitStack() as undo:
        try:
            listener = undo.enter_context(_listening(own_address(host_of(meeting.store))))
            address, port, *_ = listener.getsockname()
            here = Place(rank, address, port, here.token, here.host)
        except OSError as error:
            meeting.fail(f"rank {rank} cannot listen for other ranks: {error}")
        meeting.arrive("at", json.dumps([here.address, here.port, here.token, here.host]))
        try:
            if not meeting.has_failed:
                places = _places_of_neighbors(rank, meeting)
                hosts = {place.rank: place.host for place in places.values()}
                if any(host != here.host for host in hosts.values()):
                    meeting.store.set(f"{meeting.key}/{HOSTS}", "")
                links = _neighbors(listener, here, places, meeting)
        except OSError as error:
            meeting.fail(f"rank {rank} {error}")
        for link in links.values():
            undo.callback(link.close)
        meeting.arrive("through")
        if meeting.has_failed:
            raise ConnectionError(meeting.why())
        # Ranks on two hosts or more have neighbors somewhere that are on different ones.
        if not meeting.store.check([f"{meeting.key}/{HOSTS}"]):
            hosts = {}
        undo.pop_all()
        listener.close()
    return [Connection(link, other, hosts.get(other, "")) for other, link in links.items()]


def _places_of_neighbors(rank: int, meeting: Meeting) -> dict[int, Place]:
    """Returns where the next rank and the one before listen, by rank."""
    others = {(rank + 1) % meeting.num_ranks, (rank - 1) % meeting.num_ranks}
    return {other: Place(other, *json.loads(meeting.told_by(other, "at"))) for other in others}


def _neighbors(
    listener: socket.socket, here: Place, places: Mapping[int, Place], meeting: Meeting
) -> dict[int, socket.socket]:
    """Returns the connections to the next rank and to the one before, by rank.

    Returns none if another rank has failed by then. Raises OSError if a neighbor is not connected
    in time.
    """
    # Two ranks are neighbors on both sides, and one connection is enough.
    are_two = meeting.num_ranks == 2
    after, before = (here.rank + 1) % meeting.num_ranks, (here.rank - 1) % meeting.num_ranks
    with contextlib.closing(Handshake(here, before)) as handshake:
        if not are_two or here.rank == 0:
            handshake.connect(places[after])
        if not are_two or here.rank == 1:
            handshake.accept(listener)
        until_s = time.monotonic() + patience.CONNECT_S
        while not handshake.is_done_within(patience.LOOK_S):
            if meeting.is_failing():
                return {}
            if time.monotonic() > until_s:
                raise handshake.why_not()
        return handshake.taken()


@dataclass(frozen=True, slots=True)
class Place:
    """The address of a rank, as it leaves it in the store."""

    rank: int
    address: str
    port: int
    token: str
    host: str = ""  # the name of its machine

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.address} port {self.port}"


@dataclass(slots=True)
class _Proof:
    """The part of the token that a connection has sent, and when its time ends."""

    until_s: float
    said: bytes = b""


class Handshake:
    """The connections of the rank at `here` to its neighbors, until it has taken them."""

    def __init__(self, here: Place, before: int) -> None:
        self._here = here
        self._before = before  # the rank that will connect to this one
        self._token = here.token.encode()
        self._selector = selectors.DefaultSelector()
        self._connecting: Place | None = None
        self._accepting: socket.socket | None = None
        self._unproven: dict[socket.socket, _Proof] = {}  # the oldest first
        self._links: dict[int, socket.socket] = {}

    def connect(self, place: Place) -> None:
        """Starts to connect to the next rank, which is then sent its token."""
        self._connecting = place
        try:
            found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            link = self._links[place.rank] = socket.socket(family, kind, protocol)
            link.setblocking(False)
            code = link.connect_ex(address)
            if code not in _UNDER_WAY:
                _require_success(code)
        except OSError as error:
            raise _not_connected(place, error) from error
        self._selector.register(link, selectors.EVENT_WRITE)

    def accept(self, listener: socket.socket) -> None:
        """Starts to accept connections, until the rank before has brought the token."""
        self._accepting = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def is_done_within(self, limit_s: float) -> bool:
        """Serves all connections; returns True as soon as both neighbors are connected."""
        until_s = time.monotonic() + limit_s
        while self._connecting is not None or self._accepting is not None:
            now_s = time.monotonic()
            if now_s >= until_s:
                return False
            for link, proof in list(self._unproven.items()):
                if proof.until_s <= now_s:
                    self._drop(link)
            next_s = min([until_s, *(proof.until_s for proof in self._unproven.values())])
            for key, _ in self._selector.select(next_s - now_s):
                self._serve(cast(socket.socket, key.fileobj))
        return True

    def _serve(self, link: socket.socket) -> None:
        """Serves a connection, or the listener, that was ready: it may have been dropped since."""
        if link is self._accepting:
            self._accept(link)
        elif link in self._unproven:
            self._read(link, self._unproven[link])
        elif self._connecting is not None and link is self._links.get(self._connecting.rank):
            self._prove(link, self._connecting)

    def taken(self) -> dict[int, socket.socket]:
        """Returns the connections to the neighbors, by rank; `close` leaves them open."""
        links, self._links = self._links, {}
        return links

    def why_not(self) -> OSError:
        """Returns the reason why a neighbor is not connected in time."""
        if self._connecting is not None:
            return _not_connected(self._connecting, TimeoutError("timed out"))
        at = f"{self._here.address} port {self._here.port}"
        return TimeoutError(f"is not reached at {at} by the rank before it")

    def close(self) -> None:
        for link in (*self._unproven, *self._links.values()):
            link.close()
        self._selector.close()

    def _prove(self, link: socket.socket, place: Place) -> None:
        """Sends the next rank its token: connecting to it has succeeded, or failed."""
        try:
            _require_success(link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            link.sendall(place.token.encode())
        except OSError as error:
            raise _not_connected(place, error) from error
        self._selector.unregister(link)
        self._connecting = None

    def _accept(self, listener: socket.socket) -> None:
        # the other side may have gone already
        with contextlib.suppress(BlockingIOError, ConnectionError):
            link, _ = listener.accept()
            link.setblocking(False)
            if len(self._unproven) == _MAX_UNPROVEN:
                self._drop(next(iter(self._unproven)))
            self._unproven[link] = _Proof(time.monotonic() + patience.PROOF_S)
            self._selector.register(link, selectors.EVENT_READ)

    def _read(self, link: socket.socket, proof: _Proof) -> None:
        """Reads the token, or a part of it."""
        part = b""
        try:
            part = link.recv(len(self._token) - len(proof.said))
        except BlockingIOError:
            return
        except OSError:  # it has ended, as if it had sent nothing
            pass
        proof.said += part
        # Never a part of the token: if an outsider could see after which byte a connection is
        # closed, it could guess them one by one.
        if part and len(proof.said) < len(self._token):
            return
        if not secrets.compare_digest(proof.said, self._token):
            self._drop(link)
            return
        del self._unproven[link]
        self._selector.unregister(link)
        self._links[self._before] = link
        self._stop_accepting()

    def _stop_accepting(self) -> None:
        assert self._accepting is not None  # it has accepted the rank before
        self._selector.unregister(self._accepting)
        self._accepting = None
        for link in list(self._unproven):
            self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        del self._unproven[link]
        self._selector.unregister(link)
        link.close()


def _require_success(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


def _not_connected(place: Place, error: OSError) -> ConnectionError:
    return ConnectionError(f"cannot connect to {place}: {error}")


def _listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


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
    return str(getattr(innermost(store), "host", os.environ.get("MASTER_ADDR", "")))


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
