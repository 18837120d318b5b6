"""What happens to ranks, and to what they hold, while plans are compared and taken."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dist.test_tuning import ONE_LOOK
from support.drop_in import TIMEOUT_S
from support.errors import text_of
from support.models import CASES, noise
from support.ranks import Ranks, in_ranks
from support.scripted import in_pieces, one_each, scripted
from support.timed import Timed
from undertow import DistributedDataParallel, PlanMismatch, ShardedOptimizer, SyncConfig


def frozen_on_one_rank(step_of_the_change: int) -> str:
    net = CASES["mlp"].model()
    ddp = DistributedDataParallel(net)

    def train(step: int) -> None:
        CASES["mlp"].loss(ddp, step).backward()

    with scripted(one_each):
        for step in range(step_of_the_change):
            train(step)
        if dist.get_rank() == 1:
            net[0].requires_grad_(False)
        told = text_of(PlanMismatch, lambda: train(step_of_the_change))
    ddp.close()
    return told


@pytest.mark.parametrize("step", [1, 5, 6, 7, 8, 9])
def test_a_change_on_one_rank_is_an_error_on_all_while_ranks_compare_their_times(fresh_pair: Ranks, step: int) -> None:
    texts = fresh_pair.run(frozen_on_one_rank, step, timeout_s=TIMEOUT_S)
    assert texts[0] == texts[1]


def of_half_precision(*, auto_tune: bool) -> list[torch.Tensor]:
    net = CASES["mlp"].model().bfloat16()
    ddp = DistributedDataParallel(net, config=SyncConfig(strategy="zero1", reduction="ordered", auto_tune=auto_tune))
    optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=1e-3)
    for step in range(3 * ONE_LOOK):
        optimizer.zero_grad()
        ddp(noise(5, 6, step=step).bfloat16()).float().square().mean().backward()
        optimizer.step()
    ddp.wait()
    values = [param.detach().clone() for param in net.parameters()]
    ddp.close()
    return values


@in_ranks(2)
def test_wide_values_move_where_the_optimizer_has_no_state() -> None:
    expected = of_half_precision(auto_tune=False)
    with scripted(one_each, in_pieces):
        assert all(map(torch.equal, expected, of_half_precision(auto_tune=True)))


def frozen_for_a_moment_on_one_rank() -> tuple[bool, str]:
    """Whether the plan has changed, and the last one."""
    net = CASES["mlp"].model()
    ddp = DistributedDataParallel(net, config=SyncConfig(strategy="zero1"))
    optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.01)
    first = ddp.sync.plan.fingerprint
    with scripted(one_each, in_pieces):
        for step in range(ONE_LOOK + 3):
            optimizer.zero_grad()
            CASES["mlp"].loss(ddp, step).backward()
            if dist.get_rank() == 1:
                net[0].requires_grad_(False)
                ddp(noise(5, 6))
                net[0].requires_grad_(True)
                ddp(noise(5, 6))
            optimizer.step()
    last = ddp.sync.plan.fingerprint
    ddp.close()
    return last != first, last


def test_what_one_rank_looks_at_between_backward_and_step_does_not_part_the_plans(fresh_pair: Ranks) -> None:
    first, second = fresh_pair.run(frozen_for_a_moment_on_one_rank, timeout_s=TIMEOUT_S)
    assert first == second
    assert first[0]


def why_under_deterministic_algorithms() -> str:
    torch.use_deterministic_algorithms(True)
    try:
        ddp = DistributedDataParallel(Timed(numel=2000, pause_s=0.001))
        for _ in range(ONE_LOOK + 2):
            ddp(torch.ones(1)).backward()
        why = ddp.explain(show=False).why
        ddp.close()
        return why
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_plan_that_is_frozen_is_not_said_to_be_planned(two_ranks: Ranks) -> None:
    for why in two_ranks.run(why_under_deterministic_algorithms):
        assert why == "torch.use_deterministic_algorithms: another plan rounds differently"
