"""A thread that runs tasks in order, and that cannot keep a process from exiting after another rank is lost."""

from __future__ import annotations

import atexit
import multiprocessing.util
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from undertow.runtime.peers import patience


class Worker:
    """A worker thread that starts at the first `submit`. The process waits for its task at exit, unless `is_broken`.

    A gloo send that is partly in the socket never returns after its connection breaks, whatever is tried. The executors of the
    standard library would wait for it forever.
    """

    def __init__(self, name: str, *, is_broken: Callable[[], bool]) -> None:
        self._name = name
        self._is_broken = is_broken
        self._thread: _Thread | None = None
        self._is_over = False

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Runs `work(*args)`, which must not raise, after all earlier tasks. Raises RuntimeError after `shutdown`."""
        if self._is_over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if self._thread is None:
            thread = _Thread(self._name, self._is_broken)
            thread.start()  # before the assignment: joining a thread that could not start would fail
            self._thread = thread
            weakref.finalize(self, thread.work.put, None).atexit = False
        self._thread.work.put(partial(work, *args))

    def shutdown(self) -> None:
        """Ends the thread after its last task; does not wait."""
        self._is_over = True
        if self._thread is not None:
            self._thread.work.put(None)


def in_worker() -> bool:
    """Returns True in a worker's thread."""
    return isinstance(threading.current_thread(), _Thread)


class _Thread(threading.Thread):
    """A daemon, which the interpreter does not join at exit: this class joins it, before other ranks are told of the exit."""

    def __init__(self, name: str, is_broken: Callable[[], bool]) -> None:
        super().__init__(name=name, daemon=True)
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._is_broken = is_broken

    def start(self) -> None:
        # Start first. The process may be exiting, because a worker may start another one, and nothing may join a thread that has
        # not started. It cannot end before it is registered, because nothing can tell it to.
        super().start()
        atexit.register(self._is_waited_for)
        # Also if a process ends without atexit.
        self._finalizer = multiprocessing.util.Finalize(None, self._is_waited_for, exitpriority=200)

    def run(self) -> None:
        while (item := self.work.get()) is not None:
            item()
            del item  # otherwise its tensors would stay alive until the next task
        atexit.unregister(self._is_waited_for)
        self._finalizer.cancel()

    def _is_waited_for(self) -> None:
        self.work.put(None)
        while self.is_alive() and not self._is_broken():
            self.join(patience.EXIT_LOOK_S)
        self.join(patience.EXIT_S)
