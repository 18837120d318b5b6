"""What gloo has of a broken group is freed by a thread of its own, for that may last until the group's timeout.

A message that gloo could not write any more, for the other rank was gone, fails nobody: the collective that it belongs to
never ends, whatever is tried, and whoever frees the group waits for it. By default that is
`torch.distributed.destroy_process_group()`, in the thread that trains.
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
    """Threads that hold what gloo has of broken groups, each until torch has let go of its group."""

    def __init__(self) -> None:
        self._threads: list[_Thread] = []
        self._taken: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._taking = threading.RLock()  # what is collected in between may have us called again

    def take(self, group: dist.ProcessGroup) -> None:
        """From now on nobody but a thread of ours waits when `group` is freed; does nothing for other backends than gloo."""
        held = private.held_by_gloo(group)
        with self._taking:
            if held is None or held[0] in self._taken:
                return
            self._taken.add(held[0])
            thread = _Thread(*held)
            try:
                thread.start()
            except RuntimeError:  # there are too many, or the interpreter ends
                private.keep_for_ever(held[1])
                return
            self._threads = [*(it for it in self._threads if it.is_alive()), thread]

    def finish(self) -> None:
        """Returns when all groups that torch has let go of are freed, or after half a second: that may last.

        Who begins anew wants the store that the old groups hold to be gone, and no thread may come back when the interpreter is.
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
        self._backend = None  # the last one: here it is waited for


FREEING = LeakedGroups()  # of the process
atexit.register(FREEING.finish)  # behind a destroy_process_group() that the script has registered
