"""Optimal plans: against brute force, and by hand."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import settings

from support.errors import refusal
from support.steps import (
    NOT_DECREASING,
    NUM_RANKS,
    SHAPES,
    Case,
    LineCosts,
    TableCosts,
    lines,
    random_case,
    table_costs,
    times_us,
)
from support.strategies import spec, specs_of_sizes
from undertow.plan import (
    Optimum,
    ParamSpec,
    Piece,
    StepTiming,
    finish_us,
    optimal,
    optimal_groups,
    plan_from_groups,
)
from undertow.plan.layout import piece_of, unit_numel
from undertow.plan.optimal import SLACK, atoms_of, small_pieces
from undertow.plan.timing import limit_us

# Sums of a few dozen times, in another order than the planner's: some units in the last place of 1e2.
ROUNDING = {"rel": 1e-12, "abs": 1e-10}
NUM_CASES = 4 * settings.default.max_examples  # as many as tell one grouping from another: 100, or more in a thorough run
MOST_BRUTE_PIECES = 8  # 128 groupings
each_form = pytest.mark.parametrize("has_shards", [False, True], ids=["whole", "in shards"])


def line(launch_us: float, us_per_byte: float) -> LineCosts:
    return lines((launch_us, us_per_byte), gather=(launch_us, us_per_byte))


def timing(*ready_us: float, end: float | None = None, used: Sequence[float] = ()) -> StepTiming:
    return StepTiming(ready_us=ready_us, backward_end_us=max(ready_us) if end is None else end, used_us=used)


def plan(params: Sequence[ParamSpec], when: StepTiming, curve: Any, **more: Any) -> Optimum:
    return optimal_groups(params, range(len(params)), when, curve, num_ranks=NUM_RANKS, has_shards=bool(when.used_us), **more)


def cases(seed: int, shapes: tuple[str, ...] = SHAPES, *, has_shards: bool) -> Iterator[Case]:
    rng, num = random.Random(seed), NUM_CASES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("undertow.plan.optimal._MOST_PIECES", 4)
        while num > 0:
            case = random_case(rng, shapes, has_shards=has_shards)
            if len(case.pieces) <= MOST_BRUTE_PIECES:
                num -= 1
                yield case


def solve(case: Case, **more: Any) -> Optimum:
    more |= {"has_shards": case.has_shards, "max_bucket_bytes": case.max_bucket_bytes}
    return optimal_groups(case.params, case.order, case.timing, case.costs, num_ranks=NUM_RANKS, **more)


@pytest.mark.parametrize(
    ("has_shards", "shapes"),
    [(False, NOT_DECREASING), (False, ("wild",)), (True, NOT_DECREASING), (True, ("wild",))],
    ids=["whole", "whole, any costs", "in shards", "in shards, any costs"],
)
def test_no_grouping_is_through_earlier_and_of_the_fewest_windows_within_the_slack_none_is(
    has_shards: bool, shapes: tuple[str, ...]
) -> None:
    for case in cases(1, shapes, has_shards=has_shards):
        best, optimum = case.best_by_windows(), solve(case)
        fewest = min(num for num, us in best.items() if us <= SLACK * min(best.values()))
        planned = plan_from_groups(case.params, optimum.groups, num_ranks=NUM_RANKS)
        groups = [[slot.piece for slot in bucket.slots] for bucket in planned.buckets]
        # The groups are a plan that finishes when it is said.
        found, expected = (optimum.best_us, *[optimum.finish_us] * 2), (min(best.values()), best[fewest], case.finish_us(groups))
        assert found == pytest.approx(expected, **ROUNDING), case
        assert optimum.limit_us <= optimum.best_us <= optimum.finish_us <= SLACK * optimum.best_us * (1 + 1e-12), case
        # A cost that decreases has no limit.
        limit = limit_us(case.params, case.timing, case.costs, has_shards=has_shards) if shapes == NOT_DECREASING else 0.0
        assert limit <= optimum.best_us * (1 + 1e-12), case


@each_form
def test_fewer_buckets_are_planned_if_their_processor_time_is_worth_more(has_shards: bool) -> None:
    fewer = 0
    for case in cases(2, NOT_DECREASING, has_shards=has_shards):
        best = case.best_by_windows()
        least_us = min(best.values())
        bucket_us = 0.1 * least_us
        costs_us = {num: max(us, SLACK * least_us) + num * bucket_us for num, us in best.items()}
        optimum, plain = solve(case, bucket_us=bucket_us), solve(case)
        # Sums of the same times in another order.
        assert (optimum.best_us, optimum.limit_us) == pytest.approx((plain.best_us, plain.limit_us), rel=1e-12)
        assert min(costs_us[num] for num in best if best[num] >= optimum.finish_us * (1 - 1e-9)) == pytest.approx(
            min(costs_us.values()), **ROUNDING
        ), case
        fewer += len(optimum.groups) < len(plain.groups)
    assert fewer > 0


@each_form
def test_any_grouping_is_timed_by_the_same_model(has_shards: bool) -> None:
    for case in cases(4, has_shards=has_shards):
        for _, groups in case.groupings():
            assert finish_us(case.params, groups, case.timing, case.costs, has_shards=has_shards) == pytest.approx(
                case.finish_us(groups), **ROUNDING
            ), case


def test_no_split_or_order_of_gradients_is_through_before_the_limit() -> None:
    # One parameter, by 4 bytes at a time, with any bytes together, and the same behind another one that comes earlier.
    rng = random.Random(6)
    for _ in range(NUM_CASES // 2):
        sizes, whole = [rng.randrange(1, 12), rng.randrange(1, 12)], rng.choice([True, False])
        params, when = specs_of_sizes(*sizes), timing(*sorted(times_us(rng, 2)))
        costs = table_costs(rng, sum(sizes), rng.choice(NOT_DECREASING))
        limit = limit_us(params, when, costs, has_shards=False)
        for first, second in product(range(sizes[0] + 1), range(sizes[1] + 1)):
            early, rest = [Piece(param=0, first=0, stop=first)], [Piece(param=1, first=second, stop=sizes[1])]
            late = [Piece(param=0, first=first, stop=sizes[0]), Piece(param=1, first=0, stop=second)]
            groups = [early, late, rest] if whole else [early, late[:1], late[1:], rest]
            filled = [[piece for piece in group if piece.numel] for group in groups]
            assert limit <= finish_us(params, filled, when, costs) * (1 + 1e-12), (sizes, groups, when, costs)


# The square root of a size.
ROOT = TableCosts({"all_reduce": [math.sqrt(size) for size in range(40)]})


@pytest.mark.parametrize(
    ("solve_it", "groups", "finished_us"),
    [
        pytest.param(
            lambda: plan(specs_of_sizes(10, 10), timing(0, 20, end=50), line(1, 1)),
            ((0,), (1,)),
            61.0,
            id="the last bucket waits for the end of backward",
        ),
        # Two buckets are through at 1000 + 1000 + 1, one at 1000 + 1001 + 1.
        pytest.param(
            lambda: plan(specs_of_sizes(1, 1000), timing(0, 1000), line(1, 1)),
            ((0, 1),),
            2002.0,
            id="a small gain is not worth a launch",
        ),
        pytest.param(
            lambda: plan(
                [spec(f"p{i}", 8, dtype="float32" if i % 2 else "bfloat16") for i in range(20)],
                timing(*range(20)),
                line(100, 0.01),
            ),
            (tuple(range(0, 20, 2)), tuple(range(1, 20, 2))),
            None,
            id="dtypes that alternate travel in one bucket each",
        ),
        # The first bucket is on the link from 0 to 11, the other one from 11 to 16: neither waits for 11 twice.
        pytest.param(
            lambda: plan([spec("a", 10, dtype="uint8"), spec("b", 2, dtype="bfloat16")], timing(0, 11), line(1, 1)),
            ((0,), (1,)),
            16.0,
            id="the bucket of a kind leaves when its own last gradient has come",
        ),
        pytest.param(
            lambda: plan(specs_of_sizes(3, 3, 99, 3, 3), timing(0, 0, 0, 0, 0), line(50, 1), max_bucket_bytes=8),
            ((0, 1), (2,), (3, 4)),
            None,
            id="a parameter above the largest bucket travels alone",
        ),
        pytest.param(
            lambda: plan(
                [spec("a", 10, dtype="uint8"), spec("rows", 10, dtype="uint8", is_sparse=True)], timing(0, 0), line(7, 1)
            ),
            ((0,), (1,)),
            24.0,
            id="sparse gradients cost a launch and no bytes",
        ),
        # Ready 0 and 100, used 100 and 0: one bucket of 200 bytes is reduced at 100 + 105 and gathered in 105, a stall. In two,
        # the second one is reduced at 100 + 55 and gathered in 55; the first one is gathered at 110 and late by 10.
        pytest.param(
            lambda: plan(specs_of_sizes(100, 100), timing(0, 100, used=(100, 0)), line(5, 0.5)),
            ((0,), (1,)),
            155 + 55,
            id="one bucket is cut if that lets the forward begin",
        ),
        pytest.param(
            lambda: plan(specs_of_sizes(64, 6400), timing(0, 0, used=(0, 0)), line(5, 0.5)),
            ((0, 1),),
            None,
            id="pieces of a parameter in one bucket are one member",
        ),
        pytest.param(
            lambda: plan(specs_of_sizes(96), timing(0, used=(0,)), line(5, 0.5), max_bucket_bytes=40),
            tuple((Piece(param=0, first=first, stop=first + 32),) for first in (0, 32, 64)),
            None,
            id="with shards a parameter above the largest bucket is cut",
        ),
    ],
)
def test_a_plan_by_hand(solve_it: Callable[[], Optimum], groups: Any, finished_us: float | None) -> None:
    optimum = solve_it()
    assert (optimum.groups, optimum.finish_us if finished_us else None) == (groups, finished_us)


@pytest.mark.parametrize(
    ("params", "groups", "when", "curve", "finished_us"),
    [
        pytest.param(
            specs_of_sizes(100, 100),
            [(0, 1)],
            timing(0, 100, used=(100, 0)),
            line(5, 0.5),
            205 + 105,
            id="one bucket that would be cut",
        ),
        pytest.param(
            specs_of_sizes(32),
            [[Piece(param=0, first=first, stop=first + 16)] for first in (0, 16)],
            timing(5),
            line(1, 1),
            5 + 17 + 17,
            id="two pieces of a parameter",
        ),
        # Groups of a concave cost are the best of neighbors, not of all: no run of neighbors is through before 6.606.
        pytest.param(
            specs_of_sizes(9, 4, 9),
            [(1,), (0, 2)],
            timing(0, 0, 2),
            ROOT,
            2 + math.sqrt(18),
            id="9 + 9 bytes together and 4 before them",
        ),
    ],
)
def test_groups_by_hand(params: list[ParamSpec], groups: Any, when: StepTiming, curve: Any, finished_us: float) -> None:
    assert finish_us(params, groups, when, curve, has_shards=bool(when.used_us)) == pytest.approx(finished_us, **ROUNDING)


def test_the_best_of_a_plan_is_of_runs_of_neighbors_however_many() -> None:
    assert plan(specs_of_sizes(9, 4, 9), timing(0, 0, 2), ROOT).best_us == pytest.approx(math.sqrt(13) + 3, **ROUNDING)  # 6.606
    assert plan(specs_of_sizes(1, 1000), timing(0, 1000), line(1, 1)).best_us == 2001.0


@pytest.mark.parametrize(
    ("optimum", "num_groups", "finished_us", "share"),
    [
        # All is ready at once, so that one bucket is best: 3 + 10 + 2 * 30. The limit's cells of sizes cost it 0.3 % at most.
        (plan(specs_of_sizes(10, 20), timing(3, 3), line(10, 2)), 1, 73.0, 0.997),
        # Messages are free, and a byte is not: 3 + 2 * 30.
        (plan(specs_of_sizes(10, 20), timing(3, 3), line(0, 2)), 1, 63.0, 0.997),
        # 10 for up to 10 bytes and 100 above: 40 bytes in four parts. The cells of sizes cost the limit less than 1 %.
        (
            plan(specs_of_sizes(10, 10, 10, 10), timing(0, 0, 0, 0), TableCosts({"all_reduce": [10.0] * 11 + [100.0] * 40})),
            4,
            40.0,
            0.99,
        ),
    ],
    ids=["a busy link", "a cost in proportion to bytes", "a cost that jumps, by parts below the jump"],
)
def test_the_limit_is_met(optimum: Optimum, num_groups: int, finished_us: float, share: float) -> None:
    assert (len(optimum.groups), optimum.finish_us) == (num_groups, finished_us)
    assert share * finished_us <= optimum.limit_us <= finished_us


@pytest.mark.parametrize(("has_shards", "finish"), [(False, 6.0), (True, 8.0)], ids=["whole", "gathered as well"])
def test_without_parameters_one_empty_bucket_leaves_at_the_end_of_backward(has_shards: bool, finish: float) -> None:
    optimum = optimal_groups(
        [], [], StepTiming(ready_us=(), backward_end_us=4.0), line(2, 1), num_ranks=NUM_RANKS, has_shards=has_shards
    )
    assert optimum == Optimum(groups=(), finish_us=finish, best_us=finish, limit_us=6.0)


@pytest.mark.parametrize(("num", "ratio"), [(10, 1.2), (100, 1.7), (500, 1.85)])
def test_merging_greedily_takes_up_to_twice_as_long_as_the_optimum(num: int, ratio: float) -> None:
    # MG-WFBP waits for a next gradient that comes before the launch of this one would be over. With r_i = 0.99 alpha i and
    # beta b_i = 0.98 alpha it always does, and one bucket leaves when backward is over: 1.97 alpha num. Of the optimum
    # about sqrt(2 num) launches are exposed: the link has 0.01 alpha to spare for each gradient, so buckets shrink one by one.
    when, curve, params = timing(*(99.0 * i for i in range(1, num + 1))), line(100.0, 1.0), specs_of_sizes(*[98] * num)
    merged = finish_us(params, [range(num)], when, curve)
    assert merged == pytest.approx(100.0 * (1 + 1.97 * num), **ROUNDING)
    assert merged > ratio * plan(params, when, curve).finish_us


def coarse(patch: pytest.MonkeyPatch, max_atoms: int, solve_it: Callable[[], Optimum]) -> Optimum:
    with patch.context() as patched:
        for name in ("_MAX_ATOMS", "_MAX_ATOMS_WITH_SHARDS"):
            patched.setattr(optimal, name, max_atoms)
        return solve_it()


@each_form
def test_coarsening_costs_no_more_than_the_times_within_an_atom(has_shards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, num = random.Random(8), 50
    for _ in range(NUM_CASES // 2):
        ready, used = (
            sorted(rng.uniform(0, 100) for _ in range(num)),
            sorted((rng.uniform(0, 50) for _ in range(num)), reverse=True),
        )
        params = specs_of_sizes(*(rng.choice([0, 1, 10, 100]) for _ in range(num)))
        when = timing(*ready, used=used if has_shards else ())
        solve_it = partial(plan, params, when, line(rng.uniform(0, 10), rng.choice([0.01, 0.03, 0.1])))
        fine_us, coarse_us = solve_it().best_us, coarse(monkeypatch, 12, solve_it).best_us
        atoms = atoms_of(params, [piece_of(param, params) for param in range(num)], when, max_atoms=12, has_shards=has_shards)
        assert len(atoms.cuts) <= 13
        within = list(pairwise(atoms.cuts))
        spread_us = max(ready[stop - 1] - ready[first] for first, stop in within)
        spread_us += has_shards * max(used[first] - used[stop - 1] for first, stop in within)
        assert fine_us <= coarse_us + 1e-10 <= fine_us + spread_us + 2e-10


@each_form
def test_a_coarse_plan_is_not_slower_than_one_message_per_parameter(has_shards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    num = 60  # a byte takes as long as the time between gradients: only the finest plan keeps up
    params, used = specs_of_sizes(*[10] * num), [float(num - i) for i in range(num)]
    when = timing(*(float(i) for i in range(num)), used=used if has_shards else ())
    coarse_us = coarse(monkeypatch, 6, partial(plan, params, when, line(0, 0.1))).finish_us
    assert coarse_us <= SLACK * finish_us(params, [[i] for i in range(num)], when, line(0, 0.1), has_shards=has_shards)


def test_coarse_atoms_finish_as_they_were_planned_to_and_fit_into_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(10)
    for _ in range(NUM_CASES // 4):
        params = [spec(f"p{i}", rng.choice([0, 1, 10]), dtype=rng.choice(["float32", "bfloat16"])) for i in range(40)]
        cap = math.ceil(sum(each.num_bytes for each in params) / 3)
        when, curve = timing(*(rng.uniform(0, 50) for _ in params)), line(rng.uniform(0, 5), 0.1)
        for most in (math.inf, cap):
            optimum = coarse(monkeypatch, 24, partial(plan, params, when, curve, max_bucket_bytes=most))
            assert optimum.finish_us <= SLACK * optimum.best_us * (1 + 1e-12)
            assert all(sum(params[i].num_bytes for i in group if isinstance(i, int)) <= most for group in optimum.groups)


def test_pieces_begin_at_multiples_of_the_shards_unit_and_keep_to_the_largest_bucket() -> None:
    params, cap, unit = [spec("large", 10_001)], 7000, unit_numel(itemsize=4, num_ranks=3)
    pieces = small_pieces(params, [0], num_ranks=3, max_bucket_bytes=cap)
    assert len(pieces) > cap // 4 // unit // 12  # a 64th of all bytes is below the cap
    assert {(piece.first % unit, piece.numel * 4 <= cap) for piece in pieces} == {(0, True)}


TOO_SMALL = partial(plan, specs_of_sizes(*[10] * 3000), timing(*range(3000)), line(1, 1))
TIMES = "Give one time for each parameter, in the order of the parameters."


@pytest.mark.parametrize(
    ("call", "text"),
    [
        pytest.param(
            partial(TOO_SMALL, max_bucket_bytes=11),
            "buckets of at most 11 bytes are too small to be planned.\n"
            "  30000 bytes of gradients, in at most 1024 parts that no bucket may cut\n"
            "  Allow buckets of 469 bytes.",
            id="buckets too small to be planned",
        ),
        pytest.param(
            partial(plan, specs_of_sizes(1, 2), timing(1, 2), line(math.inf, 1)),
            "no plan has a finite time: a collective costs inf.\n  costs of all_reduce\n"
            "  Give finite costs for all sizes up to the size of all gradients together.",
            id="costs without end",
        ),
        pytest.param(
            partial(plan, specs_of_sizes(1, 2), timing(1), line(1, 1)),
            f"each of the 2 parameters must have its ready_us, got 1 of them.\n  the timing of a step\n  {TIMES}",
            id="a parameter without its time",
        ),
        pytest.param(
            partial(plan, specs_of_sizes(1, 2), timing(0, 0, used=(0,)), line(1, 1)),
            f"each of the 2 parameters must have its used_us, got 1 of them.\n  the timing of a step\n  {TIMES}",
            id="a parameter that is not used",
        ),
        pytest.param(
            partial(optimal_groups, specs_of_sizes(1, 2), [0, 0], timing(1, 1), line(1, 1), num_ranks=2),
            "an order must hold each of the 2 parameters exactly once.\n"
            "  got 2 indices, 1 of them different parameters\n  Give a permutation of range(len(params)).",
            id="an order that is no permutation",
        ),
        *(
            pytest.param(
                call,
                f"a time of a step must be finite and not negative, got {time}.\n  {where}\n"
                "  Count from the beginning of the step or of forward; a gradient that never comes is ready when backward ends.",
                id=f"{where} at {time}",
            )
            for time in (-1.0, math.inf, math.nan)
            for where, call in (
                ("ready_us of parameter 1", partial(timing, 1.0, time, end=2.0)),
                ("backward_end_us", partial(timing, 1.0, end=time)),
                ("used_us of parameter 0", partial(replace, timing(1.0), used_us=(time,))),
            )
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(call: Callable[[], object], text: str) -> None:
    assert refusal(call) == text


def test_buckets_of_the_size_that_a_refusal_names_can_be_planned() -> None:
    assert len(TOO_SMALL(max_bucket_bytes=469).groups) < 1024
