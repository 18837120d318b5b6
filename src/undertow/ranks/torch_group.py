"""A process group of torch.distributed's over which this rank may wait, until it is interrupted.

Reasons: docs/design/lost-ranks.md.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from undertow.ranks.group import GroupRef
from undertow.torch_private import process_groups


class TorchGroup:
    """Undertow's clone of a group of the user's, or such a group itself; other groups of the user's
    may be interrupted with it.

    It is referenced weakly, for the reason given in `GroupRef`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, clone_of: GroupRef | None = None
    ) -> None:
        # set by `OwnGroup` when it has made its clone
        self.weak = None if group is None else weakref.ref(group)
        self._clone_of = clone_of
        # communication hooks and torch's join, as long as they use the group that was cloned
        self.borrowers: set[str] = set()
        # of the user's, for the other axes of a mesh: a fault ends waits over them too
        self.others: Sequence[weakref.ref[dist.ProcessGroup]] = ()
        # reentrant: collecting a model here may destroy the group being interrupted
        self._destroying = threading.RLock()

    def existing(self) -> dist.ProcessGroup | None:
        """Returns the group if torch.distributed still has it."""
        return None if self.weak is None or not dist.is_initialized() else self.weak()

    def interrupt(self) -> bool:
        """Ends every wait over it; returns True if groups of other axes of a mesh are among them.

        Called by the thread that listens to other ranks, or by one that is about to raise.
        """
        # otherwise this thread might hold the last reference to a group and destroy it too early
        with self._destroying:
            group = self.existing()
            users = self._clone_of.group if self._clone_of and self.borrowers else None
            others = {other() for other in self.others}
            if group is not None:
                for one in filter(None, {group, users, *others}):
                    process_groups.interrupt(one)
            self.others = ()
        return bool(others)

    def destroy(self, *, is_broken: bool) -> None:
        """Destroys it unless torch.distributed has done so already."""
        with self._destroying:
            group = self.existing()
            if group is not None and is_broken:
                # destroying would otherwise wait for operations in flight
                process_groups.interrupt(group)
            if group is not None:
                # ValueError: torch has forgotten the group, and a gather has held it until now.
                with contextlib.suppress(ValueError):
                    dist.destroy_process_group(group)
