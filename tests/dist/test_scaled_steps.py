"""torch's GradScaler where ranks see different gradients, or none: all of them skip the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.drop_in import TIMEOUT_S, SideBySide
from support.mixture import SGD, loss, mixture, reduce_naively, require_equal_values, wrapped_mixture
from support.models import Branches, noise
from support.ranks import Ranks
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig, clip_grad_norm_

NUM_STEPS = 6
SCALE = 2.0**10
OVERFLOWS = {1: 1, 4: 2}  # by step, the rank whose expert has an infinity; its peer of the group gets it too
Optimizers = Callable[[DistributedDataParallel], list[torch.optim.Optimizer]]


def one(ddp: DistributedDataParallel) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(ddp.parameters(), **SGD)]


def fused(ddp: DistributedDataParallel) -> list[torch.optim.Optimizer]:
    """Scalers leave unscaling to it."""
    return [torch.optim.SGD(ddp.parameters(), fused=True, **SGD)]


def one_for_each_part(ddp: DistributedDataParallel) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([param for _, param in part.named_parameters()], **SGD) for part in (ddp.sync, *ddp.sync.experts)]


def sharded(ddp: DistributedDataParallel) -> list[torch.optim.Optimizer]:
    parts = (ddp.sync, *ddp.sync.experts)
    return [ShardedOptimizer(torch.optim.SGD, part, [param for _, param in part.named_parameters()], **SGD) for part in parts]


def with_overflow(ddp: DistributedDataParallel, step: int) -> Tensor:
    """Of an expert's weight alone: the dense gradients stay finite on every rank."""
    value = loss(ddp, step)
    if dist.get_rank() == OVERFLOWS.get(step):
        value = value + ddp.module.experts["1"].weight[0, 0] * float("inf")
    return value


def trains_alike(make: Optimizers, unscales: bool, settings: dict[str, Any]) -> list[float]:
    """The references know which steps to leave out; scales are powers of two, which change no bit but the exponent."""
    scales = []
    with wrapped_mixture(mixture(), **settings) as (ddp, bare, group):
        optimizers = make(ddp)
        how = {**SGD, "fused": make is fused or None}  # its kernel rounds otherwise
        dense = torch.optim.SGD([*bare.before.parameters(), *bare.after.parameters()], **how)
        experts = torch.optim.SGD(bare.experts.parameters(), **how)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
        for step in range(NUM_STEPS):
            for optimizer in (*optimizers, dense, experts):
                optimizer.zero_grad()
            scaler.scale(with_overflow(ddp, step)).backward()
            for optimizer in optimizers if unscales else ():
                scaler.unscale_(optimizer)
            if unscales:
                clip_grad_norm_(ddp, 1e9)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            loss(bare, step).backward()
            reduce_naively(bare, group)
            if step not in OVERFLOWS:
                experts.step()
            elif unscales:  # and clipped by an infinite norm
                for param in dense.param_groups[0]["params"]:
                    param.grad.zero_()
            if step not in OVERFLOWS or len(optimizers) == 2:  # a scaler leaves out the step of one optimizer, not of others
                dense.step()
            ddp.wait()
            require_equal_values(ddp.module, bare)
    return scales


@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_, clip, step"])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (one, {}),
        (fused, {}),
        (one_for_each_part, {}),
        (sharded, {"strategy": "zero1"}),
        (sharded, {"strategy": "zero2"}),
    ],
    ids=lambda it: getattr(it, "__name__", str(it)),
)
def test_an_overflow_in_an_expert_is_everybodys(
    four_ranks: Ranks, make: Optimizers, settings: dict[str, Any], unscales: bool
) -> None:
    expected = [SCALE, SCALE / 2, SCALE / 2, SCALE, SCALE / 2, SCALE / 2]
    assert four_ranks.run(trains_alike, make, unscales, settings, timeout_s=TIMEOUT_S) == [expected] * 4


def experts_frozen_and_unused() -> list[float]:
    """Experts of some ranks are not trained at all, those of others have no gradients: theirs looks at nothing."""
    scales, model = [], mixture()
    model.experts.requires_grad_(dist.get_rank() % 2 == 1)
    with wrapped_mixture(model) as (ddp, _, _):
        optimizers = one_for_each_part(ddp)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            value = ddp(noise(3, 6, step=step), (0,) if dist.get_rank() == 1 and step else ()).sum()
            factor = float("inf") if dist.get_rank() == 3 and step == 1 else 1.0
            scaler.scale(value * factor).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        for param in ddp.module.before.parameters():
            values = [torch.empty_like(param) for _ in range(4)]
            dist.all_gather(values, param.detach())
            assert all(torch.equal(value, param) for value in values)
    return scales


def test_experts_without_gradients_do_not_stop_a_scaler(four_ranks: Ranks) -> None:
    assert four_ranks.run(experts_frozen_and_unused, timeout_s=TIMEOUT_S) == [[SCALE, SCALE / 2, SCALE / 2]] * 4


def branches_loss(model: nn.Module, step: int) -> Tensor:
    return model(noise(2, 4, step=step), (0, 1, 2)).square().mean()


def nothing_reached(set_to_none: bool) -> list[float]:
    """Rank 1's backward reaches no parameter in steps 1 and 2, of which the second overflows on rank 0."""
    scales = []
    with SideBySide(Branches(), 1e-6) as side:
        ours, reference = (torch.optim.SGD(model.parameters(), lr=0.125) for model in side.both)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for step in range(4):
            for optimizer in (ours, reference):
                optimizer.zero_grad(set_to_none=set_to_none)
            value = scaler.scale(branches_loss(side.ddp, step))
            if step in (1, 2) and dist.get_rank() == 1:
                value.detach().requires_grad_().backward()
            else:
                (value * (float("inf") if step == 2 and dist.get_rank() == 0 else 1.0)).backward()
                branches_loss(side.bare, step).backward()
            scaler.step(ours)
            scaler.update()
            scales.append(scaler.get_scale())
            if step != 2:
                side.compare()
                reference.step()
            side.compare_parameters()
    return scales


def nothing_reached_and_clipped(strategy: str, by_optimizer: bool) -> float:
    """In the second step rank 1's backward reaches no parameter, and the norm is the first that asks."""
    ddp = DistributedDataParallel(Branches(), config=SyncConfig(strategy=strategy))
    optimizer: Any = (
        torch.optim.SGD(ddp.parameters(), lr=0.125) if strategy == "ddp" else ShardedOptimizer(torch.optim.SGD, ddp, lr=0.125)
    )
    for step in range(2):
        optimizer.zero_grad()
        value = branches_loss(ddp, step)
        if step == 1 and dist.get_rank() == 1:
            value = value.detach().requires_grad_()
        value.backward()
        total = optimizer.clip_grad_norm_(1e9) if by_optimizer else clip_grad_norm_(ddp, 1e9)
        optimizer.step()
    ddp.close()
    return total.item()


@pytest.mark.parametrize(("strategy", "by_optimizer"), [("ddp", False), ("zero1", False), ("zero1", True), ("zero2", True)])
def test_a_rank_without_gradients_joins_before_they_are_clipped(two_ranks: Ranks, strategy: str, by_optimizer: bool) -> None:
    first, second = two_ranks.run(nothing_reached_and_clipped, strategy, by_optimizer, timeout_s=TIMEOUT_S)
    assert first == second > 0.0


def nothing_reached_and_looked_at(strategy: str) -> list[float]:
    """In the second step rank 1's backward reaches no parameter, and `full_gradient` is the first that asks."""
    ddp = DistributedDataParallel(nn.Linear(2, 1, bias=False), config=SyncConfig(strategy=strategy))
    cls = torch.optim.SGD
    optimizer = cls(ddp.parameters(), lr=0.125) if strategy == "ddp" else ShardedOptimizer(cls, ddp, lr=0.125)
    found: list[float] = []
    for step in range(2):
        optimizer.zero_grad()
        value = ddp(torch.full((1, 2), 2.0)).sum()
        if step == 1 and dist.get_rank() == 1:
            value = value.detach().requires_grad_()
        value.backward()
        found += ddp.full_gradient(ddp.module.weight).flatten().tolist()
        optimizer.step()
    ddp.close()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_a_rank_without_gradients_joins_before_one_is_looked_at(two_ranks: Ranks, strategy: str) -> None:
    answers = two_ranks.run(nothing_reached_and_looked_at, strategy, timeout_s=TIMEOUT_S)
    assert answers == [[2.0, 2.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_without_gradients_joins_before_a_scaler_looks(ranks: Ranks, set_to_none: bool) -> None:
    expected = [SCALE, SCALE, SCALE / 2, SCALE / 2]
    assert ranks.run(nothing_reached, set_to_none, timeout_s=TIMEOUT_S) == [expected] * ranks.num_ranks
