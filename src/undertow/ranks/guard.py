"""The process's one thread that watches: it sleeps until a neighbor sends or dies, and looks at all
waits now and then.

watch_over   makes the watch of a new model; the first one of these ranks connects them
Guard        the rings of this process, their connections, and the ends of a process

Reasons: docs/design/lost-ranks.md.
"""

import contextlib
import logging
import math
import multiprocessing.util
import os
import selectors
import sys
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist

from undertow.config import SyncConfig
from undertow.ranks import faults, patience
from undertow.ranks.activity import Activity
from undertow.ranks.connections import Connection
from undertow.ranks.handshake import connect_ring
from undertow.ranks.meeting import meeting_of
from undertow.ranks.threads import end_workers
from undertow.ranks.watch import NullWatch, Ring, Watch

_log = logging.getLogger("undertow")


def watch_over(
    ranks: tuple[int, ...], rank: int, limits: SyncConfig, here: Activity, *, within_s: float
) -> Watch | NullWatch:
    """Registers a new model of `ranks` of the world; this is rank `rank` of them. A collective
    call.

    Returns a NullWatch if the ranks cannot connect. Raises RankLost if a rank has died earlier, and
    StallTimeout if one does not arrive in time.
    """
    ring = GUARD.ring_of(ranks)
    if ring is None:
        neighbors = []
        with meeting_of(ranks, rank, limits, NullWatch(), within_s) as meeting:
            try:
                neighbors = connect_ring(meeting)
            except ConnectionError as error:
                if rank == 0:
                    faults.tell(_NO_WATCH.format(error=error))
        ring = Ring(neighbors, rank=rank, num_ranks=len(ranks))
        GUARD.adopt(ranks, ring, dist.group.WORLD)
    if not (ring.neighbors or ring.fault or ring.left):  # the ranks could not connect
        return NullWatch()
    watch = ring.join(limits, here)
    watch.check()
    return watch


_NO_WATCH = (
    "the ranks do not watch over each other: {error}.\n"
    "  Training continues, but only the backend and its timeout find lost ranks.\n"
    "  Allow TCP connections between all ranks, on any port."
)


class Guard:
    """All rings of this process, and the single thread that listens to them."""

    def __init__(self) -> None:
        # Each ring ends with torch.distributed's default group.
        self._rings: dict[tuple[int, ...], tuple[Ring, weakref.ref[Any]]] = {}
        self._is_over = False
        self._thread: threading.Thread | None = None

    def ring_of(self, ranks: tuple[int, ...]) -> Ring | None:
        """Returns the ring of these ranks, or None if torch.distributed was initialized again since
        it was made."""
        ring, of_world = self._rings.get(ranks, (None, None))
        return ring if of_world is not None and of_world() is dist.group.WORLD else None

    def adopt(self, ranks: tuple[int, ...], ring: Ring, world: object) -> None:
        if self._thread is None:
            self._begin()
        self._end(ranks)
        self._rings[ranks] = ring, weakref.ref(world, lambda _: self._end(ranks))

    def leave(self, error: BaseException | None) -> None:
        for ring, _ in list(self._rings.values()):
            ring.leave(error)

    def _end(self, ranks: tuple[int, ...]) -> None:
        """Leaves a ring because its process groups are gone or the process is about to end."""
        # Without the weak reference, which would call this at interpreter exit, after modules are
        # gone.
        ring, _ = self._rings.pop(ranks, (None, None))
        if ring is None:
            return
        ring.leave(faults.raised())
        with ring.condition:
            neighbors, ring.neighbors = ring.neighbors, []
        for neighbor in neighbors:
            neighbor.finish(patience.FLUSH_S)

    def _begin(self) -> None:
        thread = threading.Thread(target=self._listen, name="undertow-guard", daemon=True)
        thread.start()
        self._thread = thread
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        # Unlike a handler of atexit, it also runs in processes that multiprocessing has started.
        multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        of_process, of_threads = sys.excepthook, threading.excepthook

        def process_ends(kind: type[BaseException], error: BaseException, trace: Any) -> object:
            self.leave(error)
            return of_process(kind, error, trace)

        def thread_ends(args: Any) -> object:
            thread = args.thread and args.thread.ident
            is_training = any(watch.here.thread == thread for watch in self._watches())
            if args.exc_value is not None and thread is not None and is_training:
                self.leave(args.exc_value)
            return of_threads(args)

        sys.excepthook, threading.excepthook = process_ends, thread_ends

    def _at_exit(self) -> None:
        end_workers()
        self.leave(faults.raised())
        self._is_over = True
        for ranks in list(self._rings):
            self._end(ranks)  # this wakes the thread
        if self._thread is not None:
            self._thread.join(patience.FLUSH_S)

    def _forget(self) -> None:
        """Closes all connections in a child process, which would keep them open after its parent
        has ended."""
        for ring, _ in self._rings.values():
            for neighbor in ring.neighbors:
                neighbor.close()
            ring.neighbors = []
        self.__init__()  # type: ignore[misc]  # the thread does not exist in the child

    def _watches(self) -> list[Watch]:
        return [
            watch for ring, _ in list(self._rings.values()) for watch in list(ring.watches.values())
        ]

    def _listen(self) -> None:
        while not self._is_over:
            try:
                self._listen_once()
            except Exception:
                _log.exception("the thread that listens to other ranks continues after an error.")
                time.sleep(patience.ANSWERS_S)

    def _listen_once(self) -> None:
        with selectors.DefaultSelector() as selector:
            for ring, _ in list(self._rings.values()):
                for neighbor in tuple(ring.neighbors):
                    neighbor.flush()
                    events = selectors.EVENT_READ | (
                        selectors.EVENT_WRITE if neighbor.has_unsent else 0
                    )
                    # Another thread has closed it, or one before it whose number it has.
                    with contextlib.suppress(ValueError, KeyError):
                        selector.register(neighbor, events, (ring, neighbor))
            due_s = min(
                (ring.inquiries.due_s for ring, _ in list(self._rings.values())), default=math.inf
            )
            until_due_s = max(0.0, due_s - time.monotonic())
            ready = selector.select(min(patience.LOOK_S, until_due_s))
        for key, _ in ready:
            self._hear(*key.data)
        for ring, _ in list(self._rings.values()):
            ring.look()
        for watch in self._watches():
            watch.judge()

    def _hear(self, ring: Ring, neighbor: Connection) -> None:
        """Called if a neighbor has sent, or if the connection to it has ended."""
        messages, is_connected = neighbor.receive()
        if not is_connected:
            neighbor.close()
        ring.hear(neighbor, messages, is_connected)


GUARD = Guard()  # one for the process, like sys.excepthook
