from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from support.errors import text_of
from undertow.cost import MeshCosts
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, Piece, Plan, plan_from_groups
from undertow.plan.finish import StepTiming, finish_us
from undertow.profile import Profile
from undertow.schedule import DDP, HYBRID, STRATEGIES, ZERO1, Strategy, lower_data_parallel
from undertow.simulate import Conditions, simulate
from undertow.trace import Trace, limit_us, summarize

# Times are multiples of a microsecond, or end in clocks that add up a few hundred of them: what remains is rounding.
ROUNDING_US = 1e-6


@dataclass(frozen=True)
class LineCosts:
    """A line for every kind of collective: (microseconds of one without bytes, microseconds per byte)."""

    lines: Mapping[str, tuple[float, float]]

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        fixed, per_byte = self.lines[kind]
        return fixed + per_byte * np.asarray(num_bytes, dtype=np.float64)


# A reduction of whatever size takes 8 us, a gather 6 us.
FIXED = LineCosts({"all_reduce": (8, 0), "reduce_scatter": (8, 0), "all_gather": (6, 0)})
FREE = LineCosts({"all_reduce": (0, 0), "reduce_scatter": (0, 0), "all_gather": (0, 0)})


def profile_of(ready_us: Sequence[float], *, backward_us: float, numels: Sequence[int] = (), update_us: float = 5) -> Profile:
    numels = numels or [100] * len(ready_us)
    params = tuple(ParamSpec(name=f"p{i}", shape=(numel,), dtype="float32", itemsize=4) for i, numel in enumerate(numels))
    return Profile(params=params, ready_us=tuple(ready_us), forward_us=10, backward_us=backward_us, update_us=update_us)


TWO = profile_of([20, 10], backward_us=20)  # p1 is ready first, half of backward before p0


def two_buckets(num_ranks: int = 2) -> Plan:
    return plan_from_groups(TWO.params, [[1], [0]], num_ranks=num_ranks)


def text_of_trace(trace: Trace) -> str:
    rows = []
    for event in sorted(trace.events, key=lambda event: (event.lane != "compute", event.start_us, event.stop_us)):
        bucket = "" if event.bucket is None else f" b{event.bucket}"
        rows.append(f"{event.lane} {event.kind}{bucket}: {event.start_us:g} to {event.stop_us:g}\n")
    return "".join(rows)


def test_two_buckets_are_reduced_under_backward() -> None:
    # The forward takes 0 to 10, backward 10 to 30. The first bucket is ready at 20; the last leaves with the end of backward.
    trace = simulate(TWO, two_buckets(), DDP, FIXED).trace()
    assert text_of_trace(trace) == (
        "compute forward: 0 to 10\n"
        "compute backward: 10 to 30\n"
        "compute wait b0: 30 to 30\n"
        "compute wait b1: 30 to 38\n"
        "compute optimizer: 38 to 43\n"
        "comm.dp all_reduce b0: 20 to 28\n"
        "comm.dp all_reduce b1: 30 to 38\n"
    )


def test_without_overlap_both_leave_after_backward() -> None:
    trace = simulate(TWO, two_buckets(), DDP, FIXED, Conditions(overlap=False)).trace()
    assert text_of_trace(trace) == (
        "compute forward: 0 to 10\n"
        "compute backward: 10 to 30\n"
        "compute wait b0: 30 to 38\n"
        "compute wait b1: 38 to 46\n"
        "compute optimizer: 46 to 51\n"
        "comm.dp all_reduce b0: 30 to 38\n"
        "comm.dp all_reduce b1: 38 to 46\n"
    )


def test_each_bucket_is_gathered_before_the_forward_reads_it() -> None:
    # p0 is read at once and gathered first: the forward waits 6 for it, then computes 5 until p1 is read, which comes at 12.
    trace = simulate(TWO, two_buckets(), ZERO1, FIXED).trace()
    assert text_of_trace(trace) == (
        "compute wait b1: 0 to 6\n"
        "compute forward: 0 to 17\n"
        "compute wait b0: 11 to 12\n"
        "compute backward: 17 to 37\n"
        "compute wait b0: 37 to 37\n"
        "compute wait b1: 37 to 45\n"
        "compute optimizer: 45 to 50\n"
        "comm.dp all_gather b1: 0 to 6\n"
        "comm.dp all_gather b0: 6 to 12\n"
        "comm.dp reduce_scatter b0: 27 to 35\n"
        "comm.dp reduce_scatter b1: 37 to 45\n"
    )


# Inside a reduce-scatter takes 3 us and a gather 6, across an all-reduce takes 5: a reduction takes 8 as above.
MESH = MeshCosts(
    inside=LineCosts({"reduce_scatter": (3, 0), "all_gather": (6, 0)}), across=LineCosts({"all_reduce": (5, 0)}), per_node=2
)


@pytest.mark.parametrize("conditions", [Conditions(), Conditions(overlap=False), Conditions(contention=0.3)], ids=str)
def test_a_reduction_over_two_axes_is_in_both_one_after_the_other(conditions: Conditions) -> None:
    plan = two_buckets(num_ranks=4)
    assert simulate(TWO, plan, HYBRID, MESH, conditions).trace() == simulate(TWO, plan, ZERO1, FIXED, conditions).trace()


def test_across_go_the_bytes_of_a_shard() -> None:
    across = LineCosts({"all_reduce": (0, 1)})
    free = LineCosts({"reduce_scatter": (0, 0), "all_gather": (0, 0)})
    record = simulate(TWO, two_buckets(num_ranks=8), HYBRID, MeshCosts(inside=free, across=across, per_node=4))
    assert [stop - start for start, stop in record.wire_intervals()] == [sent.num_bytes / 4 for sent in record.buckets]
    assert record.buckets[0].num_bytes >= 400


def test_costs_that_were_measured_have_both_axes_in_one() -> None:
    plan = two_buckets(num_ranks=4)
    assert simulate(TWO, plan, HYBRID, FIXED).trace() == simulate(TWO, plan, ZERO1, FIXED).trace()


def test_a_bucket_is_stepped_when_it_is_through_both_axes() -> None:
    plan, eager = two_buckets(num_ranks=4), Conditions(eager=True, gathers_behind=((0,), (1,)))
    assert simulate(TWO, plan, HYBRID, MESH, eager).trace() == simulate(TWO, plan, ZERO1, FIXED, eager).trace()


def test_without_overlap_gathers_are_waited_for_before_the_forward() -> None:
    record = simulate(TWO, two_buckets(), ZERO1, FIXED, Conditions(overlap=False))
    assert [gather.waited for gather in record.gathers] == [(0, 6), (6, 12)]
    assert record.step_us == 5 + 12 + 10 + 20 + 16


def test_a_parameter_in_pieces_is_ready_for_all_its_buckets_at_once() -> None:
    groups = [[1, Piece(param=0, first=0, stop=48)], [Piece(param=0, first=48, stop=100)]]
    record = simulate(TWO, plan_from_groups(TWO.params, groups, num_ranks=2), ZERO1, FIXED)
    assert [bucket.ready_us - record.forwards[0][1] for bucket in record.buckets] == [20, 20]
    assert [gather.waited[0] for gather in record.gathers] == [0, 6]


def test_a_bucket_of_a_late_gradient_holds_back_those_behind_it() -> None:
    profile = profile_of([1, 18, 2], backward_us=20)
    record = simulate(profile, plan_from_groups(profile.params, [[1], [0], [2]], num_ranks=2), DDP, FIXED)
    assert [(row.ready_us, row.launched_us) for row in record.buckets] == [(28, 28), (11, 28), (30, 30)]


def test_a_collective_starts_when_the_slowest_rank_has_launched_it() -> None:
    # Two ranks are the quantiles 1/4 and 3/4 of a normal distribution: 0.67449 deviations from its mean.
    slow = 1 + 0.1 * 0.6744897501960817
    record = simulate(TWO, two_buckets(), DDP, FIXED, Conditions(skew=0.1))
    fast_begin_us = 5 * (2 - slow)
    assert record.buckets[0].ready_us == pytest.approx((10 + 10) * (2 - slow), abs=ROUNDING_US)
    assert record.buckets[0].done_us + fast_begin_us == pytest.approx((5 + 10 + 10) * slow + 8, abs=ROUNDING_US)
    assert record.step_us == pytest.approx((5 + 10 + 20) * slow + 8, abs=ROUNDING_US)


def test_the_report_tells_the_wire_from_a_late_rank() -> None:
    fast, late = (
        summarize([simulate(TWO, two_buckets(), DDP, FIXED, Conditions(skew=0.1, rank=rank))], two_buckets(), rank=rank)
        for rank in (0, 1)
    )
    # The slow rank waits 8 us for its last bucket; the fast one 8 us and the 35 us of computing times both deviations.
    assert (late.wire_ms, late.late_rank_ms) == (pytest.approx(0.008), 0)
    assert (fast.wire_ms, fast.late_rank_ms) == (pytest.approx(0.008), pytest.approx(0.035 * 0.2 * 0.6744897501960817))
    assert fast.slowest_rank == late.slowest_rank == 1


def test_every_rank_has_the_time_it_was_busy() -> None:
    equal = simulate(TWO, two_buckets(num_ranks=3), DDP, FIXED)
    skewed = simulate(TWO, two_buckets(num_ranks=3), DDP, FIXED, Conditions(skew=0.1))
    assert equal.busy_ms == (0.035, 0.035, 0.035)
    assert skewed.busy_ms[1] == pytest.approx(0.035)
    assert skewed.busy_ms == tuple(sorted(skewed.busy_ms))


def test_a_late_rank_holds_gathers_back() -> None:
    slow = 1 + 0.1 * 0.6744897501960817
    record = simulate(TWO, two_buckets(), ZERO1, FIXED, Conditions(skew=0.1))
    assert [row.launched_us for row in record.gathers] == [0, 0]
    assert record.gathers[0].done_us == pytest.approx(5 * slow - 5 * (2 - slow) + 6, abs=ROUNDING_US)


def test_contention_slows_computation_while_the_lane_is_busy() -> None:
    # The first bucket takes 20 to 28 and half of the computing in it: the last one leaves 4 later than 30.
    record = simulate(TWO, two_buckets(), DDP, FIXED, Conditions(contention=0.5))
    assert record.buckets[1].launched_us == pytest.approx(34, abs=ROUNDING_US)
    assert record.step_us == pytest.approx(47, abs=ROUNDING_US)


def test_contention_of_gathers_slows_the_forward() -> None:
    # The forward waits for b1 until 6, and has computed 3 of its first 5 when b0 is there at 12; 2 and 5 are left: 19.
    record = simulate(TWO, two_buckets(), ZERO1, FIXED, Conditions(contention=0.5))
    assert record.forwards[0][1] == pytest.approx(19, abs=ROUNDING_US)


def test_ranks_that_are_slow_compute_slowly_beside_the_lane_too() -> None:
    # With a lane that is busy from the first bucket to the end of backward, half of all speed is lost from there on.
    slow = 1 + 0.1 * 0.6744897501960817
    busy = LineCosts({"all_reduce": (1000, 0)})
    record = simulate(TWO, two_buckets(), DDP, busy, Conditions(skew=0.1, contention=0.5))
    assert record.busy_ms[1] * 1e3 == pytest.approx(25 * slow + 2 * 10 * slow, abs=ROUNDING_US)


def test_launching_takes_computing_time() -> None:
    # Gathers are launched before the forward begins, the first reduction before the second half of backward.
    record = simulate(TWO, two_buckets(), ZERO1, FREE, Conditions(launch_us=1))
    assert [row.launched_us for row in record.gathers] == [-2, -1]
    assert [row.launched_us for row in record.buckets] == [20, 31]
    assert record.step_us == 5 + 10 + 20 + 4


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_one_rank_that_communicates_for_nothing_only_computes(strategy: Strategy) -> None:
    assert simulate(TWO, two_buckets(num_ranks=1), strategy, FREE).step_us == 35


def test_a_model_without_parameters_has_a_step() -> None:
    profile = Profile(params=(), ready_us=(), forward_us=10, backward_us=20)
    assert simulate(profile, plan_from_groups((), [], num_ranks=2), ZERO1, FIXED).step_us == 10 + 20 + 8


# Random steps: gradient sizes, ready times and where buckets end, and a line of costs per kind.
NUM_PARAMS = 8
TIMES = st.floats(0, 1000)
COSTS = st.tuples(st.floats(0, 100), st.floats(0, 1))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Profile, Plan]:
    ready_us = draw(st.lists(TIMES, min_size=1, max_size=NUM_PARAMS))
    numels = draw(st.lists(st.integers(0, 400), min_size=len(ready_us), max_size=len(ready_us)))
    profile = profile_of(ready_us, backward_us=max(ready_us) + draw(TIMES) + 1, numels=numels)
    cuts = sorted(draw(st.sets(st.integers(1, len(ready_us)))))
    order = profile.order if draw(st.booleans()) else range(len(ready_us))
    groups = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(ready_us)], strict=True)]
    return profile, plan_from_groups(profile.params, groups, num_ranks=draw(st.integers(2, 5)))


def lines(reduction: tuple[float, float], gather: tuple[float, float] = (0, 0)) -> LineCosts:
    return LineCosts({"all_reduce": reduction, "reduce_scatter": reduction, "all_gather": gather})


@settings(deadline=None)
@given(steps(), COSTS)
def test_reductions_end_as_the_planner_reckons(step: tuple[Profile, Plan], cost: tuple[float, float]) -> None:
    # The planner's recurrence: F = max(F, ready) + C, with the last bucket not ready before backward is over.
    profile, plan = step
    record = simulate(profile, plan, DDP, lines(cost))
    finish_us, ready_us = 0.0, 0.0
    for bucket in plan.buckets:
        is_last = bucket.index == len(plan.buckets) - 1
        ready_us = max(ready_us, *(profile.ready_us[param] for param in bucket.params), profile.backward_us * is_last)
        finish_us = max(finish_us, ready_us) + cost[0] + cost[1] * bucket.wire_bytes
    assert record.buckets[-1].done_us - record.forwards[0][1] == pytest.approx(finish_us, abs=ROUNDING_US)


@settings(deadline=None)
@given(steps(), TIMES, TIMES, st.sampled_from([DDP, ZERO1]))
def test_a_step_takes_what_the_planner_has_minimised(
    step: tuple[Profile, Plan], reduction_us: float, gather_us: float, strategy: Strategy
) -> None:
    # Costs of any size are the same: the planner leaves out padding and trailers. Buckets in ready order, as it makes them.
    profile, given_plan = step
    cuts = [0, *accumulate(len(bucket.params) for bucket in given_plan.buckets)]
    plan = plan_from_groups(profile.params, [profile.order[i:j] for i, j in pairwise(cuts)], num_ranks=given_plan.num_ranks)
    assume(all(bucket.shard_numel for bucket in plan.buckets))  # what holds nothing is not gathered
    costs = lines((reduction_us, 0), (gather_us, 0))
    timing = StepTiming(ready_us=profile.ready_us, backward_end_us=profile.backward_us, used_us=profile.used_us)
    planned_us = finish_us(profile.params, plan.groups, timing, costs, has_shards=strategy.gather is not None)
    record = simulate(profile, plan, strategy, costs)
    expected_us = profile.update_us + profile.forward_us + planned_us
    assert record.step_us == pytest.approx(expected_us, abs=ROUNDING_US)


@settings(deadline=None)
@given(steps(), COSTS, COSTS, st.sampled_from([DDP, ZERO1]))
def test_no_step_is_shorter_than_its_limit(
    step: tuple[Profile, Plan], reduction: tuple[float, float], gather: tuple[float, float], strategy: Strategy
) -> None:
    profile, plan = step
    costs = lines(reduction, gather)
    record = simulate(profile, plan, strategy, costs)
    wire_us = costs.collective_us(strategy.reduction, [bucket.wire_bytes for bucket in plan.buckets])
    ready_us = [max(profile.ready_us[param] for param in bucket.params) for bucket in plan.buckets]
    compute_us = profile.update_us + profile.forward_us
    bound_us = compute_us + max(profile.backward_us, limit_us(ready_us, wire_us.tolist()))
    gathers_us = sum(stop - start for start, stop in record.gather_intervals())
    assert record.step_us >= bound_us - ROUNDING_US
    assert record.step_us >= profile.update_us + gathers_us + wire_us.sum() - ROUNDING_US


@settings(deadline=None)
@given(steps(), COSTS, COSTS, COSTS, st.sampled_from([DDP, ZERO1]), st.booleans())
def test_a_slower_network_never_makes_a_step_shorter(
    step: tuple[Profile, Plan],
    reduction: tuple[float, float],
    gather: tuple[float, float],
    more: tuple[float, float],
    strategy: Strategy,
    overlap: bool,
) -> None:
    conditions = Conditions(overlap=overlap, skew=0.1)
    fast = simulate(*step, strategy, lines(reduction, gather), conditions)
    slower = lines((reduction[0] + more[0], reduction[1] + more[1]), (gather[0] + more[0], gather[1]))
    slow = simulate(*step, strategy, slower, conditions)
    assert slow.step_us >= fast.step_us - ROUNDING_US


@settings(deadline=None)
@given(steps(), COSTS, st.sampled_from([DDP, ZERO1]), st.booleans(), st.floats(0, 0.5))
def test_collectives_leave_in_the_order_of_the_schedule(
    step: tuple[Profile, Plan], cost: tuple[float, float], strategy: Strategy, overlap: bool, contention: float
) -> None:
    profile, plan = step
    record = simulate(profile, plan, strategy, lines(cost, cost), Conditions(overlap=overlap, contention=contention, skew=0.1))
    schedule = lower_data_parallel(len(plan.buckets), strategy, overlap=overlap)
    reductions = [op.bucket for op in schedule.collectives if op.kind is strategy.reduction]
    assert [row.bucket for row in record.buckets] == reductions
    first_used_us = [min(profile.used_us[param] for param in plan.buckets[row.bucket].params) for row in record.gathers]
    assert first_used_us == sorted(first_used_us)
    for rows in (record.gathers, record.buckets):
        launched_us = [row.launched_us for row in rows]
        assert launched_us == sorted(launched_us)


@settings(deadline=None)
@given(steps(), st.sampled_from([DDP, ZERO1]), st.booleans())
def test_free_communication_leaves_computing_alone(step: tuple[Profile, Plan], strategy: Strategy, overlap: bool) -> None:
    profile, plan = step
    record = simulate(profile, plan, strategy, FREE, Conditions(overlap=overlap, contention=0.5))
    assert record.step_us == pytest.approx(profile.update_us + profile.forward_us + profile.backward_us, abs=ROUNDING_US)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"skew": -0.1}, "skew must be 0 to 0.2, got -0.1.\n{}\n  0.05 is a standard deviation of 5 % between ranks."),
        ({"skew": float("nan")}, "skew must be 0 to 0.2, got nan.\n{}\n  0.05 is a standard deviation of 5 % between ranks."),
        (
            {"contention": 1.0},
            "contention must be 0 or more and below 1, got 1.0.\n{}\n  0.1 slows computation by 10 % while the network works.",
        ),
        ({"launch_us": -1.0}, "launch_us must be 0 or more, got -1.0.\n{}\n  Give microseconds per collective."),
        ({"rank": -1}, "there is no rank -1.\n{}\n  Ranks count from 0, the fastest."),
    ],
)
def test_impossible_conditions_are_refused(conditions: dict[str, float], expected: str) -> None:
    assert text_of(ConfigError, lambda: Conditions(**conditions)) == expected.format("  conditions of a simulated step")


def test_a_rank_that_the_plan_does_not_have_is_refused() -> None:
    assert (
        text_of(ConfigError, lambda: simulate(TWO, two_buckets(), DDP, FIXED, Conditions(rank=2)))
        == "there is no rank 2.\n  conditions of a simulated step\n  The plan is for ranks 0 to 1."
    )


def test_the_plan_of_another_model_is_refused() -> None:
    other = replace(TWO, params=(TWO.params[0],), ready_us=(20.0,))
    assert text_of(ConfigError, lambda: simulate(other, two_buckets(), DDP, FIXED)) == (
        "the plan is for other parameters than the profile.\n  the plan has 2 parameters, the profile 1\n"
        "  Make the plan from the parameters of this profile."
    )
