from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from support.brute_force import NOT_DECREASING, SHAPES, Case, TableCosts, table_costs, times_us
from support.errors import text_of
from support.strategies import spec, specs_of_sizes
from undertow.errors import ConfigError
from undertow.plan import Optimum, ParamSpec, Piece, StepTiming, finish_us, optimal_groups, plan_from_groups
from undertow.plan.atoms import atoms_of, whole_pieces
from undertow.plan.certificate import limit_us
from undertow.plan.optimal import SLACK

# Sums of a few dozen times, in another order than the planner's: some units in the last place of 1e2.
ROUNDING = {"rel": 1e-12, "abs": 1e-10}


class Curve:
    """One cost for every collective."""

    def __init__(self, launch_us: float, us_per_byte: float, power: float = 1.0) -> None:
        self.launch_us, self.us_per_byte, self.power = launch_us, us_per_byte, power

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        return self.launch_us + self.us_per_byte * np.asarray(num_bytes, dtype=np.float64) ** self.power


def timing(*ready_us: float, end: float | None = None) -> StepTiming:
    return StepTiming(ready_us=ready_us, backward_end_us=max(ready_us) if end is None else end)


def plan(params: list[ParamSpec], when: StepTiming, curve: Curve, **more: float) -> Optimum:
    return optimal_groups(params, range(len(params)), when, curve, num_ranks=2, **more)


def random_case(rng: random.Random, shapes: tuple[str, ...] = SHAPES) -> Case:
    num = rng.randrange(1, 7)
    dtypes = rng.choice([["uint8"], ["uint8"], ["uint8", "bool"]])
    params = [
        ParamSpec(name=f"p{i}", shape=(rng.choice([0, 1, 2, 5, 9]),), dtype=rng.choice(dtypes), itemsize=1, is_sparse=is_sparse)
        for i, is_sparse in enumerate(rng.choices([False, True], [9, 1], k=num))
    ]
    ready = times_us(rng, num)
    order = rng.sample(range(num), num) if rng.random() < 0.3 else sorted(range(num), key=lambda param: ready[param])
    return Case(
        params=params,
        order=order,
        timing=StepTiming(ready_us=ready, backward_end_us=max(ready) + rng.choice([0.0, 3.0])),
        costs=table_costs(rng, sum(each.num_bytes for each in params), rng.choice(shapes)),
        max_bucket_bytes=rng.choice([math.inf, math.inf, 4, 10]),
        pieces=whole_pieces(params, order),
    )


def solve(case: Case) -> Optimum:
    return optimal_groups(case.params, case.order, case.timing, case.costs, num_ranks=2, max_bucket_bytes=case.max_bucket_bytes)


def test_no_grouping_of_consecutive_parameters_is_through_earlier() -> None:
    rng = random.Random(1)
    for case in (random_case(rng) for _ in range(1000)):
        assert solve(case).best_us == pytest.approx(min(case.best_by_windows().values()), **ROUNDING), case


def test_windows_are_the_fewest_within_the_slack_and_the_first_of_as_many_to_be_through() -> None:
    rng = random.Random(2)
    for case in (random_case(rng) for _ in range(600)):
        best = case.best_by_windows()
        fewest = min(num for num, us in best.items() if us <= SLACK * min(best.values()))
        assert solve(case).finish_us == pytest.approx(best[fewest], **ROUNDING), case


def test_groups_are_a_plan_and_finish_when_it_is_said() -> None:
    rng = random.Random(3)
    for case in (random_case(rng) for _ in range(300)):
        optimum = solve(case)
        planned = plan_from_groups(case.params, optimum.groups, num_ranks=2)
        groups = [[slot.piece for slot in bucket.slots] for bucket in planned.buckets]
        assert optimum.finish_us == pytest.approx(case.finish_us(groups), **ROUNDING), case


def test_any_grouping_is_timed_by_the_same_model() -> None:
    rng = random.Random(4)
    for case in (random_case(rng) for _ in range(300)):
        for _, groups in case.groupings():
            assert finish_us(case.params, groups, case.timing, case.costs) == pytest.approx(case.finish_us(groups), **ROUNDING)


def test_nothing_is_through_before_the_limit() -> None:
    rng = random.Random(5)
    for case in (random_case(rng, NOT_DECREASING) for _ in range(600)):
        limit, optimum = limit_us(case.params, case.timing, case.costs, has_shards=False), solve(case)
        assert limit <= optimum.best_us * (1 + 1e-12), case
        assert optimum.limit_us <= optimum.best_us <= optimum.finish_us <= SLACK * optimum.best_us * (1 + 1e-12), case


def test_no_split_or_order_of_gradients_is_through_before_the_limit() -> None:
    # One parameter, by 4 bytes at a time, with any bytes together, and the same behind another one that comes earlier.
    rng = random.Random(6)
    for _ in range(300):
        sizes, whole = [rng.randrange(1, 12), rng.randrange(1, 12)], rng.choice([True, False])
        params, when = specs_of_sizes(*sizes), timing(*sorted(times_us(rng, 2)))
        costs = table_costs(rng, sum(sizes), rng.choice(NOT_DECREASING))
        limit = limit_us(params, when, costs, has_shards=False)
        for first, second in product(range(sizes[0] + 1), range(sizes[1] + 1)):
            early = [Piece(param=0, first=0, stop=first)]
            late = [Piece(param=0, first=first, stop=sizes[0]), Piece(param=1, first=0, stop=second)]
            rest = [Piece(param=1, first=second, stop=sizes[1])]
            groups = [early, late, rest] if whole else [early, late[:1], late[1:], rest]
            filled = [[piece for piece in group if piece.numel] for group in groups]
            assert limit <= finish_us(params, filled, when, costs) * (1 + 1e-12), (sizes, groups, when, costs)


def test_whole_parameters_in_any_groups_are_not_through_before_the_limit() -> None:
    # Not only runs of neighbours: groups of any parameters, in the order of their ready times.
    rng = random.Random(7)
    for _ in range(300):
        num = rng.randrange(1, 7)
        params, when = specs_of_sizes(*(rng.choice([0, 1, 2, 5, 9]) for _ in range(num))), timing(*times_us(rng, num))
        costs = table_costs(rng, sum(each.num_bytes for each in params), rng.choice(NOT_DECREASING))
        which = [rng.randrange(3) for _ in params]
        groups = [[i for i, group in enumerate(which) if group == wanted] for wanted in set(which)]
        groups.sort(key=lambda group: max(when.ready_us[i] for i in group))
        limit = limit_us(params, when, costs, has_shards=False)
        assert limit <= finish_us(params, groups, when, costs) * (1 + 1e-12), (params, when, costs)


def test_the_limit_of_a_busy_link_is_met() -> None:
    # All is ready at once, so that one bucket is best: 3 + 10 + 2 * 30. The limit's cells of sizes cost it 0.3 % at most.
    optimum = plan(specs_of_sizes(10, 20), timing(3, 3), Curve(10, 2))
    assert (optimum.groups, optimum.finish_us) == (((0, 1),), 73.0)
    assert 0.997 * 73 <= optimum.limit_us <= 73


def test_the_limit_of_a_cost_that_jumps_is_met_by_parts_below_the_jump() -> None:
    # 10 for up to 10 bytes and 100 above: 40 bytes in four parts. The cells of sizes cost the limit less than 1 %.
    costs = TableCosts({"all_reduce": [10.0] * 11 + [100.0] * 40})
    optimum = optimal_groups(specs_of_sizes(10, 10, 10, 10), range(4), timing(0, 0, 0, 0), costs, num_ranks=2)
    assert (optimum.finish_us, len(optimum.groups)) == (40.0, 4)
    limit = limit_us(specs_of_sizes(10, 10, 10, 10), timing(0, 0, 0, 0), costs, has_shards=False)
    assert 0.99 * 40 <= limit <= 40


def test_a_cost_that_decreases_raises_no_limit_above_the_optimum() -> None:
    rng = random.Random(12)
    for case in (random_case(rng, ("wild",)) for _ in range(300)):
        optimum = solve(case)
        assert optimum.limit_us <= optimum.best_us, case


def test_the_last_bucket_waits_for_the_end_of_backward() -> None:
    optimum = plan(specs_of_sizes(10, 10), timing(0, 20, end=50), Curve(1, 1))
    assert (optimum.groups, optimum.finish_us) == (((0,), (1,)), 61.0)


def test_a_small_gain_is_not_worth_a_launch() -> None:
    # Two buckets are through at 1000 + 1000 + 1, one at 1000 + 1001 + 1.
    optimum = plan(specs_of_sizes(1, 1000), timing(0, 1000), Curve(1, 1))
    assert (optimum.groups, optimum.best_us, optimum.finish_us) == (((0, 1),), 2001.0, 2002.0)


def test_dtypes_that_alternate_travel_in_one_bucket_each() -> None:
    params = [spec(f"p{i}", 8, dtype="float32" if i % 2 else "bfloat16") for i in range(20)]
    optimum = plan(params, timing(*range(20)), Curve(100, 0.01))
    assert optimum.groups == (tuple(range(0, 20, 2)), tuple(range(1, 20, 2)))


def test_the_bucket_of_a_kind_leaves_when_its_own_last_gradient_has_come() -> None:
    params = [spec("a", 10, dtype="uint8"), spec("b", 2, dtype="bfloat16")]
    # The first bucket is on the link from 0 to 11, the other one from 11 to 16: neither waits for 11 twice.
    optimum = plan(params, timing(0, 11), Curve(1, 1))
    assert (optimum.groups, optimum.finish_us) == (((0,), (1,)), 16.0)


def test_a_parameter_above_the_largest_bucket_travels_alone() -> None:
    optimum = plan(specs_of_sizes(3, 3, 99, 3, 3), timing(0, 0, 0, 0, 0), Curve(50, 1), max_bucket_bytes=8)
    assert optimum.groups == ((0, 1), (2,), (3, 4))


def test_sparse_gradients_cost_a_launch_and_no_bytes() -> None:
    params = [spec("a", 10, dtype="uint8"), spec("rows", 10, dtype="uint8", is_sparse=True)]
    assert plan(params, timing(0, 0), Curve(7, 1)).finish_us == 24.0


@pytest.mark.parametrize("has_shards", [False, True])
def test_without_parameters_one_empty_bucket_leaves_at_the_end_of_backward(has_shards: bool) -> None:
    empty = StepTiming(ready_us=(), backward_end_us=4.0)
    optimum = optimal_groups([], [], empty, Curve(2, 1), num_ranks=2, has_shards=has_shards)
    finish = 8.0 if has_shards else 6.0  # with shards it is gathered as well
    assert optimum == Optimum(groups=(), finish_us=finish, best_us=finish, limit_us=6.0)


def test_groups_of_a_concave_cost_are_the_best_of_neighbours_not_of_all() -> None:
    # 9 + 9 bytes in one bucket and 4 before them are through at 6.243: no run of neighbours is that early.
    params, when, root = specs_of_sizes(9, 4, 9), timing(0, 0, 2), Curve(0, 1, power=0.5)
    assert plan(params, when, root).best_us == pytest.approx(math.sqrt(13) + 3, **ROUNDING)  # 6.606
    assert finish_us(params, [(1,), (0, 2)], when, root) == pytest.approx(2 + math.sqrt(18), **ROUNDING)  # 6.243


@pytest.mark.parametrize(("num", "ratio"), [(10, 1.2), (100, 1.7), (500, 1.85)])
def test_merging_greedily_takes_up_to_twice_as_long_as_the_optimum(num: int, ratio: float) -> None:
    # MG-WFBP waits for a next gradient that comes before the launch of this one would be over. With r_i = 0.99 alpha i and
    # beta b_i = 0.98 alpha it always does, and one bucket leaves when backward is over: 1.97 alpha num. Of the optimum
    # about sqrt(2 num) launches are exposed: the link has 0.01 alpha to spare for each gradient, so buckets shrink one by one.
    launch_us, num_bytes = 100.0, 98
    when, curve = timing(*(0.99 * launch_us * i for i in range(1, num + 1))), Curve(launch_us, 1.0)
    params = specs_of_sizes(*[num_bytes] * num)
    merged = finish_us(params, [range(num)], when, curve)
    assert merged == pytest.approx(launch_us * (1 + 1.97 * num), **ROUNDING)
    assert merged > ratio * plan(params, when, curve).finish_us


def coarse_and_fine(rng: random.Random) -> tuple[float, float, float]:
    """The optimum over at most 12 atoms and over all parameters, and the longest time between gradients of one atom."""
    num = 60
    ready = sorted(rng.uniform(0, 100) for _ in range(num))
    params = specs_of_sizes(*(rng.choice([0, 1, 10, 100]) for _ in range(num)))
    curve = Curve(rng.uniform(0, 10), rng.choice([0.01, 0.03, 0.1]))
    when = timing(*ready)
    atoms = atoms_of(params, whole_pieces(params, range(num)), when, max_atoms=12)
    assert atoms.num_cuts <= 13
    spread = max(ready[stop - 1] - ready[first] for first, stop in pairwise(atoms.cuts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("undertow.plan.optimal._MAX_ATOMS", 12)
        coarse = plan(params, when, curve).best_us
    return coarse, plan(params, when, curve).best_us, spread


def test_coarsening_costs_no_more_than_the_time_within_an_atom() -> None:
    rng = random.Random(8)
    for coarse, fine, spread in (coarse_and_fine(rng) for _ in range(100)):
        assert fine <= coarse + 1e-10 <= fine + spread + 2e-10


def test_coarse_atoms_of_several_kinds_finish_as_they_were_planned_to() -> None:
    rng = random.Random(10)
    for _ in range(50):
        params = [spec(f"p{i}", rng.choice([0, 1, 10]), dtype=rng.choice(["float32", "bfloat16"])) for i in range(40)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("undertow.plan.optimal._MAX_ATOMS", 9)
            optimum = plan(params, timing(*(rng.uniform(0, 50) for _ in params)), Curve(rng.uniform(0, 5), 0.1))
        assert optimum.finish_us <= SLACK * optimum.best_us * (1 + 1e-12)


def test_atoms_of_several_parameters_fit_into_a_bucket() -> None:
    rng = random.Random(9)
    for _ in range(30):
        params = specs_of_sizes(*(rng.choice([0, 1, 10, 100]) for _ in range(60)))
        cap = math.ceil(sum(each.num_bytes for each in params) / 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("undertow.plan.optimal._MAX_ATOMS", 24)
            groups = plan(params, timing(*[0] * 60), Curve(5, 0.01), max_bucket_bytes=cap).groups
        assert all(sum(params[i].num_bytes for i in group if isinstance(i, int)) <= cap for group in groups)


@pytest.mark.parametrize("power", [1, 3, 9])
def test_ten_thousand_parameters_are_planned_over_at_most_512_atoms_of_a_230th_of_the_time(power: int) -> None:
    rng = random.Random(11)
    num, end = 10_000, 1000.0
    ready = sorted(end * rng.random() ** power for _ in range(num))
    params = specs_of_sizes(*(int(1000 * rng.random() ** power) for _ in range(num)))
    atoms = atoms_of(params, whole_pieces(params, range(num)), timing(*ready), max_atoms=512)
    spreads = [ready[stop - 1] - ready[first] for first, stop in pairwise(atoms.cuts)]
    assert len(spreads) <= 512
    assert max(spreads) <= (ready[-1] - ready[0]) / 230


def test_buckets_too_small_to_be_planned_are_refused() -> None:
    params = specs_of_sizes(*[10] * 3000)
    call = partial(plan, params, timing(*range(3000)), Curve(1, 1), max_bucket_bytes=11)
    assert text_of(ConfigError, call) == (
        "buckets of at most 11 bytes are too small to be planned.\n"
        "  30000 bytes of gradients, in at most 1024 parts that no bucket may cut\n"
        "  Allow buckets of 469 bytes."
    )
    assert len(call(max_bucket_bytes=469).groups) < 1024


def test_costs_without_end_are_refused() -> None:
    call = partial(plan, specs_of_sizes(1, 2), timing(1, 2), Curve(math.inf, 1))
    assert text_of(ConfigError, call) == (
        "no plan is ever through: a collective costs inf.\n"
        "  costs of all_reduce\n"
        "  Give finite costs for all sizes up to those of all gradients together."
    )


def test_every_parameter_needs_its_time() -> None:
    call = partial(plan, specs_of_sizes(1, 2), timing(1), Curve(1, 1))
    assert text_of(ConfigError, call) == (
        "each of the 2 parameters must have its ready_us, got 1 of them.\n"
        "  the timing of a step\n"
        "  Give one time for each parameter, in the order of the parameters."
    )


def test_an_order_is_a_permutation() -> None:
    call = partial(optimal_groups, specs_of_sizes(1, 2), [0, 0], timing(1, 1), Curve(1, 1), num_ranks=2)
    assert text_of(ConfigError, call) == (
        "an order must hold each of the 2 parameters exactly once.\n"
        "  got 2 indices, 1 of them different parameters\n"
        "  Give a permutation of range(len(params))."
    )


@pytest.mark.parametrize("time", [-1.0, math.inf, math.nan])
def test_a_time_of_a_step_is_finite_and_not_negative(time: float) -> None:
    remedy = "Count from the beginning of the step or of forward; a gradient that never comes is ready when backward ends."
    what = f"a time of a step must be finite and not negative, got {time}."
    assert text_of(ConfigError, partial(timing, 1.0, time, end=2.0)) == f"{what}\n  ready_us of parameter 1\n  {remedy}"
    assert text_of(ConfigError, partial(timing, 1.0, end=time)) == f"{what}\n  backward_end_us\n  {remedy}"
    call = partial(replace, timing(1.0), used_us=(time,))
    assert text_of(ConfigError, call) == f"{what}\n  used_us of parameter 0\n  {remedy}"


def test_a_piece_of_a_parameter_counts_with_its_own_bytes() -> None:
    params = specs_of_sizes(32)
    groups = [[Piece(param=0, first=0, stop=16)], [Piece(param=0, first=16, stop=32)]]
    assert finish_us(params, groups, timing(5), Curve(1, 1)) == 39.0  # 5 + 17 + 17
