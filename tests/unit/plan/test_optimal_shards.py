from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from benchmarks.planner import busy_link, model_of
from numpy.typing import ArrayLike, NDArray

from support.brute_force import NOT_DECREASING, SHAPES, Case, table_costs, times_us
from support.errors import text_of
from support.gpt2_profile import gpt2_profile
from support.strategies import specs_of_sizes
from undertow.cost import RingCosts, link_from_text
from undertow.errors import ConfigError
from undertow.plan import Optimum, ParamSpec, Piece, StepTiming, finish_us, optimal_groups, plan_from_groups
from undertow.plan.atoms import atoms_of, small_pieces, whole_pieces
from undertow.plan.certificate import limit_us
from undertow.plan.layout import unit_numel
from undertow.plan.optimal import SLACK

# Sums of a few dozen times, in another order than the planner's: some units in the last place of 1e2.
ROUNDING = {"rel": 1e-12, "abs": 1e-10}
NUM_RANKS = 2
MOST_BRUTE_PIECES = 8  # 128 groupings


class HalfCosts:
    """A ring's: reduce-scatter and all-gather cost half of an all-reduce."""

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        whole = 10 + np.asarray(num_bytes, dtype=np.float64)
        return whole if kind == "all_reduce" else whole / 2


def random_case(rng: random.Random, shapes: tuple[str, ...] = SHAPES) -> Case:
    num = rng.randrange(1, 6)
    dtypes = rng.choice([["uint8"], ["uint8"], ["uint8", "bool"]])
    params = [
        ParamSpec(name=f"p{i}", shape=(rng.choice([0, 8, 16, 40, 64]),), dtype=rng.choice(dtypes), itemsize=1) for i in range(num)
    ]
    ready = times_us(rng, num)
    order = rng.sample(range(num), num) if rng.random() < 0.3 else sorted(range(num), key=lambda param: ready[param])
    cap = rng.choice([math.inf, math.inf, 20, 40])
    return Case(
        params=params,
        order=order,
        timing=StepTiming(ready_us=ready, backward_end_us=max(ready) + rng.choice([0.0, 3.0]), used_us=times_us(rng, num)),
        costs=table_costs(rng, sum(each.num_bytes for each in params), rng.choice(shapes)),
        max_bucket_bytes=cap,
        has_shards=True,
        pieces=small_pieces(params, order, num_ranks=NUM_RANKS, max_bucket_bytes=cap),
    )


def cases(seed: int, num: int, shapes: tuple[str, ...] = SHAPES) -> Iterator[Case]:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("undertow.plan.atoms._MOST_PIECES", 4)
        while num > 0:
            case = random_case(rng, shapes)
            if len(case.pieces) <= MOST_BRUTE_PIECES:
                num -= 1
                yield case


def solve(case: Case) -> Optimum:
    return optimal_groups(
        case.params,
        case.order,
        case.timing,
        case.costs,
        num_ranks=NUM_RANKS,
        has_shards=True,
        max_bucket_bytes=case.max_bucket_bytes,
    )


def test_no_grouping_of_pieces_has_a_shorter_period() -> None:
    for case in cases(1, 500):
        assert solve(case).best_us == pytest.approx(min(case.best_by_windows().values()), **ROUNDING), case


def test_windows_are_the_fewest_within_the_slack_and_the_best_of_as_many() -> None:
    for case in cases(2, 300):
        best = case.best_by_windows()
        fewest = min(num for num, us in best.items() if us <= SLACK * min(best.values()))
        assert solve(case).finish_us == pytest.approx(best[fewest], **ROUNDING), case


def test_groups_are_a_plan_and_have_the_period_that_is_said() -> None:
    for case in cases(3, 300):
        optimum = solve(case)
        planned = plan_from_groups(case.params, optimum.groups, num_ranks=NUM_RANKS)
        groups = [[slot.piece for slot in bucket.slots] for bucket in planned.buckets]
        assert optimum.finish_us == pytest.approx(case.finish_us(groups), **ROUNDING), case


def test_any_grouping_is_timed_by_the_same_model() -> None:
    for case in cases(4, 100):
        for _, groups in case.groupings():
            period = finish_us(case.params, groups, case.timing, case.costs, has_shards=True)
            assert period == pytest.approx(case.finish_us(groups), **ROUNDING), case


def test_no_period_is_below_the_limit() -> None:
    for case in cases(5, 300, NOT_DECREASING):
        limit, optimum = limit_us(case.params, case.timing, case.costs, has_shards=True), solve(case)
        assert limit <= optimum.best_us * (1 + 1e-12), case
        assert optimum.limit_us <= optimum.best_us <= optimum.finish_us <= SLACK * optimum.best_us * (1 + 1e-12), case


def test_one_bucket_is_cut_where_that_lets_the_forward_begin() -> None:
    # Ready 0 and 100, used 100 and 0: one bucket of 200 bytes is reduced at 100 + 105 and gathered in 105, a stall. In two,
    # the second one is reduced at 100 + 55 and gathered in 55; the first one is gathered at 110 and late by 10.
    timing = StepTiming(ready_us=(0, 100), backward_end_us=100, used_us=(100, 0))
    optimum = optimal_groups(specs_of_sizes(100, 100), (0, 1), timing, HalfCosts(), num_ranks=NUM_RANKS, has_shards=True)
    together = finish_us(specs_of_sizes(100, 100), [(0, 1)], timing, HalfCosts(), has_shards=True)
    assert (optimum.groups, optimum.finish_us, together) == (((0,), (1,)), 155 + 55, 205 + 105)


def test_pieces_of_a_parameter_in_one_bucket_are_one_member() -> None:
    timing = StepTiming(ready_us=(0, 0), backward_end_us=0, used_us=(0, 0))
    optimum = optimal_groups(specs_of_sizes(64, 6400), (0, 1), timing, HalfCosts(), num_ranks=NUM_RANKS, has_shards=True)
    assert optimum.groups == ((0, 1),)


def test_pieces_begin_at_multiples_of_the_shards_unit_and_keep_to_the_largest_bucket() -> None:
    params, cap = [ParamSpec(name="large", shape=(10_001,), dtype="float32", itemsize=4)], 7000
    pieces = small_pieces(params, [0], num_ranks=3, max_bucket_bytes=cap)
    unit = unit_numel(itemsize=4, num_ranks=3)
    assert len(pieces) > cap // 4 // unit // 12  # a 64th of all bytes is below the cap
    assert [piece.first % unit for piece in pieces] == [0] * len(pieces)
    assert all(piece.numel * 4 <= cap for piece in pieces)


def test_a_parameter_above_the_largest_bucket_is_cut() -> None:
    timing = StepTiming(ready_us=(0,), backward_end_us=0, used_us=(0,))
    params = specs_of_sizes(96)
    optimum = optimal_groups(params, [0], timing, HalfCosts(), num_ranks=NUM_RANKS, has_shards=True, max_bucket_bytes=40)
    assert optimum.groups == tuple((Piece(param=0, first=first, stop=first + 32),) for first in (0, 32, 64))


def test_coarsening_costs_no_more_than_the_times_within_an_atom() -> None:
    rng = random.Random(6)
    num = 50
    for _ in range(50):
        ready = sorted(rng.uniform(0, 100) for _ in range(num))
        used = sorted((rng.uniform(0, 50) for _ in range(num)), reverse=True)
        params = specs_of_sizes(*(rng.choice([0, 1, 3, 10]) for _ in range(num)))
        timing = StepTiming(ready_us=ready, backward_end_us=100.0, used_us=used)
        solve = partial(optimal_groups, params, range(num), timing, HalfCosts(), num_ranks=NUM_RANKS, has_shards=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("undertow.plan.optimal._MAX_ATOMS_WITH_SHARDS", 16)
            coarse = solve().best_us
        cuts = atoms_of(params, whole_pieces(params, range(num)), timing, max_atoms=16, has_shards=True).cuts
        atoms = list(pairwise(cuts))
        spread = max(ready[stop - 1] - ready[first] for first, stop in atoms)
        spread += max(used[first] - used[stop - 1] for first, stop in atoms)
        fine = solve().best_us
        assert fine <= coarse + 1e-10 <= fine + spread + 2e-10


def test_twice_as_many_atoms_would_gain_little_where_most_is_to_be_gained() -> None:
    # Random sizes and times, and a link on which gathers just fit under forward: docs/planning.md says 1.4 % at most.
    params, timing = model_of(300)
    solve = partial(optimal_groups, params, range(300), timing, busy_link(params), num_ranks=8, has_shards=True)
    coarse_us = solve().best_us
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("undertow.plan.optimal._MAX_ATOMS_WITH_SHARDS", 256)
        fine_us = solve().best_us
    assert fine_us < coarse_us <= 1.014 * fine_us


@pytest.mark.parametrize(("link", "num_ranks"), [("25gbit,10us", 8), ("100gbit,5us", 8), ("100gbit,5us", 64)])
def test_twice_as_many_atoms_would_gain_nothing_on_gpt2(link: str, num_ranks: int) -> None:
    profile, costs = gpt2_profile(), RingCosts(link_from_text(link), num_ranks=num_ranks)
    solve = partial(optimal_groups, profile.params, profile.order, profile.timing, costs, num_ranks=num_ranks, has_shards=True)
    coarse_us = solve().best_us
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("undertow.plan.optimal._MAX_ATOMS_WITH_SHARDS", 256)
        assert coarse_us == pytest.approx(solve().best_us, rel=1e-3)  # half of the slack that fewer buckets are worth


def test_each_parameter_needs_to_be_used_somewhere() -> None:
    timing = StepTiming(ready_us=(0, 0), backward_end_us=0, used_us=(0,))
    call = partial(optimal_groups, specs_of_sizes(1, 2), [0, 1], timing, HalfCosts(), num_ranks=NUM_RANKS, has_shards=True)
    assert text_of(ConfigError, call) == (
        "each of the 2 parameters must have its used_us, got 1 of them.\n"
        "  the timing of a step\n"
        "  Give one time for each parameter, in the order of the parameters."
    )
