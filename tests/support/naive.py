"""What tests in ranks compare with, count, and form groups of: a bare model, and after backward an all-reduce per parameter."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow import DistributedDataParallel, SyncConfig

TIMEOUT_S = 20.0  # for a test whose ranks wait for each other for ever if it fails
COLLECTIVES = ("broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier")


def naive_mean(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Makes every `.grad` the mean over ranks; one that no rank has stays None."""
    params = [param for param in model.parameters() if param.requires_grad]
    num_with_gradient = torch.tensor([float(param.grad is not None) for param in params])
    dist.all_reduce(num_with_gradient, group=group)
    for param, number in zip(params, num_with_gradient.tolist(), strict=True):
        if not number:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)


@contextlib.contextmanager
def wrapped_and_bare(model: nn.Module, **settings: Any) -> Iterator[tuple[DistributedDataParallel, nn.Module]]:
    """`model` under our wrapper, and a bare copy of it."""
    bare = copy.deepcopy(model)
    with wrapped(model, **settings) as ddp:
        yield ddp, bare


def wrapped(
    model: nn.Module, *, process_group: dist.ProcessGroup | None = None, **settings: Any
) -> contextlib.closing[DistributedDataParallel]:
    return contextlib.closing(DistributedDataParallel(model, process_group=process_group, config=SyncConfig(**settings)))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def require_same_gradients(ours: nn.Module, reference: nn.Module) -> None:
    require_same(gradients(ours), gradients(reference))


def require_same(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    """To the bit with two ranks; with more, sums are formed in another order."""
    assert ours.keys() == reference.keys(), (ours.keys(), reference.keys())
    different = [f"{name}: {_text(ours[name])} != {_text(it)}" for name, it in reference.items() if not _is_same(ours[name], it)]
    assert not different, "\n".join(different)


def require_nearly_same(ours: nn.Module, bare: nn.Module) -> None:
    """A part that came late is averaged alone: (a + b) / 2 + (c + d) / 2 in place of ((a + c) + (b + d)) / 2."""
    for param, wanted in zip(ours.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(
            param.grad, wanted.grad, rtol=0.0, atol=4 * torch.finfo(wanted.dtype).eps * float(wanted.grad.abs().max())
        )


def _is_same(ours: Tensor | None, wanted: Tensor | None) -> bool:
    if ours is None or wanted is None:
        return ours is wanted
    if dist.get_world_size() <= 2 or torch.equal(ours, wanted):
        return torch.equal(ours, wanted)
    # Three summands in another order: two roundings of partial sums, each of which is at most about the largest
    # gradient; a few units in the last place of that.
    return torch.allclose(ours, wanted, rtol=0.0, atol=4 * (torch.finfo(wanted.dtype).eps * float(wanted.detach().abs().max())))


def _text(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.flatten()[:3].tolist()}"


def groups_of(*members: Sequence[int]) -> list[dist.ProcessGroup]:
    """The new groups of `members` that this rank is in; a collective call."""
    groups = [dist.new_group(list(ranks)) for ranks in members]
    return [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]


@contextlib.contextmanager
def within(*members: Sequence[int]) -> Iterator[dist.ProcessGroup]:
    """The one of the new groups of `members` that this rank is in, which is destroyed after it."""
    (group,) = groups_of(*members)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def of_all(backend: str) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks over a backend, which is destroyed after it."""
    group = dist.new_group(backend=backend)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def alone() -> contextlib.AbstractContextManager[dist.ProcessGroup]:
    return within(*[[rank] for rank in range(dist.get_world_size())])


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of torch.distributed's collectives as they are called."""
    called: list[str] = []

    def counted(name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return call(*args, **kwargs)

    all_reduce = dist.ProcessGroup.allreduce  # which dist.all_reduce calls too

    def counted_all_reduce(group: dist.ProcessGroup, *args: Any) -> Any:
        called.append("all_reduce")
        return all_reduce(group, *args)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(dist.ProcessGroup, "allreduce", counted_all_reduce))
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, partial(counted, name, getattr(dist, name))))
        yield called
