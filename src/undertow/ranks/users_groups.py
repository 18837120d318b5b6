"""Collectives over process groups of the user's, which have no watch of their own."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from undertow.device import device_of
from undertow.ranks.guard import over_users
from undertow.ranks.handle import Handle, Work


@dataclass(frozen=True, slots=True)
class _UsersWait:
    """A wait over a group of the user's."""

    group: dist.ProcessGroup

    def complete(self, work: Work) -> None:
        with over_users(self.group, "a reduction over the process group"):
            work.wait()


def all_reduce_over(
    tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Handle:
    """Starts to reduce `tensor` in place over a group of the user's."""
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    return Handle(work, waiter=_UsersWait(group), record=device_of(tensor.device).record)


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
