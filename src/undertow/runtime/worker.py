"""A thread that does one thing after the other, and cannot keep a process from ending that has lost another rank."""

from __future__ import annotations

import atexit
import multiprocessing.util
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

_Work = Callable[[], object]

_LOOK_S = 0.1  # between two looks, at exit, whether another rank is lost
_JOIN_S = 1.0  # after that


class Worker:
    """Starts with the first `submit`. What is under way when the process ends is waited for, unless `is_broken`.

    A send of gloo's that is partly in the socket never returns when its connection is gone, whatever is tried: the executors of
    the standard library would wait for it for ever.
    """

    def __init__(self, name: str, *, is_broken: Callable[[], bool]) -> None:
        self._name = name
        self._is_broken = is_broken
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Does `work(*args)`, which must not raise, when all before is done. RuntimeError after `shutdown`."""
        if self._is_over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if self._thread is None:
            self._begin()
        self._work.put(lambda: work(*args))

    def shutdown(self) -> None:
        """Ends the thread when all is done; does not wait."""
        self._is_over = True
        self._work.put(None)

    def _begin(self) -> None:
        # Nobody waits for daemons at exit; we do, before the other ranks are told.
        self._thread = threading.Thread(target=_does, args=(self._work,), name=self._name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._work.put, None).atexit = False
        how = self._work, self._thread, self._is_broken
        atexit.register(_ends, *how)
        multiprocessing.util.Finalize(None, _ends, how, exitpriority=200)  # where a process ends without atexit


def _does(work: queue.SimpleQueue[_Work | None]) -> None:
    while (item := work.get()) is not None:
        item()
        del item


def _ends(work: queue.SimpleQueue[_Work | None], thread: threading.Thread, is_broken: Callable[[], bool]) -> None:
    work.put(None)
    while thread.is_alive() and not is_broken():
        thread.join(_LOOK_S)
    thread.join(_JOIN_S)
