"""Connections from every rank to its two neighbors, which tell ranks at once when another one is gone.

    rank 0 ── rank 1 ── rank 2 ── ... ── rank 0        each line is a gloo process group of two ranks; of two ranks there is one

When a process ends for any reason, the kernel closes its connections and gloo fails the receives posted there. This needs no
heartbeat, no polling, and no server that could die along with a rank. The store of torch.distributed is used only while the ring
is made.
"""

import contextlib
import os
import platform
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from undertow.runtime.peers import patience
from undertow.runtime.torch_private import private

Socket = tuple[str, str]  # descriptor and name with the inode, because descriptors are reused

_MAX_LINE = 1 << 16
_HEADER = struct.Struct("<QH")  # number of frames taken from the opposite direction, bytes used
_FRAME = 4096  # bytes; a frame is always sent whole
_NUM_POSTED = 16  # frames that a neighbor accepts while its Python does not run
_NUM_UNTOLD = 32  # frames after which it acknowledges them, at the latest
_MAX_SENT = 256  # limit on unacknowledged frames
_TAG = 1
_FOR_EVER = timedelta(days=3650)  # gloo's "no limit" means the group's timeout


class Neighbor:
    """The connection to the next or the previous rank. Messages are lines of text.

    They are sent in frames of one size. A send ends when the other side has a receive for it, so several receives are posted
    ahead and a sender never waits. Gloo cannot tell without waiting whether a send has ended, so the other side acknowledges it.
    """

    def __init__(
        self, group: Any, place: int, rank: int, process: int | None = None, sockets: frozenset[Socket] = frozenset()
    ) -> None:
        self.rank = rank
        self._process = process  # its process id if it runs on this machine
        self._sockets = sockets
        self._group = group  # a group of two; this process is rank `place` in it
        self._other = 1 - place
        self._sending = threading.RLock()  # reentrant: freeing a group in the middle of a send may call this again
        self._sent: deque[dist.Work] = deque()  # maybe not taken yet; releasing one could block all that follow
        self._num_sent = 0
        self._num_taken = 0
        self._posted: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._received = b""
        self._thread = threading.Thread()  # not started
        for _ in range(_NUM_POSTED):
            self._post()

    def send(self, line: bytes) -> None:
        """Sends a line from any thread. Drops it if the connection is gone, because reading detects that."""
        room = _FRAME - _HEADER.size
        parts = [(line + b"\n")[start : start + room] for start in range(0, len(line) + 1, room)]
        with self._sending:
            if len(line) < _MAX_LINE and len(self._sent) + len(parts) <= _MAX_SENT:  # otherwise the neighbor is stopped
                for part in parts:
                    self._send(part)

    def read(self) -> tuple[list[bytes], bool]:
        """Waits for lines; returns them, and False if the connection is closed."""
        try:
            work, frame = self._posted.popleft()
            work.wait(_FOR_EVER)
        except (IndexError, RuntimeError):
            return [], False
        self._post()
        data = frame.numpy().tobytes()
        num_taken, size = _HEADER.unpack_from(data)
        with self._sending:
            while self._sent and self._num_sent - len(self._sent) < num_taken:
                self._sent.popleft()
            self._num_taken += 1
            if self._num_taken % _NUM_UNTOLD == 0:
                self._send(b"")
        *lines, self._received = (self._received + data[_HEADER.size : _HEADER.size + size]).split(b"\n")
        if len(self._received) > _MAX_LINE:
            lines, self._received = [*lines, self._received], b""  # a part of a line cannot be parsed and is dropped
        return lines, True

    def listen(self, hear: Callable[["Neighbor", list[bytes], bool], object]) -> None:
        """Reads in a separate thread until the connection is closed."""

        def reads() -> None:
            is_there = True
            while is_there:
                lines, is_there = self.read()
                if lines or not is_there:
                    hear(self, lines, is_there)

        self._thread = threading.Thread(target=reads, name=f"undertow-hears-{self.rank}", daemon=True)
        self._thread.start()

    def is_stopped(self) -> bool:
        """Returns True if a signal has stopped the neighbor's process, as far as this machine can see."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def flush(self, within_s: float) -> None:
        """Waits until all messages are sent; a timeout closes the connection."""
        until_s = time.monotonic() + within_s
        with contextlib.suppress(RuntimeError):
            for work in tuple(self._sent):
                work.wait(timedelta(seconds=max(0.001, until_s - time.monotonic())))

    def close(self) -> None:
        """Closes the connection and ends the reading thread; a thread waiting in gloo would abort the process at exit."""
        group, self._group = self._group, None
        if group is not None:
            private.disconnect(group)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(patience.HEARS_S)

    def forget(self) -> None:
        """Closes the sockets in a child process, which would keep the connection open after its parent has ended.

        It sends nothing.
        """
        for descriptor, _ in self._sockets & open_sockets():
            os.close(int(descriptor))
        # Never freed: gloo would wait for threads that do not exist in the child.
        private.keep_for_ever(self)

    def _post(self) -> None:
        frame, group = torch.zeros(_FRAME, dtype=torch.uint8), self._group
        with contextlib.suppress(RuntimeError):  # the connection is gone: receives posted earlier report it
            if group is not None:
                self._posted.append((group.recv([frame], self._other, _TAG), frame))

    def _send(self, part: bytes) -> None:
        frame = bytearray((_HEADER.pack(self._num_taken, len(part)) + part).ljust(_FRAME, b"\0"))
        group = self._group
        with contextlib.suppress(RuntimeError):
            if group is not None:
                self._sent.append(group.send([torch.frombuffer(frame, dtype=torch.uint8)], self._other, _TAG))
                self._num_sent += 1


def make_ring(
    store: Store, key: str, *, rank: int, num_ranks: int, look: Callable[[Sequence[int]], object]
) -> list[Neighbor] | None:
    """Connects `rank` to its neighbors and returns them, the next one first; every rank of the ring calls it.

    Returns None on every rank if gloo cannot connect some pair. Calls `look` from time to time with the ranks that have not
    arrived; it may raise. The store is asked for nothing that waits.
    """
    meet = partial(_meet, store, rank=rank, num_ranks=num_ranks, look=look)
    meet(f"{key}/at", f"{platform.node()} {os.getpid()}")
    before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    lines = {0} if num_ranks == 2 else {rank, before}  # two ranks are neighbors on both sides, and one line is enough
    neighbors, within = list[Neighbor](), timedelta(seconds=patience.CONNECT_S)
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(RuntimeError):
            device = private.gloo_device()
            # Each line needs both of its ranks. Adjacent lines have different turns; otherwise all ranks could wait in a circle.
            for line in sorted(lines, key=lambda line: (line == num_ranks - 1, line % 2)):
                place, other, were_open = (0, after, open_sockets()) if line == rank else (1, before, open_sockets())
                host, _, process = store.get(f"{key}/at/{other}").decode().rpartition(" ")
                group, here = private.pair(store, f"{key}/line/{line}", place, device, within), host == platform.node()
                neighbors.append(Neighbor(group, place, other, int(process) if here else None, open_sockets() - were_open))
                undo.callback(neighbors[-1].close)
        store.add(f"{key}/apart", int(len(neighbors) < len(lines)))
        meet(f"{key}/through", "")
        if store.add(f"{key}/apart", 0) == 0:
            undo.pop_all()
            return sorted(neighbors, key=lambda neighbor: neighbor.rank != after)
    return None


def open_sockets() -> frozenset[Socket]:
    opened = ((path.name, os.path.basename(os.path.realpath(path))) for path in Path("/proc/self/fd").glob("*"))
    return frozenset(one for one in opened if one[1].startswith("socket:"))


def _meet(store: Store, key: str, told: str, *, rank: int, num_ranks: int, look: Callable[[Sequence[int]], object]) -> None:
    """Waits until all ranks have arrived at `key`. Each leaves its text `told` there."""
    store.set(f"{key}/{rank}", told)
    num_here = store.add(key, 1)
    pause_s, look_s = 0.001, time.monotonic() + patience.PROBE_S
    while num_here < num_ranks:
        time.sleep(pause_s)
        pause_s, num_here = min(0.25, 1.5 * pause_s), store.add(key, 0)
        if num_here < num_ranks and time.monotonic() > look_s:
            look_s = time.monotonic() + patience.PROBE_S
            look([other for other in range(num_ranks) if not store.check([f"{key}/{other}"])])
