"""What gloo has of a broken group is freed by a thread of its own, for that may last until the group's timeout.

A message that gloo could not write any more, for the other rank was gone, fails nobody: the collective that it belongs to
never ends, whatever is tried, and whoever frees the group waits for it. By default that is
`torch.distributed.destroy_process_group()`, in the thread that trains.
"""

from __future__ import annotations

import threading
import weakref

import torch.distributed as dist

from undertow.runtime import private

__all__ = ["FREEING"]


class Freeing:
    """Threads that hold what gloo has of broken groups, each until torch has let go of its group."""

    def __init__(self) -> None:
        self._threads: list[_Thread] = []
        self._taken: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

    def take(self, group: dist.ProcessGroup) -> None:
        """From now on nobody but a thread of ours waits when `group` is freed; does nothing for other backends than gloo."""
        held = private.held_by_gloo(group)
        if held is None or held[0] in self._taken:
            return
        self._taken.add(held[0])
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(_Thread(*held))
        self._threads[-1].start()

    def finish(self, within_s: float) -> None:
        """Returns when all groups that torch has let go of are freed, or not in time: each may last."""
        for thread in self._threads:
            if thread.is_let_go.is_set():
                thread.join(within_s)


class _Thread(threading.Thread):
    def __init__(self, group: dist.ProcessGroup, backend: object) -> None:
        super().__init__(name="undertow-frees", daemon=True)
        self.is_let_go = threading.Event()
        self._backend: object = backend
        weakref.finalize(group, self.is_let_go.set).atexit = False

    def run(self) -> None:
        self.is_let_go.wait()
        self._backend = None  # the last one: here it is waited for


FREEING = Freeing()  # of the process
