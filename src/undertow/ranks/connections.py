"""Connections of a rank to its two neighbors, over TCP, with the standard library alone.

Connection            sends and receives messages; a message is a line of JSON
own_address, host_of  the addresses of this machine, and of a store

Reasons: docs/design/lost-ranks.md.
"""

import contextlib
import errno
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter

from torch.distributed.distributed_c10d import Store

_MAX_UNSENT = 1 << 20  # bytes for a neighbor that does not read; further messages to it are dropped
# Bytes of a kind of messages for a neighbor that sends nothing meanwhile: an eighth of the memory
# that the kernel has for a process that does not read. If it were full, and stayed so for
# `SILENCE_S`, Linux would end the connection, although the other machine answers.
_MOST_UNHEARD = 1 << 13
_READ = 1 << 18
# reserved for documents: the route to them is the default one
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_GET_ADDRESS = 0x8915  # Linux: SIOCGIFADDR
# The kernel sends heartbeats, because it does so while Python does not run, and answers those of a
# process that is paused: only a machine that is out of reach is silent. A message of a process each
# second would fill the memory of a paused one, which looks like a silent machine.
SILENCE_S = 10
_OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 4,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 1000 * SILENCE_S,  # of data that is not acknowledged
}
# Errors of a connection whose other machine does not answer.
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Connection:
    """The connection to the next or the previous rank. Any thread may send.

    The guard's thread reads.
    """

    def __init__(self, link: socket.socket, rank: int, host: str = "") -> None:
        self.rank = rank
        self.host = host  # of that rank, if the ranks are on several; otherwise empty
        self._link = link
        self._sending = threading.Lock()  # never waited for
        self._unsent = bytearray()
        self._received = b""
        # Bytes of each kind of messages about a wait, since the neighbor has sent anything.
        self._unheard = Counter[str]()
        self.is_silent = False  # it has ended because the other machine does not answer
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

    def send(self, message: bytes, *, about_wait: str = "") -> None:
        """Sends as much as the kernel takes now; `flush` sends the rest.

        Drops the message if the neighbor is stopped, and earlier if it is of a kind `about_wait`: a
        neighbor that runs answers queries. Each kind counts alone, because nobody replies to
        answers, and they must not keep the next query back.
        """
        if about_wait:
            unheard = self._unheard[about_wait]
            if unheard and unheard + len(message) > _MOST_UNHEARD:
                return
            self._unheard[about_wait] += len(message)
        if len(self._unsent) < _MAX_UNSENT:
            self._unsent.extend(message + b"\n")
        self.flush()

    def flush(self) -> None:
        """Sends as much as the kernel takes. A connection that is gone takes nothing; reading
        detects it.

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
        except OSError as error:
            self.is_silent = self.is_silent or error.errno in _SILENT  # reading finds no error then
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
        except OSError as error:
            self.is_silent = self.is_silent or error.errno in _SILENT
            data = b""
        if data:
            self._unheard.clear()
        *messages, self._received = (self._received + data).split(b"\n")
        return messages, bool(data)

    def close(self) -> None:
        """Closes this process's copy."""
        self._link.close()


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


def innermost(store: Store) -> Store:
    """Returns the store that prefixes of keys lead to."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


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
