"""Connections of a rank to its two neighbors, over TCP, with the standard library alone.

Connection   sends and receives messages; a message is a line of JSON
MessageKind  the kinds of messages

Reasons: docs/design/lost-ranks.md.
"""

import contextlib
import errno
import socket
import threading
import time
from collections import Counter
from enum import StrEnum
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

_MAX_UNSENT = 1 << 20  # bytes for a neighbor that does not read; further messages to it are dropped
# Bytes of a kind of messages for a neighbor that sends nothing meanwhile: an eighth of the memory
# that the kernel has for a process that does not read. If it were full, and stayed so for
# `SILENCE_S`, Linux would end the connection, although the other machine answers.
_MOST_UNHEARD = 1 << 13
_READ = 1 << 18
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


class MessageKind(StrEnum):
    """The `kind` of a message, as it is sent.

    Each message also has the rank that says it (`from`), and, if it is about one model, the
    `number` of the model.

    kind     from whom, when                                  a rank that receives it
    fails    a rank that raises, or whose neighbor is lost    latches the error, ends its waits
    leaves   a rank that closes a model, cannot continue      fails if it waits for that rank
             with it, or ends
    tells    a rank that calls `Watch.ask`, with its digest   keeps it for its own `ask`
             or its text
    answers  a rank that has waited for long, of all ranks    reports them

    Two more kinds, to one neighbor, gather the answers: see `inquiry`.
    """

    # to all ranks
    FAILS = "fails"
    LEAVES = "leaves"
    TELLS = "tells"
    ANSWERS = "answers"
    # to one neighbor
    ASKS = "asks"
    DOES = "does"


DIRECTED = (MessageKind.ASKS, MessageKind.DOES)


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
