"""Connections of every rank to its two neighbors, by which ranks learn at once that another one is gone.

    rank 0 ── rank 1 ── rank 2 ── ... ── rank 0        one process group of two ranks for each line, of gloo's

The kernel closes a process's connections when it ends, whatever has ended it, and gloo then fails the receives that are
posted there: no heartbeat, no polling, and no server that could be lost with a rank. The store of torch.distributed is
needed while the ring is made, and never again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from undertow.foreign import parsed_json, printable
from undertow.runtime.peers import patience
from undertow.runtime.torch_private import private

__all__ = ["Neighbor", "Store", "close_all", "make_ring"]

Message = dict[str, Any]
Socket = tuple[int, int]  # descriptor and inode: numbers are used again

_log = logging.getLogger("undertow")

_MAX_LINE = 1 << 16
_HEADER = struct.Struct("<QH")  # frames taken of those that came the other way, bytes used
_FRAME = 4096  # bytes, of which all travel
_NUM_POSTED = 16  # frames that a neighbor takes while its Python does not run
_NUM_UNTOLD = 32  # frames after which it says that it has them, at the latest
_MAX_SENT = 256  # frames of which it has not said so
_TAG = 1
_FOR_EVER = timedelta(days=3650)  # gloo's "no limit" means that of the group


class Store(Protocol):
    """What of torch.distributed's stores is needed; none of it waits."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def add(self, key: str, amount: int, /) -> int: ...


class Neighbor:
    """The connection to the next rank, or the one before. Messages are lines of JSON: nothing is unpickled.

    Lines travel in frames of one size. A send ends when the other side has a receive for it, so some are posted ahead, and
    who sends never waits. Gloo does not tell whether a send has ended without waiting for it: the other side says so.
    """

    def __init__(
        self, group: Any, place: int, rank: int, process: int | None = None, sockets: frozenset[Socket] = frozenset()
    ) -> None:
        self.rank = rank
        self._process = process  # its number, where it runs on this machine
        self._sockets = sockets
        self._group = group  # of two; this process is number `place`
        self._other = 1 - place
        self._sending = threading.RLock()  # a group that is freed in the middle of a send may have us leave
        self._sent: deque[dist.Work] = deque()  # that the other side may not have taken, or all that follow were stuck
        self._num_sent = 0
        self._num_taken = 0
        self._posted: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._received = b""
        self._thread: threading.Thread | None = None
        for _ in range(_NUM_POSTED):
            self._post()

    def send(self, message: Message) -> None:
        """From any thread. What cannot be sent is dropped: whoever reads learns that the connection is gone."""
        line = json.dumps(message).encode() + b"\n"
        if len(line) > _MAX_LINE:
            return
        room = _FRAME - _HEADER.size
        parts = [line[start : start + room] for start in range(0, len(line), room)]
        with self._sending:
            if len(self._sent) + len(parts) <= _MAX_SENT:  # else it is stopped
                for part in parts:
                    self._send(part)

    def read(self) -> tuple[list[Message], bool]:
        """The messages that have come, and whether the connection still stands; waits where nothing has come."""
        try:
            work, frame = self._posted.popleft()
            work.wait(_FOR_EVER)
        except (IndexError, RuntimeError):
            return [], False
        self._post()
        self._take(frame.numpy().tobytes())
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > _MAX_LINE:
            self._received = b""
            self._drop("it is too long")
        return [message for line in lines if (message := self._message(line)) is not None], True

    def listen(self, hear: Callable[[Neighbor, list[Message], bool], object]) -> None:
        """Reads in a thread of its own, until the connection is gone."""

        def reads() -> None:
            is_there = True
            while is_there:
                messages, is_there = self.read()
                if messages or not is_there:
                    hear(self, messages, is_there)

        thread = threading.Thread(target=reads, name=f"undertow-hears-{self.rank}", daemon=True)
        thread.start()
        self._thread = thread  # now: `close` waits for it, and for none that has not started

    def is_stopped(self) -> bool:
        """Whether a signal keeps its process from running, as far as can be seen from here."""
        try:
            status = Path(f"/proc/{self._process}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    def flush(self, within_s: float) -> None:
        """Returns when what was sent is on its way, or not in time, which ends the connection."""
        until_s = time.monotonic() + within_s
        with contextlib.suppress(RuntimeError):
            for work in tuple(self._sent):
                work.wait(timedelta(seconds=max(0.001, until_s - time.monotonic())))

    def close(self) -> None:
        """Ends the connection, and the thread that reads: the process would abort if it ended with one that waits in gloo."""
        group, self._group = self._group, None
        if group is not None:
            private.disconnect(group)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(patience.HEARS_S)

    def forget(self) -> None:
        """In a child process, which would keep the connection open when we are gone; nothing may be said over it there."""
        for number, inode in self._sockets:
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == inode:
                    os.close(number)
        # Never freed: gloo would wait for threads that are not in the child.
        private.keep_for_ever(self)

    def _post(self) -> None:
        frame, group = torch.zeros(_FRAME, dtype=torch.uint8), self._group
        with contextlib.suppress(RuntimeError):  # the connection is gone: what was posted before tells
            if group is not None:
                self._posted.append((group.recv([frame], self._other, _TAG), frame))

    def _send(self, part: bytes) -> None:
        frame = bytearray((_HEADER.pack(self._num_taken, len(part)) + part).ljust(_FRAME, b"\0"))
        group = self._group
        with contextlib.suppress(RuntimeError):
            if group is not None:
                self._sent.append(group.send([torch.frombuffer(frame, dtype=torch.uint8)], self._other, _TAG))
                self._num_sent += 1

    def _message(self, line: bytes) -> Message | None:
        try:
            message = parsed_json(line)
        except ValueError as error:
            self._drop(str(error))
            return None
        if isinstance(message, dict):
            return message
        self._drop(f"it is a {type(message).__name__}")
        return None

    def _drop(self, reason: str) -> None:
        _log.warning("a message of rank %d cannot be read and is dropped: %s.", self.rank, printable(reason))

    def _take(self, frame: bytes) -> None:
        num_taken, size = _HEADER.unpack_from(frame)
        self._received += frame[_HEADER.size : _HEADER.size + size]
        with self._sending:
            while self._sent and self._num_sent - len(self._sent) < num_taken:
                self._sent.popleft()
            self._num_taken += 1
            if self._num_taken % _NUM_UNTOLD == 0:
                self._send(b"")


def make_ring(
    store: Store,
    key: str,
    *,
    rank: int,
    num_ranks: int,
    is_gone: Callable[[int], bool],
    each: Callable[[Sequence[int]], object],
) -> list[Neighbor] | int | None:
    """The two neighbors of `rank`, the next one first; a call for every rank of the ring.

    None where gloo cannot connect some two of them: then no rank has a ring. The number of a rank that `is_gone`, where one
    is. `each` is called now and then with the ranks that have not come, and may raise.
    """
    store.set(f"{key}/at/{rank}", json.dumps({"host": platform.node(), "process": os.getpid()}))
    store.add(f"{key}/here", 1)

    def missing(place: str) -> list[int]:
        return [other for other in range(num_ranks) if not store.check([f"{key}/{place}/{other}"])]

    found = _meet(store, f"{key}/here", num_ranks, is_gone=is_gone, missing=partial(missing, "at"), each=each)
    if found is not None:
        return found
    neighbors = _connect(store, key, rank=rank, num_ranks=num_ranks)
    if neighbors is None:
        store.add(f"{key}/apart", 1)
    store.set(f"{key}/through/{rank}", "")
    store.add(f"{key}/done", 1)
    found = _meet(store, f"{key}/done", num_ranks, is_gone=is_gone, missing=partial(missing, "through"), each=each)
    if found is None and neighbors is not None and store.add(f"{key}/apart", 0) == 0:
        return neighbors
    close_all(neighbors or ())
    return found


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


def close_all(neighbors: Sequence[Neighbor]) -> None:
    for neighbor in neighbors:
        neighbor.close()


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
    pause_s, probe_s = 0.001, time.monotonic() + patience.PROBE_S
    while store.add(key, 0) < num_ranks:
        time.sleep(pause_s)
        pause_s = min(0.25, 1.5 * pause_s)
        if time.monotonic() > probe_s:
            probe_s = time.monotonic() + patience.PROBE_S
            late = missing()
            gone = next((other for other in late if is_gone(other)), None)
            if gone is not None:
                return gone
            each(late)
    return None


def _connect(store: Store, key: str, *, rank: int, num_ranks: int) -> list[Neighbor] | None:
    before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    process = _process_of(store.get(f"{key}/at/{after}"))
    groups, sockets, within = {}, {}, timedelta(seconds=patience.CONNECT_S)
    try:
        device = private.gloo_device()
        # Each waits for its other rank. Lines that touch have different turns: else all could wait round the ring.
        for line in sorted((rank, before), key=lambda line: (line == num_ranks - 1, line % 2)):
            were_open = open_sockets()
            groups[line] = private.pair(store, f"{key}/line/{line}", int(line != rank), device, within)
            sockets[line] = open_sockets() - were_open
    except RuntimeError:
        for group in groups.values():
            private.disconnect(group)
        return None
    return [
        Neighbor(groups[rank], 0, after, process, sockets[rank]),
        Neighbor(groups[before], 1, before, None, sockets[before]),
    ]


def _process_of(told: bytes) -> int | None:
    """The number of a rank's process, where it runs on this machine."""
    with contextlib.suppress(ValueError):
        match parsed_json(told):
            case {"host": str(host), "process": int(process)} if host == platform.node():
                return process
    return None
