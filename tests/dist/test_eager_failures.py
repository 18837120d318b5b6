"""Backwards in eager form that fail when they have updated a part: what comes after."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from support.models import CASES, Fragile
from support.ranks import Ranks
from support.sharded import Parameters, parameters, require_equal, training
from undertow import DistributedDataParallel, PeerFailed
from undertow.runtime.executor import Executor

LOSS = CASES["mlp"].loss
SMALL: dict[str, Any] = {"bucket_cap_mb": 1e-4}  # most parameters are in pieces


def fragile() -> Fragile:
    torch.manual_seed(3)
    return Fragile()


def one_step(ddp: DistributedDataParallel, opt: Any, step: int, *, weight: float | None = None) -> None:
    opt.zero_grad()
    if weight is not None:
        ddp.weight(weight)
    LOSS(ddp, step).backward()
    opt.step()


def failing_backward(ddp: DistributedDataParallel, opt: Any, num_failing: int, *, weight: float | None = None) -> None:
    """Its error is not raised."""
    ddp.module.fails = dist.get_rank() < num_failing
    with pytest.raises(ZeroDivisionError if ddp.module.fails else PeerFailed):
        one_step(ddp, opt, 3, weight=weight)
    ddp.module.fails = False


def require_same_on_every_rank(found: Parameters) -> None:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    for other in gathered:
        require_equal(found, other)


def micro_batch_that_fails(num_failing: int) -> None:
    def trained(*, fails: bool) -> Parameters:
        with training(fragile(), "zero2", "SGD", eager=True, **SMALL) as (ddp, opt):
            for step in range(3):
                one_step(ddp, opt, step)
            if fails:
                with ddp.no_sync():
                    failing_backward(ddp, opt, num_failing)
            for step in range(4, 6):
                one_step(ddp, opt, step)
            return parameters(ddp)

    require_equal(trained(fails=False), trained(fails=True))


@pytest.mark.parametrize("num_failing", [1, 2])
def test_steps_behind_a_micro_batch_that_failed_are_as_ever(two_ranks: Ranks, num_failing: int) -> None:
    two_ranks.run(micro_batch_that_fails, num_failing)


def weighted_bucket_that_has_left() -> None:
    """Rank 0 fails, and gives the round up, before what it has sent of the last layer is complete."""
    weight = 3.0 + dist.get_rank()

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        one_step(ddp, opt, step, weight=weight)

    with training(fragile(), "zero1", "SGD", eager=True, **SMALL) as (ddp, opt):
        for step in range(4):
            each(ddp, opt, step)
        healthy = parameters(ddp)
    with training(fragile(), "zero1", "SGD", eager=True, **SMALL) as (ddp, opt):
        for step in range(3):
            each(ddp, opt, step)
        before = parameters(ddp)
        engine, settle = ddp.sync._engine, Executor._settle
        has_given_up = threading.Event()
        end = engine._end_round

        def ending(this: Any) -> Any:
            has_given_up.set()
            return end(this)

        def late(*args: Any, **kwargs: Any) -> bool:
            assert has_given_up.wait(30.0)
            return settle(*args, **kwargs)

        with mock.patch.object(engine, "_end_round", ending), mock.patch.object(Executor, "_settle", late):
            failing_backward(ddp, opt, 1, weight=weight)
            after = parameters(ddp)
    require_same_on_every_rank(after)
    for name, value in after.items():
        assert bool(((value == before[name]) | (value == healthy[name])).all()), name
    assert torch.equal(after["module.last.bias"], healthy["module.last.bias"])


def test_a_bucket_that_left_before_the_failure_is_divided_by_its_weights(two_ranks: Ranks) -> None:
    two_ranks.run(weighted_bucket_that_has_left)
