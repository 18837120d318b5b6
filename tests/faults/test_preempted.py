"""Runs that are ended by SIGTERM and SIGKILL at drawn moments; `python -m preempted` draws more of them."""

import pytest

from preempted.runs import MOMENTS, STRATEGIES, kill, preemption, problems_of_kill, problems_of_preemption
from support.levels import some

# The first seeds that draw each of the moments, every strategy, one rank and all of them.
SEEDS = (1, 5, 6, 8, 12, 14, 15, 16, 19)


@pytest.mark.parametrize("seed", some(SEEDS, most=1))
def test_all_ranks_stop_after_the_same_step_and_save_it(seed: int) -> None:
    assert problems_of_preemption(preemption(seed)) == [], str(preemption(seed))


@pytest.mark.parametrize("seed", some(range(4), most=1))
def test_a_kill_in_a_save_in_the_background_leaves_one_whole_checkpoint(seed: int) -> None:
    assert problems_of_kill(kill(seed)) == [], str(kill(seed))


def test_draws_reach_every_moment_strategy_and_rank() -> None:
    assert {preemption(seed).moment for seed in SEEDS} == {*MOMENTS}
    drawn = [preemption(seed) for seed in range(200)]
    assert {each.moment for each in drawn} == {*MOMENTS}
    assert {each.strategy for each in drawn} == {*STRATEGIES}
    assert {each.num_ranks for each in drawn} == {2, 3}
    assert {len(each.signaled) for each in drawn} == {1, 2, 3}
    assert {kill(seed).killed for seed in range(100)} == {(0,), (1,), (0, 1)}
