"""What the kernel knows of this process's TCP connections, whoever has made them; nothing is known where it is not Linux's."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass

Socket = tuple[int, int]  # descriptor and inode: numbers are used again

_INFO = 256  # bytes that are asked for
# Where they lie in Linux's struct tcp_info.
_SEGMENT, _UNACKED, _LAST_ACK_MS, _ACKED_BYTES, _UNSENT_BYTES, _BUSY_US, _ROOM = 16, 24, 56, 120, 144, 168, 228


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection to another machine, or to another address of this one."""

    socket: Socket
    here: str  # addresses, without ports
    there: str
    is_unacknowledged: bool  # something that was sent, or that no way out is left for
    silent_s: float  # since the other side's kernel has acknowledged anything, also where nothing was sent
    sent_bytes: int  # that were acknowledged
    busy_s: float  # in which something was on its way, and the other side had room for it


def connections() -> list[Connection]:
    """Those whose two ends have different addresses, now."""
    found = (_connection(number) for number in open_sockets())
    return [connection for connection in found if connection is not None and connection.here != connection.there]


def open_sockets() -> frozenset[Socket]:
    """The sockets of this process, of all kinds."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was the one of the listing
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return frozenset(found)


def address_of_peers(sockets: frozenset[Socket]) -> str | None:
    """Where the other ends of these are; None where they are in no one place."""
    found = {connection.there for number in sockets if (connection := _connection(number)) is not None}
    return found.pop() if len(found) == 1 else None


def _connection(number: Socket) -> Connection | None:
    with contextlib.suppress(OSError, AttributeError, struct.error), _opened(number) as end:
        if end.type != socket.SOCK_STREAM or end.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO)
        busy_us, limited_us = struct.unpack_from("=QQ", info, _BUSY_US)
        return Connection(
            socket=number,
            here=_address(end.getsockname()),
            there=_address(end.getpeername()),
            is_unacknowledged=_number(info, _UNACKED) > 0 or _is_stuck(info),
            silent_s=1e-3 * _number(info, _LAST_ACK_MS),
            sent_bytes=struct.unpack_from("=Q", info, _ACKED_BYTES)[0],
            busy_s=1e-6 * max(0, busy_us - limited_us),
        )
    return None


def _is_stuck(info: bytes) -> bool:
    """Whether something does not leave although the other side has room for it: this machine's own interface is down."""
    return _number(info, _UNSENT_BYTES) > 0 and _number(info, _ROOM) >= 2 * _number(info, _SEGMENT)


def _number(info: bytes, place: int) -> int:
    return int(struct.unpack_from("=I", info, place)[0])


@contextlib.contextmanager
def _opened(number: Socket) -> Iterator[socket.socket]:
    """A second descriptor of it: closing that leaves the connection as it is. OSError if the number is another file's by now."""
    copy = os.dup(number[0])
    try:
        if os.fstat(copy).st_ino != number[1]:
            raise OSError(f"descriptor {number[0]} has been used again")
        end = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with end:
        yield end


def _address(name: tuple[str, int]) -> str:
    return name[0].removeprefix("::ffff:")
