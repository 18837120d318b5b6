"""Training a wrapped model with torch.autograd.grad and undertow.average_gradients, without a backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import undertow
from dist.test_drop_in_tensors import MixedDtypes, Strided
from dist.test_events import collectives
from support.drop_in import LEARNING_RATE, TIMEOUT_S, SideBySide, groups_of, require_same_tensors, squares, with_both_plans
from support.models import Branches, mlp, noise
from support.naive import naive_mean
from support.ranks import Ranks, in_ranks

NUM_STEPS = 3


def set_gradients(model: nn.Module, averaged: tuple[Tensor | None, ...]) -> None:
    for param, grad in zip(model.parameters(), averaged, strict=True):
        param.grad = grad


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in model.parameters()]


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize(
    ("make", "shape"),
    [(mlp, (5, 6)), (MixedDtypes, (3, 4)), (Strided, (3, 4))],
)
def test_gradients_made_by_hand_are_averaged(
    make: Callable[[], nn.Module], shape: tuple[int, ...], bucket_cap_mb: float | None
) -> None:
    """No backward of the wrapped model ever accumulates into `.grad`."""
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(make())
    with SideBySide(models[0], bucket_cap_mb, bare=models[1]) as side:
        optimizers = [torch.optim.SGD(model.parameters(), lr=LEARNING_RATE) for model in side.both]
        for step in range(NUM_STEPS):
            side.zero_grad()
            loss = squares(*shape, step=step)
            local = torch.autograd.grad(loss(side.ddp), list(side.module.parameters()))
            copies = [grad.clone() for grad in local]
            averaged = undertow.average_gradients(local)
            assert type(averaged) is tuple
            assert all(map(torch.equal, local, copies))  # the argument is left as it was
            assert grads_of(side.module) == [None] * len(averaged)
            loss(side.bare).backward()
            naive_mean(side.bare)
            require_same_tensors(averaged, grads_of(side.bare))
            set_gradients(side.module, averaged)
            for optimizer in optimizers:
                optimizer.step()
            side.compare_parameters()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_averaging_by_hand_does_not_disturb_a_backward(bucket_cap_mb: float | None) -> None:
    """A step by hand leaves nothing behind for the next plain one."""
    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(4):
            if step % 2 == 0:
                local = torch.autograd.grad(squares(5, 6, step=step)(side.ddp), list(side.module.parameters()))
                undertow.average_gradients(local)
            side.step(squares(5, 6, step=step))


# Layers that each rank uses; a third rank uses what the first one does.
USES = {"another one on each rank": ((0, 1), (1, 2)), "one on no rank": ((0, 2), (2,)), "none on rank 1": ((0, 2), ())}


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("name", USES)
def test_a_gradient_that_no_rank_has_stays_none(name: str) -> None:
    model, bare = Branches(), Branches()
    bare.load_state_dict(model.state_dict())
    params = list(model.parameters())
    for step in range(NUM_STEPS):
        order = USES[name][dist.get_rank() % 2]
        local: tuple[Tensor | None, ...] = (None,) * len(params)
        bare.zero_grad()
        if order:
            local = torch.autograd.grad(model(noise(2, 4, step=step), order).square().mean(), params, allow_unused=True)
            bare(noise(2, 4, step=step), order).square().mean().backward()
        naive_mean(bare)
        averaged = undertow.average_gradients(local, params)
        require_same_tensors(averaged, grads_of(bare))
        if name == "one on no rank":
            assert [grad is None for grad in averaged] == [False, False, True, True, False, False]


def within_a_group() -> list[float]:
    """Gradients are rank + 1; ranks 0 and 1 average theirs, and the others by themselves."""
    (group,) = groups_of([0, 1], *([rank] for rank in range(2, dist.get_world_size())))
    (averaged,) = undertow.average_gradients([torch.full((2,), dist.get_rank() + 1.0)], process_group=group)
    dist.destroy_process_group(group)
    return averaged.tolist()


def test_gradients_are_averaged_within_a_group(ranks: Ranks) -> None:
    assert ranks.run(within_a_group, timeout_s=TIMEOUT_S) == [[1.5, 1.5], [1.5, 1.5], [3.0, 3.0]][: ranks.num_ranks]


def alone() -> tuple[list[str], list[float]]:
    (group,) = groups_of(*([rank] for rank in range(dist.get_world_size())))
    with collectives() as called:
        (averaged,) = undertow.average_gradients([torch.full((2,), dist.get_rank() + 1.0)], process_group=group)
    dist.destroy_process_group(group)
    return called, averaged.tolist()


def test_one_rank_averages_without_a_collective(ranks: Ranks) -> None:
    assert ranks.run(alone, timeout_s=TIMEOUT_S) == [([], [rank + 1.0] * 2) for rank in range(ranks.num_ranks)]
