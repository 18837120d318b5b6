"""Optimizer steps that are left out: on all ranks by torch's GradScaler, whatever each of them sees, or on some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.errors import text_of
from support.mixture import SGD, loss, mixture, reduce_naively, require_equal_values, wrapped_mixture
from support.models import Branches, noise
from support.naive import TIMEOUT_S, wrapped
from support.ranks import in_ranks
from support.sharded import require_same_everywhere
from undertow import Desync, DistributedDataParallel, ShardedOptimizer, clip_grad_norm_

SCALE = 2.0**10
OVERFLOWS = {1: 1, 4: 2}  # by step, the rank whose expert has an infinity; its peer of the group gets it too


def parts(ddp: DistributedDataParallel) -> list[Any]:
    """The dense parameters' synchronization and the experts', each with its parameters."""
    return [(part, [param for _, param in part.named_parameters()]) for part in (ddp.sync, *ddp.sync.experts)]


# Settings, and one optimizer for all, or one for each part.
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[DistributedDataParallel], list[torch.optim.Optimizer]]]] = {
    "one": ({}, lambda ddp: [torch.optim.SGD(ddp.parameters(), **SGD)]),
    "fused": ({}, lambda ddp: [torch.optim.SGD(ddp.parameters(), fused=True, **SGD)]),  # scalers leave unscaling to it
    "one for each part": ({}, lambda ddp: [torch.optim.SGD(params, **SGD) for _, params in parts(ddp)]),
    **{
        strategy: (
            {"strategy": strategy},
            lambda ddp: [ShardedOptimizer(torch.optim.SGD, part, params, **SGD) for part, params in parts(ddp)],
        )
        for strategy in ("zero1", "zero2")
    },
}


def with_overflow(ddp: DistributedDataParallel, step: int) -> Tensor:
    """Of an expert's weight alone: the dense gradients stay finite on every rank."""
    value = loss(ddp, step)
    if dist.get_rank() == OVERFLOWS.get(step):
        value = value + ddp.module.experts["1"].weight[0, 0] * float("inf")
    return value


@in_ranks(4, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_, clip, step"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_in_an_expert_is_everybodys(name: str, unscales: bool) -> None:
    """The references know which steps to leave out; scales are powers of two, which change no bit but the exponent."""
    settings, make = OPTIMIZERS[name]
    scales = []
    with wrapped_mixture(mixture(), **settings) as (ddp, bare, group):
        optimizers = make(ddp)
        how = {**SGD, "fused": name == "fused" or None}  # its kernel rounds otherwise
        dense = torch.optim.SGD([*bare.before.parameters(), *bare.after.parameters()], **how)
        experts = torch.optim.SGD(bare.experts.parameters(), **how)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
        for step in range(6):
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
    assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE, SCALE / 2, SCALE / 2]


@in_ranks(4, timeout_s=TIMEOUT_S)
def test_experts_without_gradients_do_not_stop_a_scaler() -> None:
    """Experts of some ranks are not trained at all, those of others have no gradients: theirs looks at nothing."""
    model = mixture()
    model.experts.requires_grad_(dist.get_rank() % 2 == 1)
    with wrapped_mixture(model) as (ddp, _, _):
        optimizers = OPTIMIZERS["one for each part"][1](ddp)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for step, scale in enumerate([SCALE, SCALE / 2, SCALE / 2]):
            for optimizer in optimizers:
                optimizer.zero_grad()
            value = ddp(noise(3, 6, step=step), (0,) if dist.get_rank() == 1 and step else ()).sum()
            scaler.scale(value * (float("inf") if dist.get_rank() == 3 and step == 1 else 1.0)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
        require_same_everywhere({name: param.detach() for name, param in ddp.module.before.named_parameters()})


@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
def test_rounds_of_different_steps_do_not_pair_off() -> None:
    """Rank 0 synchronizes twice in a step, rank 1's second backward reaches nothing, and it cannot know of the round.

    Before an optimizer has stepped for the first time nobody can: a rank may leave that to others.
    """
    with wrapped(Branches()) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)

        def train() -> None:
            for step in range(4):
                optimizer.zero_grad()
                ddp(noise(2, 4, step=step)).sum().backward()
                second = ddp(noise(2, 4, step=step + 10)).sum()
                if dist.get_rank() == 0:
                    second.backward()
                optimizer.step()

        assert text_of(Desync, train) == (
            "ranks are not in the same step.\n"
            f"  synchronization 3, rank {dist.get_rank()}\n"
            "  rank 0: synchronization 3, without an optimizer step since the one before\n"
            "  rank 1: synchronization 3, after an optimizer step\n"
            "  Run as many synchronized backwards and optimizer steps on every rank; one without a backward calls finish()."
        )
