"""Ranks tell each other the times of some steps and the plan made from them, and explain it to the user."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import plans, spec
from undertow.cost import CostCurve
from undertow.plan import ParamSpec, Plan, equal_groups, plan_from_groups
from undertow.plan.choose import LAST_SHARES, NUMS_OF_BUCKETS
from undertow.profile import Profile
from undertow.trace import BucketRecord, StepRecord
from undertow.tune import (
    Decision,
    Explanation,
    Measurement,
    Outcome,
    Tuner,
    array_of_records,
    decision_from_array,
    explanation,
    measurement_from_array,
)
from undertow.wire import WIRES

PLAN = plan_from_groups([spec(name, 1000) for name in ("stem", "body", "head")], [(2, 1), (0,)], num_ranks=2)
# Reductions are as large as the planner thinks of them, gathers as large as they are.
LARGE, SMALL = (float(bucket.wire_bytes) for bucket in PLAN.buckets)
REDUCED = {"all_reduce": ((LARGE, pytest.approx(90.0)), (SMALL, pytest.approx(60.0)))}
LATE = {2: 240.0, 1: 340.0, 0: 480.0}


def sent(bucket: int, launched_us: float, done_us: float, *, kind: str = "all_reduce") -> BucketRecord:
    times = {"ready_us": launched_us, "launched_us": launched_us, "done_us": done_us, "waited": (done_us - 1, done_us)}
    return BucketRecord(bucket=bucket, num_bytes=PLAN.buckets[bucket].num_bytes, kind=kind, **times)


def step(
    *, arrivals: Mapping[int, float] | None = None, ends: tuple[float, float] = (400.0, 560.0), **changes: Any
) -> StepRecord:
    """Forward to 200, backward to 500; b0 is on the link from 310 to 400, b1 from 500 to 560; 40 more until the next step."""
    whole = StepRecord(
        step=0,
        rank=0,
        step_us=600.0,
        forwards=((0.0, 200.0),),
        backwards=((200.0, 500.0),),
        buckets=(sent(0, 310.0, ends[0]), sent(1, 500.0, ends[1])),
        busy_ms=(0.0, 0.0),
        idle_us=100.0,
        arrivals={2: 250.0, 1: 310.0, 0: 490.0} if arrivals is None else arrivals,
    )
    return replace(whole, **changes)


def with_gathers(*, waited_us: float = 30.0) -> StepRecord:
    """The same in shards: gathers from -50 on, for which forward waits."""
    gathers = (sent(1, -50.0, 10.0, kind="all_gather"), sent(0, -40.0, 100.0, kind="all_gather"))
    waits = [replace(gathers[0], waited=(0.0, 10.0)), replace(gathers[1], waited=(100.0 - waited_us, 100.0))]
    return step(buckets=tuple(replace(row, kind="reduce_scatter") for row in step().buckets), gathers=tuple(waits))


def measured(*ranks: Sequence[StepRecord], num_steps: int = 1) -> list[Measurement | None]:
    latest = np.maximum.reduce([array_of_records(records, PLAN, num_steps=num_steps) for records in ranks])
    return [measurement_from_array(latest, records, PLAN) for records in ranks]


STEP, GATHERED = step(), with_gathers()
# The link of b1 ends 60 us after backward. A bucket is packed from its last gradient, or from the launch before, on.
PACKED = step(
    buckets=(replace(sent(0, 310.0, 400.0), ready_us=290.0), replace(sent(1, 320.0, 560.0), ready_us=300.0)), cpu_us=15.0
)
RARE = [step(arrivals={1: 310.0, 2: 250.0})] * 4 + [STEP]
# What the first rank learns of the records of several ranks: fields and their values.


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param(
            ([STEP], [STEP]),
            {
                "ready_us": (290.0, 110.0, 50.0),
                "forward_us": 200.0,
                "backward_us": 300.0,
                "update_us": 40.0,
                "step_us": 600.0,
            },
            id="times count from the begin of the step or of backward",
        ),
        pytest.param(
            ([STEP], [step(arrivals=LATE)]),
            {"ready_us": (290.0, 140.0, 50.0)},
            id="a gradient is ready when the last rank has it",
        ),
        pytest.param(
            ([step(buckets=(sent(0, 310.0, 5400.0), sent(1, 5500.0, 5560.0)))], [step(idle_us=5100.0)]),
            {"ready_us": (290.0, 110.0, 50.0)},
            id="what others waited for a late rank is not what a collective takes",
        ),
        pytest.param(
            ([step(ends=(400.0, end)) for end in (560.0, 570.0, 580.0, 600.0, 900.0)],),
            {"step_us": 600.0},
            id="steps count by their medians",
        ),
        pytest.param(
            ([step(cpu_us=15.0)],),
            {"processors_us": 15.0, "network_us": 45.0},
            id="threads of the backend work in waits, or wait",
        ),
        pytest.param(
            ([step(cpu_us=15.0)], [step(cpu_us=20.0, buckets=(sent(0, 310.0, 400.0), sent(1, 500.0, 5560.0)))]),
            {"processors_us": 15.0, "network_us": 45.0},
            id="the wait for a late rank is not the network's",
        ),
        pytest.param(([PACKED],), {"processors_us": 45.0, "network_us": 45.0}, id="packing takes processors in backward"),
        pytest.param(
            ([step(arrivals={1: 310.0})], [STEP]),
            {"ready_us": (290.0, 110.0, 50.0)},
            id="a gradient that came on one rank only is as late as there",
        ),
        pytest.param(
            (RARE, RARE),
            {"ready_us": (300.0, 110.0, 50.0)},
            id="one that never comes or once in five steps is ready when backward ends",
        ),
        pytest.param(([GATHERED], [GATHERED]), {"forward_us": 200.0 - 40.0}, id="forward is without its waits for gathers"),
        # A rank that computes longer waits less: its time to compute counts, and nobody else's wait is taken out of it.
        pytest.param(([GATHERED], [replace(GATHERED, gathers=())]), {"forward_us": 200.0}, id="waits are each rank's own"),
        pytest.param(
            ([step(arrivals={**LATE, 0: 520.0})], [STEP]),
            {"ready_us": (300.0, 140.0, 50.0)},
            id="the last gradient does not come after backward",
        ),
        pytest.param(
            ([step(cpu_us=100.0)],), {"processors_us": 60.0, "network_us": 0.0}, id="several threads work no longer than a wait"
        ),
        pytest.param(
            ([with_gathers(waited_us=900.0)],),
            {"forward_us": 200.0 - 110.0},
            id="of a wait that began before the forward only the rest is the forward's",
        ),
    ],
)
def test_what_is_learned(ranks: tuple[list[StepRecord], ...], expected: dict[str, Any]) -> None:
    found = measured(*ranks, num_steps=len(ranks[0]))[0].profile
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_collective_takes_as_long_as_on_the_rank_that_launched_it_last() -> None:
    late = [step(buckets=(sent(0, 310.0, 5400.0), sent(1, 5500.0, 5560.0)))], [step(idle_us=5100.0)]
    assert [measured(*ranks)[0].samples for ranks in (([STEP], [STEP]), late)] == [REDUCED, REDUCED]


def test_gathers_and_reductions_are_samples_of_two_kinds() -> None:
    found = [measured([GATHERED], [other])[0] for other in (GATHERED, replace(GATHERED, gathers=GATHERED.gathers[1:]))]
    samples = found[0].samples
    assert (samples.keys(), {size for size, _ in samples["all_gather"]}, sum(time for _, time in samples["all_gather"])) == (
        {"reduce_scatter", "all_gather"},
        {8000.0, 4000.0},
        pytest.approx(150.0),  # from -50 to 100 without a pause
    )
    # A gather that one rank did not wait for is as long as on the others.
    assert found[1].samples == samples


def test_samples_of_buckets_with_owners_have_the_bytes_of_equal_parts() -> None:
    """Of two parameters each rank owns one; the third one's owner has all of its bucket, twice the mean."""
    whole = plan_from_groups([replace(spec, is_whole=True) for spec in PLAN.params], PLAN.groups, num_ranks=2)
    latest = array_of_records([GATHERED], whole, num_steps=1)
    samples = measurement_from_array(latest, [GATHERED], whole).samples
    large, small = (bucket.wire_bytes for bucket in whole.buckets)
    assert {size for size, _ in samples["all_gather"]} == {8000.0, 2 * 4000.0}
    assert {size for size, _ in samples["reduce_scatter"]} == {large, 2 * small}


def test_every_rank_learns_the_same_but_for_its_own_clock() -> None:
    assert measured([STEP], [step(idle_us=5100.0)]) == measured([STEP], [STEP])  # a late begin makes nothing longer
    first, second = measured([STEP], [step(idle_us=700.0, arrivals=LATE)])
    assert first == second


@pytest.mark.parametrize(
    "records",
    [
        [],
        [STEP] * 2,
        [STEP] * 2 + [step(backwards=())],
        [STEP] * 2 + [step(arrivals={})],
    ],
    ids=["nothing", "too few", "no backward", "no arrivals"],
)
def test_a_rank_that_has_not_recorded_the_steps_learns_nothing_and_disturbs_nobody(records: list[StepRecord]) -> None:
    whole = [STEP] * 3
    assert (measured(whole, records, num_steps=3), measured(records, [STEP], num_steps=3)) == (
        [*measured(whole, num_steps=3), None],
        [None, None],
    )


microseconds = st.floats(0, 1e12)


@given(
    plan=plans(),
    decision=st.builds(
        Decision,
        outcome=st.sampled_from(Outcome),
        present_us=microseconds,
        predicted_us=microseconds,
        groups=st.none(),
    ),
    wires=st.lists(st.sampled_from([None, *WIRES]), min_size=12, max_size=12),
)
def test_a_decision_arrives_as_it_left(plan: Plan, decision: Decision, wires: list[str | None]) -> None:
    with_plan = decision
    if plan.params:
        with_plan = replace(decision, groups=plan.groups, wires=tuple(wires[: len(plan.groups)]))
    arrays = [each.to_array(plan.params) for each in (decision, with_plan)]
    # All ranks make room for what the first one has decided before they know of it.
    assert ([decision_from_array(array) for array in arrays], len(arrays[0])) == (
        [decision, with_plan],
        len(arrays[1]),
    )


def test_every_plan_of_the_family_can_be_sent() -> None:
    sizes = (7_000_000_000 // 32, 3, 4096, 100_000)
    for params in (tuple(spec(f"layer {i}", sizes[0]) for i in range(32)), tuple(spec(f"p{i}", sizes[i % 4]) for i in range(50))):
        for num_buckets, last_share in product(NUMS_OF_BUCKETS, LAST_SHARES):
            groups = equal_groups(params, range(len(params)), num_buckets=num_buckets, last_share=last_share)
            decision = Decision(outcome=Outcome.MOVE, groups=groups, wires=(None,) * len(groups))
            assert decision_from_array(decision.to_array(params)) == decision


# Gradients of 1 MB come at 1, 2, 3 and 4 ms of backward, the last registered first; forward takes 2 ms.
PARAMS = tuple(spec(f"p{i}", 250_000) for i in range(4))
# 0.1 ms and 1 ms per MB; measured at 1 MB and 4 MB.
CURVE, WHY = CostCurve(points=((1e6, 1100.0), (4e6, 4100.0))), "planned from measurements"
HALF = CostCurve(points=((1e6, 600.0), (4e6, 2100.0)))
# All at 6 ms in one bucket; or the first ones earlier, and the last one after that.
PLANS = (
    "10.10 ms: 1 bucket",
    "8.20 ms: 2 buckets (this plan)",
    "8.10 ms: 3 buckets, the last one 0.25 of the others",
    "7.40 ms: 4 buckets",
)
KINDS = [spec("a", 1000), spec("b", 1000, dtype="float16"), spec("c", 1000, dtype="float16")]
MOVE = Decision(outcome=Outcome.MOVE, present_us=9200.0, predicted_us=7400.0, groups=((3, 2), (1, 0)), wires=(None, None))


def profile(params: Sequence[ParamSpec] = PARAMS, **curves: CostCurve) -> Profile:
    times = {
        "ready_us": tuple(max(0.0, 4000.0 - 1000.0 * i) for i in range(len(params))),
        "forward_us": 2000.0,
        "backward_us": 4000.0,
    }
    return Profile(params=tuple(params), **times, num_ranks=2, curves=curves or {"all_reduce": CURVE})


def plan_of(*groups: Sequence[int], params: Sequence[ParamSpec] = PARAMS) -> Plan:
    return plan_from_groups(params, groups, num_ranks=2)


def explained(
    plan: Plan, measured: Profile | None, *, measured_us: float = 8000.0, processors_us: float = 500.0, **changes: Any
) -> Explanation:
    known: dict[str, Any] = {"why": WHY, "strategy": "ddp", "decision": None, **changes}
    tuner = Tuner()
    if measured is not None:
        step_us = measured_us + measured.update_us
        measured = replace(measured, step_us=step_us, processors_us=processors_us, network_us=1000.0)
    vars(tuner).update(profile=lambda _plan, strategy: measured)  # as if it had learned this
    return explanation(plan, None if measured is None else tuner, **known)


def test_before_anything_is_measured_only_the_plan_is_known() -> None:
    it = explained(plan_of((3, 2), (1, 0)), None)
    known = {"num_ranks": 2, "strategy": "ddp", "bucket_mb": (2.0, 2.0), "wires": (None, None), "why": WHY}
    assert (it, str(it)) == (Explanation(**known), f"The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n  {WHY}")


@pytest.mark.parametrize(
    ("num_ranks", "told"),
    [
        (
            2,
            "  bucket 1: 1.00 to 2.00 (largest 1.33 x the mean)\n"
            "  all: largest 1.33 x the mean in bytes, 1.33 x the mean in work of updates",
        ),
        (9, "  bucket 1: 0.00 to 1.00 (largest 3.00 x the mean)\n  all: largest 3.00 x the mean in bytes, 3.00 x the mean in"),
    ],
)
def test_owners_and_their_balance_are_told(num_ranks: int, told: str) -> None:
    params = [replace(spec, is_whole=spec.name != PARAMS[3].name) for spec in PARAMS]
    it = explained(plan_from_groups(params, ((3,), (2, 1, 0)), num_ranks=num_ranks), None)
    assert f"One owner for each parameter, MB of a rank:\n{told}" in str(it)
    assert explained(plan_of((3, 2), (1, 0)), None).owners == ()


@pytest.mark.parametrize(
    ("wires", "told"),
    [
        (("int8", None), "2 buckets of 2.00 (int8), 2.00 MB, ddp"),
        (("int8", "int8"), "2 buckets of 2.00, 2.00 MB, all in int8, ddp"),
    ],
)
def test_the_format_of_each_bucket_is_told(wires: tuple[str | None, ...], told: str) -> None:
    plan = plan_from_groups(PARAMS, ((3, 2), (1, 0)), num_ranks=2, wires=wires)
    decision = replace(MOVE, wires=wires)
    it = explained(plan, None, decision=decision)
    assert (it.wires, told in str(it)) == (wires, True)
    moved = "all in int8" if None not in wires else "1 of them in int8"
    assert it.decision == f"moved to 2 buckets, {moved} (predicted: the plan so far 9.20 ms, the best 7.40 ms)"


def test_auto_keeps_full_width_if_processors_are_the_bottleneck() -> None:
    it = explained(plan_of((3, 2), (1, 0)), replace(profile(), wire="auto"), processors_us=1001.0)
    assert it.bound_by.endswith("the network 1.00 ms; wire='auto' keeps full width")


def test_times_are_in_milliseconds_since_the_step_began() -> None:
    it = explained(plan_of((3, 2, 1), (0,)), profile(), measured_us=7654.0)
    # Backward is over at 6 ms. b0 leaves at 5, for 3.1 ms, b1 behind it for 1.1; 1 MB at the end takes 1.1 at the least.
    assert (it.predicted_ms, it.measured_ms) == (pytest.approx(9.2), 7.654)


def test_the_table_has_the_fastest_plan_of_each_number_of_buckets() -> None:
    assert explained(plan_of((3, 2), (1, 0)), profile()).plans == PLANS
    # Sparse gradients, or others of another dtype, are never thought to be in one bucket.
    assert all("1 bucket" not in row for row in explained(plan_of((2,), (0,), (1,), params=KINDS), profile(KINDS)).plans)


@pytest.mark.parametrize(
    ("processors_us", "bound_by"),
    [
        (1000.0, "bound by the network: packing and copying add 1.00 ms to a step, the network 1.00 ms"),
        (1001.0, "bound by processors: packing and copying add 1.00 ms to a step, the network 1.00 ms"),
    ],
)
def test_it_is_told_what_limits_communication(processors_us: float, bound_by: str) -> None:
    it = explained(plan_of((3, 2), (1, 0)), profile(), measured_us=8000.0, processors_us=processors_us)
    assert (it.bound_by, it.to_dict()["bound_by"]) == (bound_by, bound_by)


def test_one_size_tells_what_the_network_took_and_nothing_of_other_plans() -> None:
    it = explained(plan_of((3, 2), (1, 0)), profile(all_reduce=CostCurve(points=((2e6, 2100.0),))), measured_us=8000.0)
    assert (it.network, it.predicted_ms, it.plans) == (("all_reduce: 2 MB in 2.10 ms",), None, ())


def test_shards_need_reductions_and_gathers() -> None:
    plan = plan_of((3, 2), (1, 0))
    assert explained(plan, profile(), strategy="zero1").network == ()
    it = explained(plan, profile(reduce_scatter=HALF, all_gather=HALF), strategy="zero1")
    assert it.network == tuple(f"{kind}: 1 MB in 0.60 ms to 4 MB in 2.10 ms" for kind in ("reduce_scatter", "all_gather"))


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome.UNKNOWN, "kept: buckets of one size do not show what other sizes cost"),
        (Outcome.FROZEN, "kept: torch.use_deterministic_algorithms is on, and another plan rounds differently"),
        (Outcome.KEEP, "kept (predicted: the plan so far 9.20 ms, the best 7.40 ms: too little to gain)"),
        (Outcome.MOVE, "moved to 2 buckets (predicted: the plan so far 9.20 ms, the best 7.40 ms)"),
        (Outcome.INCOMPLETE, "the steps are measured again: some were not complete, or the plan has changed"),
        (
            Outcome.TOO_LARGE,
            "kept (predicted: the plan so far 9.20 ms, the best 7.40 ms: for a move every rank would hold all of the optimizer's "
            "state)",
        ),
    ],
)
def test_every_decision_is_told_with_its_reason(outcome: Outcome, text: str) -> None:
    assert explained(plan_of((3, 2, 1, 0)), None, decision=replace(MOVE, outcome=outcome)).decision == text


@pytest.mark.parametrize(
    ("measured", "more", "text"),
    [
        (
            profile(),
            {"measured_us": 8123.0, "decision": MOVE},
            "The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n"
            f"  {WHY}\n"
            "  moved to 2 buckets (predicted: the plan so far 9.20 ms, the best 7.40 ms)\n"
            "  bound by the network: packing and copying add 0.50 ms to a step, the network 1.00 ms\n"
            "Until gradients are synchronized, ms since the step began: "
            "measured before the decision 8.12, predicted for this plan 8.20\n"
            "The fastest plans of each number of buckets, predicted:\n"
            + "".join(f"  {row}\n" for row in PLANS)
            + "The network, as measured:\n  all_reduce: 1 MB in 1.10 ms to 4 MB in 4.10 ms\n",
        ),
        (
            None,
            {"why": "bucket_cap_mb=[2] was asked for"},
            "The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n  bucket_cap_mb=[2] was asked for\n",
        ),
    ],
    ids=["all that is known", "nothing measured"],
)
def test_what_is_known_is_printed(
    measured: Profile | None, more: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # narrower than the lines
    it = explained(plan_of((3, 2), (1, 0)), measured, **more)
    assert (f"{it}\n", json.loads(json.dumps(it.to_dict()))["why"]) == (text, it.why)
