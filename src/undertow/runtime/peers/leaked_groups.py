"""Frees gloo's resources of a broken group in a separate thread, because that may last until the group's timeout.

If the other rank is gone, a message that gloo could not write never fails. Its collective never ends, whatever is tried, and
freeing the group blocks on it. By default that happens in `torch.distributed.destroy_process_group()`, in the training thread.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref

import torch.distributed as dist

from undertow.runtime.peers import patience
from undertow.runtime.torch_private import private

__all__ = ["FREEING"]


class LeakedGroups:
    """Threads that hold gloo's resources of broken groups, each until torch has released its group."""

    def __init__(self) -> None:
        self._threads: list[_Thread] = []
        self._taken: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._taking = threading.RLock()  # a garbage collection in between may call this again

    def take(self, group: dist.ProcessGroup) -> None:
        """Moves the wait for freeing `group` to a separate thread; does nothing for backends other than gloo."""
        held = private.held_by_gloo(group)
        with self._taking:
            if held is None or held[0] in self._taken:
                return
            self._taken.add(held[0])
            thread = _Thread(*held)
            try:
                thread.start()
            except RuntimeError:  # too many threads, or the interpreter is shutting down
                private.keep_for_ever(held[1])
                return
            self._threads = [*(it for it in self._threads if it.is_alive()), thread]

    def finish(self) -> None:
        """Waits until all groups that torch has released are freed, but at most half a second.

        A new initialization needs the old groups' store to be gone, and no thread may return after the interpreter has ended.
        """
        until_s = time.monotonic() + patience.FREES_S
        for thread in self._threads:
            if thread.is_let_go.is_set():
                thread.join(max(0.0, until_s - time.monotonic()))


class _Thread(threading.Thread):
    def __init__(self, group: dist.ProcessGroup, backend: object) -> None:
        super().__init__(name="undertow-frees", daemon=True)
        self.is_let_go = threading.Event()
        self._backend: object = backend
        weakref.finalize(group, self.is_let_go.set).atexit = False

    def run(self) -> None:
        self.is_let_go.wait()
        self._backend = None  # drops the last reference, so this thread waits here


FREEING = LeakedGroups()  # one for the process
atexit.register(FREEING.finish)  # runs after a destroy_process_group() that the script has registered
