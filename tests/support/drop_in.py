"""Steps of training that a wrapped model and a bare copy of it take side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.naive import naive_mean, require_same_gradients, require_same_parameters
from undertow import DistributedDataParallel

TIMEOUT_S = 20.0  # for a test whose ranks wait for each other for ever if it fails
average_each = naive_mean


class SideBySide:
    """`ddp`, and a bare copy of its module, whose gradients are averaged one by one after backward."""

    def __init__(self, model: nn.Module, bucket_cap_mb: float | None = None) -> None:
        self.module, self.bare = self.both_modules = model, copy.deepcopy(model)
        self.ddp: Any = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        self.both = self.ddp, self.bare

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ddp.close()

    def zero_grad(self) -> None:
        for model in self.both:
            model.zero_grad()

    def backward(self, loss: Callable[[nn.Module], Tensor]) -> None:
        for model in self.both:
            loss(model).backward()

    def compare(self) -> None:
        """Averages the bare model's gradients, which must then be those of the wrapped one."""
        naive_mean(self.bare)
        require_same_gradients(self.ddp, self.bare)
        for ours, wanted in zip(self.module.parameters(), self.bare.parameters(), strict=True):
            if wanted.grad is not None:
                wanted.grad.copy_(ours.grad)  # with three ranks the last bit may differ; that must not grow

    def optimize(self) -> None:
        """A step of plain gradient descent: both models stay the same, and so do all ranks."""
        for model in self.both:
            torch.optim.SGD(model.parameters(), lr=0.125).step()
        self.compare_parameters()

    def compare_parameters(self) -> None:
        require_same_parameters(*self.both_modules)
        require_same_on_every_rank(self.ddp)
        with torch.no_grad():  # as for gradients
            for ours, theirs in zip(self.module.parameters(), self.bare.parameters(), strict=True):
                theirs.copy_(ours)


def require_same_on_every_rank(model: nn.Module) -> None:
    """Every parameter has rank 0's bits."""
    mine = torch.cat([param.detach().flatten().contiguous().view(torch.uint8) for param in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first), [name for name, _ in model.named_parameters()]


def groups_of(*members: Sequence[int]) -> list[dist.ProcessGroup]:
    """The new groups of `members` that this rank is in; a collective call."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    return [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
