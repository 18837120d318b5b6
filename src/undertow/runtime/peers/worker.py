"""A thread that does one thing after the other, and cannot keep a process from ending that has lost another rank."""

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
    """Starts with the first `submit`. What is under way when the process ends is waited for, unless `is_broken`.

    A send of gloo's that is partly in the socket never returns when its connection is gone, whatever is tried: the executors of
    the standard library would wait for it for ever.
    """

    def __init__(self, name: str, *, is_broken: Callable[[], bool]) -> None:
        self._name = name
        self._is_broken = is_broken
        self._thread: _Thread | None = None
        self._is_over = False

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Does `work(*args)`, which must not raise, when all before is done. RuntimeError after `shutdown`."""
        if self._is_over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if self._thread is None:
            thread = _Thread(self._name, self._is_broken)
            thread.start()  # before it is kept: one that cannot start would be waited for
            self._thread = thread
            weakref.finalize(self, thread.work.put, None).atexit = False
        self._thread.work.put(partial(work, *args))

    def shutdown(self) -> None:
        """Ends the thread when all is done; does not wait."""
        self._is_over = True
        if self._thread is not None:
            self._thread.work.put(None)


def in_worker() -> bool:
    """Whether this is the thread of a worker."""
    return isinstance(threading.current_thread(), _Thread)


class _Thread(threading.Thread):
    """Nobody waits for daemons at exit; we do, before the other ranks are told."""

    def __init__(self, name: str, is_broken: Callable[[], bool]) -> None:
        super().__init__(name=name, daemon=True)
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._is_broken = is_broken

    def start(self) -> None:
        # First: the process may end at this moment, for a worker may start another one, and no thread waits for one that has
        # not started. It cannot end before it is registered, for nobody can tell it to.
        super().start()
        atexit.register(self._is_waited_for)
        self._finalizer = multiprocessing.util.Finalize(None, self._is_waited_for, exitpriority=200)  # ends without atexit

    def run(self) -> None:
        while (item := self.work.get()) is not None:
            item()
            del item  # or its tensors would stay alive until the next one
        atexit.unregister(self._is_waited_for)
        self._finalizer.cancel()

    def _is_waited_for(self) -> None:
        self.work.put(None)
        while self.is_alive() and not self._is_broken():
            self.join(patience.EXIT_LOOK_S)
        self.join(patience.EXIT_S)
