"""Threads that may be stuck in gloo after another rank is lost, and that cannot keep a process from
exiting."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol

from undertow.ranks import patience


class Group(Protocol):
    """The ranks that a thread may wait for."""

    @property
    def is_left(self) -> bool:
        """True if a rank is lost, or the group is closed."""


def may_be_stuck(groups: weakref.WeakSet[Group]) -> bool:
    """Returns True if a thread that waits for these ranks may never end."""
    return not groups or any(group.is_left for group in groups)


class WorkerThread(threading.Thread):
    """A daemon, which the interpreter does not join at exit.

    `end_workers` does, before other ranks are told of the exit.
    """

    idents: ClassVar[set[int]] = set()  # of those that run

    def __init__(self, name: str, groups: weakref.WeakSet[Group]) -> None:
        super().__init__(name=name, daemon=True)
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.groups = groups

    def run(self) -> None:
        self.idents.add(threading.get_ident())
        is_ending = False
        while not (is_ending and self.work.empty()):  # a task may have submitted a further one
            item = self.work.get()
            if item is None:
                is_ending = True
            else:
                item()
            del item  # otherwise its tensors would stay alive until the next task
        self.idents.discard(threading.get_ident())
        _running.pop(self, None)


class Worker:
    """A worker thread that starts at the first `submit`, and waits for the ranks of `groups`.

    The process waits for its tasks at exit, unless a rank of them is lost.

    A gloo send that is partly in the socket never returns after its connection breaks. Nothing ends
    it. The executors of the standard library would wait for it forever.
    """

    def __init__(self, name: str, *groups: Group) -> None:
        self.groups = weakref.WeakSet[Group](groups)
        self._name = name
        self._thread: WorkerThread | None = None
        self._is_over = False

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Runs `work(*args)`, which must not raise, after all earlier tasks.

        Raises RuntimeError after `shutdown`.
        """
        if self._is_over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if self._thread is None:
            thread = WorkerThread(self._name, self.groups)
            thread.start()  # before it is noted: joining a thread that could not start would fail
            _running[thread] = None
            self._thread = thread
            weakref.finalize(self, thread.work.put, None).atexit = False
        self._thread.work.put(partial(work, *args))

    def shutdown(self) -> None:
        """Ends the thread after its last task; does not wait."""
        self._is_over = True
        if self._thread is not None:
            self._thread.work.put(None)


@atexit.register
def end_workers() -> None:
    """Waits until all workers have done their tasks, except workers whose groups are broken."""
    while threads := list(_running):  # a worker may start another one
        for thread in threads:
            thread.work.put(None)
            while thread.is_alive() and not may_be_stuck(thread.groups):
                thread.join(patience.LOOK_S)
            thread.join(patience.EXIT_S)
            _running.pop(thread, None)


# In the order of their starts: a worker may give tasks to one that has started later.
_running: dict[WorkerThread, None] = {}
