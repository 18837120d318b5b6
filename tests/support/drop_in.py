"""Steps of training that a wrapped model and a bare copy of it take side by side."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.models import noise
from support.naive import require_same, require_same_gradients
from undertow import DistributedDataParallel, SyncConfig, attach

TIMEOUT_S = 20.0  # for a test whose ranks wait for each other for ever if it fails
LEARNING_RATE = 0.125

# The largest bucket in MiB: so small that every parameter has a bucket of its own, or whatever the library chooses.
with_both_plans = pytest.mark.parametrize(
    ("ranks", "bucket_cap_mb"),
    [("two_ranks", 1e-6), ("two_ranks", None), ("three_ranks", 1e-6)],
    ids=["two ranks", "two ranks, default plan", "three ranks"],
    indirect=["ranks"],
)

Loss = Callable[[nn.Module], Tensor]


class SideBySide:
    """`ddp`, and a bare copy of its module, whose gradients are averaged one by one after backward."""

    def __init__(
        self,
        model: nn.Module,
        bucket_cap_mb: float | None = None,
        *,
        bare: nn.Module | None = None,  # where a copy would not have the strides of the parameters
        is_attached: bool = False,
        **arguments: Any,
    ) -> None:
        self.bare = copy.deepcopy(model) if bare is None else bare
        self.module = model
        if is_attached:
            self.sync = attach(model, config=SyncConfig(bucket_cap_mb=bucket_cap_mb))
            self.ddp: Any = model
        else:
            self.sync = self.ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **arguments)

    @classmethod
    def of(cls, ddp: DistributedDataParallel, bare: nn.Module) -> Self:
        """Two models that exist."""
        side = cls.__new__(cls)
        side.bare, side.module, side.sync, side.ddp = bare, ddp.module, ddp, ddp
        return side

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync.close()

    @property
    def both(self) -> tuple[Any, nn.Module]:
        return self.ddp, self.bare

    @property
    def both_modules(self) -> tuple[nn.Module, nn.Module]:
        """The wrapped module, and the bare one: what a change is made to."""
        return self.module, self.bare

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        with self.sync.no_sync():
            yield

    def zero_grad(self) -> None:
        for model in self.both:
            model.zero_grad()

    def backward(self, loss: Loss) -> None:
        for model in self.both:
            loss(model).backward()

    def compare(self, *, in_parts: bool = False) -> None:
        """Averages the bare model's gradients, which must then be those of the wrapped one.

        In parts: some came after their bucket had left, so that (a + b) / 2 + (c + d) / 2 stands for
        ((a + c) + (b + d)) / 2, to some units in the last place.
        """
        average_each(self.bare)
        if not in_parts:
            require_same_gradients(self.ddp, self.bare)
        for ours, wanted in zip(self.module.parameters(), self.bare.parameters(), strict=True):
            if wanted.grad is None:
                continue
            if in_parts:
                tolerance = 4 * torch.finfo(wanted.dtype).eps * float(wanted.grad.abs().max())
                torch.testing.assert_close(ours.grad, wanted.grad, rtol=0.0, atol=tolerance)
            wanted.grad.copy_(ours.grad)  # with three ranks the last bit may differ; that must not grow

    def optimize(self) -> None:
        """A step of plain gradient descent: both models stay the same, and so do all ranks."""
        for model in self.both:
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
        self.compare_parameters()

    def compare_parameters(self) -> None:
        require_same(*({name: param.detach() for name, param in module.named_parameters()} for module in self.both_modules))
        require_same_on_every_rank(self.ddp)
        with torch.no_grad():  # as for gradients
            for ours, theirs in zip(self.module.parameters(), self.bare.parameters(), strict=True):
                theirs.copy_(ours)

    def step(self, loss: Loss) -> None:
        """A whole step of training."""
        self.zero_grad()
        self.backward(loss)
        self.compare()
        self.optimize()


def average_each(model: nn.Module) -> None:
    """`naive_mean` for whole models: the same all-reduce for each gradient, but none waits for the one before."""
    params = [param for param in model.parameters() if param.requires_grad]
    has_gradient = torch.tensor([float(param.grad is not None) for param in params])
    dist.all_reduce(has_gradient)
    works = []
    for param, is_somewhere in zip(params, has_gradient.tolist(), strict=True):
        if is_somewhere:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            works.append((dist.all_reduce(param.grad, async_op=True), param))
    for work, param in works:
        work.wait()
        param.grad /= dist.get_world_size()


def require_same_on_every_rank(model: nn.Module) -> None:
    """Every parameter has rank 0's bits."""
    mine = torch.cat([param.detach().flatten().contiguous().view(torch.uint8) for param in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first), [name for name, _ in model.named_parameters()]


def require_same_tensors(ours: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    """To the bit with two ranks; position by position."""
    require_same(dict(enumerate(ours)), dict(enumerate(wanted)))


def squares(*shape: int, step: int = 0) -> Loss:
    """A loss on random numbers of this rank."""
    x = noise(*shape, step=step)
    return lambda model: model(x).square().mean()


def groups_of(*members: Sequence[int]) -> list[dist.ProcessGroup]:
    """The new groups of `members` that this rank is in; a collective call."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    return [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
