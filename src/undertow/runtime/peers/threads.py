"""Threads that may be stuck in gloo after another rank is lost, and that cannot keep a process from exiting."""

import atexit
import multiprocessing.util
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from undertow.runtime.peers import patience
from undertow.runtime.torch_private import private


class WorkerThread(threading.Thread):
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


class Worker:
    """A worker thread that starts at the first `submit`. The process waits for its task at exit, unless `is_broken`.

    A gloo send that is partly in the socket never returns after its connection breaks, whatever is tried. The executors of the
    standard library would wait for it forever.
    """

    def __init__(self, name: str, *, is_broken: Callable[[], bool]) -> None:
        self._name = name
        self._is_broken = is_broken
        self._thread: WorkerThread | None = None
        self._is_over = False

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Runs `work(*args)`, which must not raise, after all earlier tasks. Raises RuntimeError after `shutdown`."""
        if self._is_over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if self._thread is None:
            thread = WorkerThread(self._name, self._is_broken)
            thread.start()  # before the assignment: joining a thread that could not start would fail
            self._thread = thread
            weakref.finalize(self, thread.work.put, None).atexit = False
        self._thread.work.put(partial(work, *args))

    def shutdown(self) -> None:
        """Ends the thread after its last task; does not wait."""
        self._is_over = True
        if self._thread is not None:
            self._thread.work.put(None)


class LeakedGroups:
    """Threads that hold gloo's resources of broken groups, each until torch has released its group.

    Freeing them may last until the group's timeout. If the other rank is gone, a message that gloo could not write never fails.
    Its collective never ends, whatever is tried, and freeing the group blocks on it. By default that happens in
    `torch.distributed.destroy_process_group()`, in the training thread.
    """

    def __init__(self) -> None:
        # Each with the group that torch has to release first.
        self._threads: list[tuple[threading.Thread, weakref.ref[dist.ProcessGroup]]] = []
        self._taking = threading.RLock()  # a garbage collection in between may call this again

    def take(self, group: dist.ProcessGroup) -> None:
        """Moves the wait for freeing `group` to a separate thread; does nothing for backends other than gloo."""
        gloo, backend = private.held_by_gloo(group) or (None, None)
        with self._taking:
            if gloo is None or any(known() is gloo for _, known in self._threads):
                return
            is_let_go = threading.Event()
            weakref.finalize(gloo, is_let_go.set).atexit = False
            thread = threading.Thread(target=_free, args=(is_let_go, [backend]), name="undertow-frees", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # too many threads, or the interpreter is shutting down
                private.keep_for_ever(backend)
                return
            self._threads = [*(known for known in self._threads if known[0].is_alive()), (thread, weakref.ref(gloo))]

    def finish(self) -> None:
        """Waits until all groups that torch has released are freed, but at most half a second.

        A new initialization needs the old groups' store to be gone, and no thread may return after the interpreter has ended.
        """
        until_s = time.monotonic() + patience.FREES_S
        for thread, known in self._threads:
            if known() is None:
                thread.join(max(0.0, until_s - time.monotonic()))


def _free(is_let_go: threading.Event, held: list[object]) -> None:
    is_let_go.wait()
    held.clear()  # drops the last reference, so this thread waits here


def break_group(group: dist.ProcessGroup) -> None:
    """Ends all waits over a group, which cannot be used afterwards."""
    private.interrupt(group)
    FREEING.take(group)


FREEING = LeakedGroups()  # one for the process
atexit.register(FREEING.finish)  # runs after a destroy_process_group() that the script has registered
