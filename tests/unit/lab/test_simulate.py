"""Steps that are simulated: by hand, and against a sum of one event after another."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.errors import refusal
from undertow.lab.cost import CostCurve, Costs, NodeCosts
from undertow.lab.profile import Profile
from undertow.lab.simulate import DEFAULTS, IDEAL, Conditions, simulate, with_divided_update
from undertow.plan import Groups, Plan, plan_from_groups
from undertow.schedule import (
    DDP,
    HYBRID,
    ZERO1,
    OpKind,
    Strategy,
    lower_data_parallel,
)
from undertow.trace import StepRecord, Trace
from undertow.wire import WIRES
from unit.lab.steps import FREE, Case, lines, profile_of

# Times are multiples of a microsecond, or end in clocks that add up a few hundred of them: what remains is rounding.
ROUNDING_US = 1e-6
SLOW = 1 + 0.1 * 0.6744897501960817  # two ranks are the quantiles 1/4 and 3/4 of a normal distribution, of deviation 0.1
FIXED = lines((8, 0), gather=(6, 0))  # a reduction of whatever size takes 8 us, a gather 6
# Inside a reduce-scatter takes 3 us and a gather 6, across an all-reduce takes 5: a reduction takes 8 as above.
MESH = NodeCosts(inside=lines((3, 0), gather=(6, 0)), across=lines((5, 0)), per_node=2, is_mesh=True)
TWO = profile_of([20, 10], backward_us=20)  # p1 is ready first, half of backward before p0
LATE, NONE = profile_of([1, 18, 2], backward_us=20), replace(TWO, params=(), ready_us=(), update_us=0)


def simulated(
    strategy: Strategy,
    costs: Costs = FIXED,
    *,
    profile: Profile = TWO,
    groups: Any = ((1,), (0,)),
    num_ranks: int = 2,
    **conditions: Any,
) -> StepRecord:
    return simulate(
        profile, plan_from_groups(profile.params, groups, num_ranks=num_ranks), strategy, costs, replace(IDEAL, **conditions)
    )


def text_of_trace(trace: Trace) -> str:
    return "".join(
        f"{event.lane} {event.kind}{'' if event.bucket is None else f' b{event.bucket}'}: "
        f"{event.start_us:g} to {event.stop_us:g}\n"
        for event in sorted(trace.events, key=lambda event: (event.lane != "compute", event.start_us, event.stop_us))
    )


@pytest.mark.parametrize(
    ("simulate_it", "text"),
    [
        # The forward takes 0 to 10, backward 10 to 30. The first bucket is ready at 20; the last leaves with the end of backward.
        pytest.param(
            lambda: simulated(DDP),
            "compute forward: 0 to 10\n"
            "compute backward: 10 to 30\n"
            "compute wait b0: 30 to 30\n"
            "compute wait b1: 30 to 38\n"
            "compute optimizer: 38 to 43\n"
            "comm.dp all_reduce b0: 20 to 28\n"
            "comm.dp all_reduce b1: 30 to 38\n",
            id="reduced under backward",
        ),
        pytest.param(
            lambda: simulated(DDP, overlap=False),
            "compute forward: 0 to 10\n"
            "compute backward: 10 to 30\n"
            "compute wait b0: 30 to 38\n"
            "compute wait b1: 38 to 46\n"
            "compute optimizer: 46 to 51\n"
            "comm.dp all_reduce b0: 30 to 38\n"
            "comm.dp all_reduce b1: 38 to 46\n",
            id="reduced after backward",
        ),
        # p0 is read at once and gathered first: the forward waits 6 for it, then computes 5 until p1 is read, which comes at 12.
        pytest.param(
            lambda: simulated(ZERO1),
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
            "comm.dp reduce_scatter b1: 37 to 45\n",
            id="gathered before the forward reads",
        ),
    ],
)
def test_a_simulated_trace_has_the_times_reckoned_by_hand(simulate_it: Callable[[], StepRecord], text: str) -> None:
    assert text_of_trace(simulate_it().trace()) == text


@pytest.mark.parametrize("costs", [MESH, FIXED], ids=["by axis", "both axes in one, as measured"])
@pytest.mark.parametrize(
    "conditions",
    [{}, {"overlap": False}, {"contention": 0.3}],
    ids=["", "no overlap", "contention"],
)
def test_a_reduction_over_two_axes_is_in_both_one_after_the_other(costs: Costs, conditions: dict[str, Any]) -> None:
    traces = [simulated(*how, num_ranks=4, **conditions).trace() for how in ((HYBRID, costs), (ZERO1, FIXED))]
    assert traces[0] == traces[1]


@pytest.mark.parametrize(
    ("simulate_it", "look", "expected"),
    [
        pytest.param(
            lambda: simulated(DDP, profile=LATE, groups=[[1], [0], [2]]),
            lambda it: (*(row.ready_us for row in it.buckets), *(row.launched_us for row in it.buckets)),
            (28, 11, 30, 28, 28, 30),
            id="a bucket of a late gradient holds back those behind it",
        ),
        pytest.param(
            lambda: simulated(DDP, skew=0.1),
            lambda it: (it.buckets[0].ready_us, it.buckets[0].done_us + 5 * (2 - SLOW), it.step_us),
            ((10 + 10) * (2 - SLOW), (5 + 10 + 10) * SLOW + 8, (5 + 10 + 20) * SLOW + 8),
            id="a collective starts when the slowest rank has launched it",
        ),
        # The first bucket takes 20 to 28 and half of the computing in it: the last one leaves 4 later than 30.
        pytest.param(
            lambda: simulated(DDP, contention=0.5),
            lambda it: (it.buckets[1].launched_us, it.step_us),
            (34, 47),
            id="contention slows computation while the lane is busy",
        ),
        # Of three ranks the one in the middle is as fast as the mean.
        pytest.param(
            lambda: simulated(DDP, num_ranks=3, skew=0.1),
            lambda it: (it.busy_ms[1], it.busy_ms == tuple(sorted(it.busy_ms))),
            (0.035, True),
            id="ranks are busy for longer, one after the other",
        ),
        # Gathers are launched before the forward begins, the first reduction before the second half of backward.
        pytest.param(
            lambda: simulated(ZERO1, FREE, launch_us=1),
            lambda it: (*(row.launched_us for row in (*it.gathers, *it.buckets)), it.step_us),
            (-2, -1, 20, 31, 5 + 10 + 20 + 4),
            id="launching takes computing time",
        ),
        pytest.param(
            lambda: simulated(ZERO1, profile=NONE, groups=[]),
            lambda it: (it.step_us,),
            (10 + 20 + 8,),
            id="a model without parameters has a step",
        ),
    ],
)
def test_a_simulated_step_takes_as_long_as_reckoned_by_hand(
    simulate_it: Callable[[], StepRecord], look: Callable[[StepRecord], tuple[float, ...]], expected: tuple[float, ...]
) -> None:
    assert look(simulate_it()) == pytest.approx(expected, rel=0, abs=ROUNDING_US)


# Random steps: gradient sizes, ready times and where buckets end, and a line of costs per kind.
TIMES, COSTS = st.floats(0, 1000), st.tuples(st.floats(0, 100), st.floats(0, 1))
some_strategy = st.sampled_from([DDP, ZERO1])


@st.composite
def steps(draw: st.DrawFn) -> tuple[Profile, Plan]:
    ready_us = draw(st.lists(TIMES, min_size=1, max_size=8))
    profile = profile_of(
        ready_us,
        backward_us=max(ready_us) + draw(TIMES) + 1,
        numels=draw(st.lists(st.integers(0, 400), min_size=len(ready_us), max_size=len(ready_us))),
    )
    cuts = sorted(draw(st.sets(st.integers(1, len(ready_us)))))
    order = profile.order if draw(st.booleans()) else range(len(ready_us))
    return profile, plan_from_groups(
        profile.params,
        [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(ready_us)], strict=True)],
        num_ranks=draw(st.integers(2, 5)),
    )


@given(steps(), TIMES, TIMES, some_strategy)
def test_a_step_takes_the_time_of_its_events_one_after_another(
    step: tuple[Profile, Plan], reduction_us: float, gather_us: float, strategy: Strategy
) -> None:
    # Costs of any size are the same: the sum leaves out padding and trailers. Buckets in ready order, as a planner makes them.
    profile, given_plan = step
    cuts = [0, *accumulate(len(bucket.params) for bucket in given_plan.buckets)]
    plan = plan_from_groups(profile.params, [profile.order[i:j] for i, j in pairwise(cuts)], num_ranks=given_plan.num_ranks)
    assume(all(bucket.shard_numel for bucket in plan.buckets))  # what holds nothing is not gathered
    costs = lines((reduction_us, 0), (gather_us, 0))
    events = Case(
        params=profile.params,
        order=profile.order,
        ready_us=profile.ready_us,
        backward_end_us=profile.backward_us,
        costs=costs,
        used_us=profile.used_us,
        has_shards=strategy.gather is not None,
    )
    summed_us = profile.update_us + profile.forward_us + events.finish_us(plan.groups)
    assert simulate(profile, plan, strategy, costs, IDEAL).step_us == pytest.approx(summed_us, abs=ROUNDING_US)


@given(steps(), COSTS, some_strategy, st.booleans(), st.floats(0, 0.5))
def test_collectives_leave_in_the_order_of_the_schedule(
    step: tuple[Profile, Plan], cost: tuple[float, float], strategy: Strategy, overlap: bool, contention: float
) -> None:
    profile, plan = step
    record = simulate(profile, plan, strategy, lines(cost, cost), Conditions(overlap=overlap, contention=contention, skew=0.1))
    schedule = lower_data_parallel(len(plan.buckets), strategy, overlap=overlap)
    assert [row.bucket for row in record.buckets] == [op.bucket for op in schedule.ops if op.kind is strategy.reduction]
    launched = [op.bucket for op in schedule.ops if op.kind is OpKind.ALL_GATHER]
    assert [row.bucket for row in record.gathers] == [bucket for bucket in launched if plan.buckets[bucket or 0].shard_numel]
    launches_us = [[row.launched_us for row in rows] for rows in (record.gathers, record.buckets)]
    assert launches_us == [sorted(times_us) for times_us in launches_us]


# 100,000 elements of fp32 each; a byte takes 1 ns.
WIDE, NS = profile_of([2000, 1000], backward_us=2000, numels=[100_000, 100_000]), lines((0, 1e-3), (0, 1e-3))


@pytest.mark.parametrize("wires", [(None, None), ("int8", "int8"), ("bfloat16", None)], ids=["full width", "int8", "mixed"])
def test_a_bucket_in_a_format_takes_the_time_of_its_bytes_and_of_its_coding(wires: tuple[str | None, ...]) -> None:
    plan = plan_from_groups(WIDE.params, [[1], [0]], num_ranks=2, wires=wires)
    record = simulate(WIDE, plan, DDP, NS, IDEAL)
    for row, bucket in zip(record.buckets, plan.buckets, strict=True):
        coding_us = 0.0
        if bucket.wire:
            coding_us = WIRES[bucket.wire].coding_us_per_mb * 4e-6 * bucket.narrow_numel + WIRES[bucket.wire].bucket_us
        assert row.num_bytes == bucket.wire_bytes
        assert row.done_us - row.launched_us == pytest.approx(1e-3 * bucket.wire_bytes + coding_us, abs=ROUNDING_US)


def test_processor_time_of_a_format_delays_backward_unless_a_stream_has_the_work() -> None:
    launches_us = []
    for device in ("cpu", "cuda"):
        profile = replace(WIDE, params=tuple(replace(spec, device=device) for spec in WIDE.params))
        plan = plan_from_groups(profile.params, [[1], [0]], num_ranks=2, wires=("int8", "int8"))
        launches_us.append(simulate(profile, plan, DDP, NS, IDEAL).buckets[-1].launched_us)
    assert launches_us[0] - launches_us[1] == WIRES["int8"].bucket_us


def test_gathers_of_parameters_have_a_format_too() -> None:
    plan = plan_from_groups(WIDE.params, [[1], [0]], num_ranks=2)
    full, narrow = (simulate(WIDE, plan, ZERO1, NS, IDEAL, param_wire=wire) for wire in (None, "bfloat16"))
    assert [[row.num_bytes for row in record.gathers] for record in (full, narrow)] == [[400_000] * 2, [200_000] * 2]
    gained_us = 1e-3 * 200_000 - WIRES["bfloat16"].coding_us_per_mb * 0.4 / 2
    assert full.gathers[0].done_us - narrow.gathers[0].done_us == pytest.approx(gained_us, abs=ROUNDING_US)


WHERE = "\n  conditions of a simulated step\n  "
SHARES = "skew and contention are shares, 0.1 is 10 %; the others are microseconds."


@pytest.mark.parametrize(
    ("call", "text"),
    [
        pytest.param(
            lambda: Conditions(skew=-0.1),
            f"skew must be 0 to 0.2, got -0.1.{WHERE}{SHARES}",
            id="a negative skew",
        ),
        pytest.param(
            lambda: Conditions(contention=1.0),
            f"contention must be 0 to 0.99, got 1.0.{WHERE}{SHARES}",
            id="contention that leaves nothing",
        ),
        pytest.param(
            lambda: simulate(NONE, plan_from_groups(TWO.params, [[1], [0]], num_ranks=2), DDP, FIXED),
            "the plan is for other parameters than the profile.\n  the plan has 2 parameters, the profile 0\n"
            "  Make the plan from the parameters of this profile.",
            id="the plan of another model",
        ),
        pytest.param(
            lambda: Conditions(launch_us=-1.0),
            f"launch_us must be 0 or more, got -1.0.{WHERE}{SHARES}",
            id="a negative launch",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(call: Callable[[], object], text: str) -> None:
    assert refusal(call) == text


PACKED = replace(
    profile_of([20, 10], backward_us=24), num_ranks=2, curves={"all_reduce": CostCurve(points=((1, 8), (1e6, 8), (1e9, 8)))}
)


def test_numbers_are_given_measured_or_assumed_in_this_order() -> None:
    measured = replace(PACKED, skew=0.01)
    assert Conditions().of(TWO) == DEFAULTS
    assert Conditions().of(measured) == {**dict.fromkeys(DEFAULTS, 0.0), "skew": 0.01}
    assert Conditions(skew=0.02, launch_us=3).of(measured) == {**dict.fromkeys(DEFAULTS, 0.0), "skew": 0.02, "launch_us": 3}


def test_packing_that_is_in_a_measured_profile_counts_once() -> None:
    # The bucket of p1 was packed from 10 to 12, which delayed p0 and the end of backward; the last one from 24 to 26.
    profile = replace(PACKED, groups=((1,), (0,)), launch_us=2.0, copy_us_per_mb=0.0)
    plan = plan_from_groups(profile.params, profile.groups, num_ranks=2)
    record = simulate(profile, plan, DDP, FIXED)
    assert [row.ready_us - 10 for row in record.buckets] == pytest.approx([10, 24])
    assert record.step_us == pytest.approx(10 + 24 + 2 + 8 + 5)
    together = plan_from_groups(profile.params, [[1, 0]], num_ranks=2)
    assert simulate(profile, together, DDP, FIXED).step_us == pytest.approx(10 + 22 + 2 + 8 + 5)


def test_processor_time_of_formats_that_is_in_a_measured_profile_counts_once() -> None:
    profile = replace(WIDE, groups=((1,), (0,)), wires=("int8", "int8"), launch_us=0.0, copy_us_per_mb=0.0)
    profile = replace(profile, ready_us=(4000.0, 1000.0), backward_us=4000.0)
    for groups, launches_us in {((1,), (0,)): [1000, 4000], ((1, 0),): [4000 - WIRES["int8"].bucket_us]}.items():
        plan = plan_from_groups(profile.params, groups, num_ranks=2, wires="int8")
        record = simulate(profile, plan, DDP, NS, IDEAL)
        assert [row.launched_us - profile.forward_us for row in record.buckets] == pytest.approx(launches_us)


def test_measured_times_are_those_of_the_slowest_rank() -> None:
    profile = replace(PACKED, skew=0.1)
    plan = plan_from_groups(profile.params, [[1, 0]], num_ranks=2)
    as_measured = simulate(profile, plan, DDP, FIXED, replace(IDEAL, skew=0.0)).step_us
    assert simulate(profile, plan, DDP, FIXED).step_us == pytest.approx(as_measured, abs=1.1)  # the fast rank's update
    more = plan_from_groups(profile.params, [[1, 0]], num_ranks=64)
    assert simulate(profile, more, DDP, FIXED).step_us > as_measured + 2


@pytest.mark.parametrize("num_ranks", [3, 101, 16_384])
def test_the_record_is_of_a_typical_rank(num_ranks: int) -> None:
    """The fastest one of 16,384 computes for a time that few have, and waits for longer."""
    plan = plan_from_groups(TWO.params, [[1, 0]], num_ranks=num_ranks)
    record = simulate(TWO, plan, DDP, FIXED, replace(IDEAL, skew=0.02))
    assert record.forwards[0][1] == pytest.approx(10, rel=1e-3)  # the mean rank's
    assert record.busy_ms[record.rank] == pytest.approx(sum(record.busy_ms) / num_ranks, rel=1e-3)
    assert record.late_rank_us() < 1e3 * (max(record.busy_ms) - min(record.busy_ms))


SQUARES = tuple(replace(spec, shape=(512, 512), is_whole=True) for spec in TWO.params)
OWNED = replace(profile_of([20, 10], backward_us=20), params=SQUARES)  # of equal work; an update takes 5 us


@pytest.mark.parametrize(
    ("groups", "update_us", "num_transfers"),
    [
        pytest.param(((1, 0),), 2.5, 1, id="one bucket, in which each rank owns one"),
        pytest.param(((1,), (0,)), 2.5, 2, id="a bucket for each, so that one rank owns all of it"),
    ],
)
def test_owners_divide_the_update_and_the_largest_part_makes_the_transfer(
    groups: Groups, update_us: float, num_transfers: int
) -> None:
    plan = plan_from_groups(OWNED.params, groups, num_ranks=2)
    half_bytes = sum(bucket.wire_bytes for bucket in plan.buckets) / 2
    costs = lines((0, 1 / half_bytes), gather=(0, 0))  # a microsecond for half of all gradients in equal parts
    record = simulate(with_divided_update(OWNED, plan, ZERO1), plan, ZERO1, costs, IDEAL)
    # Trailers, of one bucket or two, are the last digits.
    assert record.step_us == pytest.approx(10 + 20 + update_us + 2, abs=1e-3)
    assert [row.done_us - row.launched_us for row in record.buckets] == pytest.approx([2] * num_transfers, abs=1e-3)


@pytest.mark.parametrize(
    ("strategy", "measured", "update_us"),
    [
        (ZERO1, {}, 1.25),
        (ZERO1, {"strategy": "zero1", "num_ranks": 2}, 2.5),  # equal halves of it were measured
        (ZERO1, {"strategy": "zero1", "num_ranks": 4}, 5),
        (DDP, {}, 5),
        (DDP, {"strategy": "zero1", "num_ranks": 2}, 10),
    ],
)
def test_an_update_in_equal_parts_takes_its_share(strategy: Strategy, measured: dict[str, Any], update_us: float) -> None:
    profile = replace(TWO, update_us=5, **measured)
    plan = plan_from_groups(profile.params, [[1, 0]], num_ranks=4)
    assert with_divided_update(profile, plan, strategy).update_us == pytest.approx(update_us)
    assert simulate(profile, plan, strategy, FIXED, IDEAL).step_us >= 10 + 20 + 5  # nothing is divided unasked


def test_the_largest_owner_of_a_measured_run_counts() -> None:
    plan = plan_from_groups(OWNED.params, ((1, 0),), num_ranks=2)
    three = replace(OWNED, params=(*SQUARES, replace(SQUARES[0], name="p2")), ready_us=(20, 10, 5))
    measured = replace(three, strategy="zero1", num_ranks=2, groups=((2, 1, 0),))  # one rank had two of three
    alone = plan_from_groups(three.params, ((2, 1, 0),), num_ranks=3)
    assert with_divided_update(measured, alone, ZERO1).update_us == pytest.approx(2.5)
    assert with_divided_update(OWNED, plan, ZERO1).update_us == pytest.approx(2.5)
