"""The thread that listens to other ranks: it sleeps until a neighbor sends, a neighbor dies, or a wait is long."""

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from undertow.runtime.peers import patience
from undertow.runtime.peers.faults import raised
from undertow.runtime.peers.neighbor import close_all
from undertow.runtime.peers.ring import ModelMonitor, Ring
from undertow.runtime.peers.threads import FREEING

__all__ = ["GUARD"]

_log = logging.getLogger("undertow")


class PeerMonitor:
    """All rings of this process, and the single thread that listens to them."""

    def __init__(self) -> None:
        # Each ring ends with torch.distributed's default group. If a stuck thread holds that until the interpreter ends, nothing
        # is left to do.
        self._rings: dict[tuple[int, ...], tuple[Ring, weakref.ref[Any]]] = {}
        self._heard: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_over = False
        self._thread: threading.Thread | None = None

    def ring_of(self, ranks: tuple[int, ...], world: object) -> Ring | None:
        """Returns the ring of these ranks, or None if torch.distributed was initialized again since it was made."""
        ring, of_world = self._rings.get(ranks, (None, None))
        return ring if of_world is not None and of_world() is world else None

    def adopt(self, ranks: tuple[int, ...], ring: Ring, world: object) -> None:
        """Starts to listen to a ring."""
        if self._thread is None:
            self._begin()
        self._end(ranks)
        self._rings[ranks] = ring, weakref.ref(world, lambda _: self._end(ranks))
        for neighbor in ring.neighbors:
            neighbor.listen(lambda *heard: self._heard.put(partial(ring.hear, *heard)))
        self.wake()

    def wake(self) -> None:
        self._heard.put(int)

    def leave(self, error: BaseException | None) -> None:
        """Sends the last messages of this process."""
        for ring, _ in list(self._rings.values()):
            ring.leave(error)

    def _end(self, ranks: tuple[int, ...]) -> None:
        """Leaves a ring because its process groups are gone or the process is about to end."""
        # Without the weak reference, which would call this at interpreter exit, after modules are gone.
        ring, _ = self._rings.pop(ranks, (None, None))
        if ring is None:
            return
        ring.leave(raised())
        with ring.condition:
            neighbors, ring.neighbors = ring.neighbors, []
        for neighbor in neighbors:
            neighbor.flush(patience.FLUSH_S)
        close_all(neighbors)
        FREEING.finish()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._listen, name="undertow-guard", daemon=True)
        thread.start()
        self._thread = thread
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        # multiprocessing may end a process without atexit; its finalizers still run.
        multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        atexit.register(self._at_exit)
        self._leave_before_end()

    def _leave_before_end(self) -> None:
        """Leaves with an exception that ends the process or a thread that was the last to train or create a model."""
        of_process, of_threads = sys.excepthook, threading.excepthook

        def process_ends(kind: type[BaseException], error: BaseException, trace: Any) -> object:
            self.leave(error)
            return of_process(kind, error, trace)

        def thread_ends(args: Any) -> object:
            trains = any(args.thread is not None and member.here.thread == args.thread.ident for member in self._members())
            if args.exc_value is not None and trains:
                self.leave(args.exc_value)
            return of_threads(args)

        sys.excepthook, threading.excepthook = process_ends, thread_ends

    def _at_exit(self) -> None:
        self.leave(raised())
        for member in self._members():
            if member.known_fault is not None:  # the process may abort if broken groups still exist when it ends
                # An error in one group must not stop the rest of the exit.
                with contextlib.suppress(RuntimeError, ValueError):
                    member.destroy()
        for ranks in list(self._rings):
            self._end(ranks)
        self._is_over = True
        self.wake()
        if self._thread is not None:
            self._thread.join(patience.FLUSH_S)

    def _forget(self) -> None:
        """Closes all connections in a child process."""
        for ring, _ in self._rings.values():
            for neighbor in ring.neighbors:
                neighbor.forget()
            ring.neighbors = []
        self.__init__()  # type: ignore[misc]  # the thread does not exist in the child

    def _members(self) -> list[ModelMonitor]:
        return [member for ring, _ in list(self._rings.values()) for member in list(ring.members.values())]

    def _listen(self) -> None:
        while not self._is_over:
            try:
                pause_s = min((member.pause_s() for member in self._members()), default=None)  # for ever, if nothing is trained
                with contextlib.suppress(queue.Empty):
                    self._heard.get(timeout=pause_s)()
                for member in self._members():
                    member.look()
            except Exception:
                _log.exception("the thread that listens to other ranks continues after an error.")
                time.sleep(patience.ANSWERS_S)


GUARD = PeerMonitor()  # one for the process, like sys.excepthook
