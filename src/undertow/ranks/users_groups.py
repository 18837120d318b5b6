"""Waits and collectives over process groups of the user's: they use the watch of a model."""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from undertow.device import device_of
from undertow.ranks.guard import GUARD
from undertow.ranks.handle import Handle, Work
from undertow.ranks.torch_group import TorchGroup


@contextlib.contextmanager
def over_users(group: dist.ProcessGroup | None, what: str = "") -> Iterator[None]:
    """Context for a wait over a group of the user's: it ends with the reason if a rank is gone.

    This works if a model is synchronized over the same ranks. Without a name in `what`, the wait
    may take any time and no rank counts as late. With a name, every rank enters it.
    """
    ring = None if group is None else GUARD.ring_of(tuple(dist.get_process_group_ranks(group)))
    watch = None if ring is None else next(iter(ring.watches.values()), None)
    if group is None or watch is None:
        yield
        return

    users = TorchGroup(group)
    weak = weakref.ref(users)
    watch.groups.append(weak)
    try:
        watch.check()
        if what:
            watch.makes_call(what, ())
        with watch.waiting(what):
            yield
    finally:
        watch.groups.remove(weak)


@dataclass(frozen=True, slots=True)
class _UsersWork:
    """Work over a group of the user's, with the methods of a dist.Work."""

    work: Work
    group: dist.ProcessGroup

    def wait(self) -> None:
        with over_users(self.group, "a reduction over the process group"):
            self.work.wait()

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def get_future(self) -> Any:
        return self.work.get_future()


def all_reduce_over(
    tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Handle:
    """Starts to reduce `tensor` in place over a group of the user's."""
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    return Handle(_UsersWork(work, group), record=device_of(tensor.device).record)


def all_gather_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers a tensor of each rank of the user's group, all of one shape.

    [number of ranks, *shape]
    """
    received = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather(list(received.unbind()), tensor, group=group)
    return received


def broadcast_over(tensor: Tensor, group: dist.ProcessGroup, *, source: int) -> Tensor:
    """Writes the values of rank `source` of the user's group into `tensor`, and returns it."""
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor
