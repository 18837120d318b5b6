"""What ranks tell each other: the times of some steps, and the plan that was made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import refusal
from support.strategies import plans, spec
from undertow.config import SyncConfig
from undertow.plan import Piece, Plan, first_plan, plan_from_groups
from undertow.trace import BucketRecord, StepRecord
from undertow.tune import (
    Decision,
    Measurement,
    Outcome,
    array_of_records,
    decision_from_array,
    measurement_from_array,
    measurement_of_one_rank,
)

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
    """What each of these ranks learns."""
    latest = np.maximum.reduce([array_of_records(records, PLAN, num_steps=num_steps) for records in ranks])
    return [measurement_from_array(latest, records, PLAN) for records in ranks]


STEP, GATHERED = step(), with_gathers()
RARE = [step(arrivals={1: 310.0, 2: 250.0})] * 4 + [STEP]
# What the first rank learns of the records of several ranks: fields and their values.
LEARNED: dict[str, tuple[tuple[list[StepRecord], ...], dict[str, Any]]] = {
    "times count from the begin of the step or of backward": (
        ([STEP], [STEP]),
        {
            "ready_us": (290.0, 110.0, 50.0),
            "forward_us": 200.0,
            "backward_us": 300.0,
            "rest_us": 40.0,
            "synchronised_us": 560.0,
            "spread_us": 0.0,
            "samples": REDUCED,
        },
    ),
    "a gradient is ready when the last rank has it": (([STEP], [step(arrivals=LATE)]), {"ready_us": (290.0, 140.0, 50.0)}),
    "the last gradient does not come after backward": (
        ([step(arrivals={**LATE, 0: 520.0})], [STEP]),
        {"ready_us": (300.0, 140.0, 50.0)},
    ),
    "what others waited for a late rank is not what a collective takes": (
        ([step(buckets=(sent(0, 310.0, 5400.0), sent(1, 5500.0, 5560.0)))], [step(idle_us=5100.0)]),
        {"samples": REDUCED},
    ),
    "steps count by their medians and differ by their quartiles": (
        ([step(ends=(400.0, end)) for end in (560.0, 570.0, 580.0, 600.0, 900.0)],),
        {"synchronised_us": 580.0, "spread_us": 30.0},
    ),
    "a gradient that came on one rank only is as late as there": (
        ([step(arrivals={1: 310.0})], [STEP]),
        {"ready_us": (290.0, 110.0, 50.0)},
    ),
    "one that never comes or once in five steps is ready when backward ends": ((RARE, RARE), {"ready_us": (300.0, 110.0, 50.0)}),
    "forward is without its waits for gathers": (([GATHERED], [GATHERED]), {"forward_us": 200.0 - 40.0}),
    "of a wait that began before the forward only the rest is the forward's": (
        ([with_gathers(waited_us=900.0)],),
        {"forward_us": 200.0 - 110.0},
    ),
    # A rank that computes longer waits less: its time to compute counts, and nobody else's wait is taken out of it.
    "waits are each rank's own": (([GATHERED], [replace(GATHERED, gathers=())]), {"forward_us": 200.0}),
}


@pytest.mark.parametrize(("ranks", "expected"), LEARNED.values(), ids=LEARNED)
def test_what_is_learned(ranks: tuple[list[StepRecord], ...], expected: dict[str, Any]) -> None:
    found = measured(*ranks, num_steps=len(ranks[0]))[0]
    assert {name: getattr(found, name) for name in expected} == expected


def test_gathers_and_reductions_are_samples_of_two_kinds() -> None:
    found = [measured([GATHERED], [other])[0] for other in (GATHERED, replace(GATHERED, gathers=GATHERED.gathers[1:]))]
    assert found[0] is not None
    samples = found[0].samples
    assert samples.keys() == {"reduce_scatter", "all_gather"}
    assert sum(time for _, time in samples["all_gather"]) == pytest.approx(150.0)  # from -50 to 100 without a pause
    assert {size for size, _ in samples["all_gather"]} == {8000.0, 4000.0}
    # A gather that one rank did not wait for is as long as on the others.
    assert found[1] is not None
    assert found[1].samples == samples


def test_every_rank_learns_the_same_but_for_its_own_clock() -> None:
    assert measured([STEP], [step(idle_us=5100.0)]) == measured([STEP], [STEP])  # a late begin makes nothing longer
    first, second = measured([STEP], [step(idle_us=700.0, arrivals=LATE)])
    assert first == second


@pytest.mark.parametrize(
    "records",
    [
        [],
        [STEP] * 2,
        [STEP] * 4,
        [STEP] * 2 + [step(backwards=())],
        [STEP] * 2 + [step(buckets=())],
        [STEP] * 2 + [step(arrivals={})],
    ],
    ids=["nothing", "too few", "too many", "no backward", "no buckets", "no arrivals"],
)
def test_a_rank_that_has_not_recorded_the_steps_learns_nothing_and_disturbs_nobody(records: list[StepRecord]) -> None:
    whole = [STEP] * 3
    assert measured(whole, records, num_steps=3) == [*measured(whole, num_steps=3), None]
    assert measured(records, [STEP], num_steps=3) == [None, None]


@pytest.mark.parametrize(
    ("records", "ready_us"),
    [
        ([STEP] * 3, (290.0, 110.0, 50.0)),
        ([step(arrivals={1: 310.0, 2: 250.0})] * 2, (110.0, 110.0, 50.0)),
        ([], None),
        ([STEP, step(arrivals={})], None),
    ],
    ids=["all", "one never comes: ready with the last", "no records", "no gradients"],
)
def test_one_rank_learns_when_its_gradients_come(records: list[StepRecord], ready_us: tuple[float, ...] | None) -> None:
    it = measurement_of_one_rank(records, PLAN)
    assert (it and it.ready_us) == ready_us
    if records == [STEP] * 3:
        assert it is not None
        assert (it.forward_us, it.backward_us, it.rest_us, it.synchronised_us, it.samples) == (200.0, 290.0, 110.0, 490.0, {})


microseconds = st.floats(0, 1e12)


@given(
    plan=plans() | plans(splits=True),
    decision=st.builds(
        Decision,
        outcome=st.sampled_from(Outcome),
        next_look=st.integers(1, 10**6),
        present_us=microseconds,
        predicted_us=microseconds,
        limit_us=microseconds,
        groups=st.none(),
        is_interleaved=st.booleans(),
    ),
)
def test_a_decision_arrives_as_it_left(plan: Plan, decision: Decision) -> None:
    with_plan = replace(decision, groups=plan.groups if plan.params else None)
    arrays = [each.to_array(plan.params) for each in (decision, with_plan)]
    assert [decision_from_array(array, plan.params) for array in arrays] == [decision, with_plan]
    assert len(arrays[0]) == len(arrays[1])  # all ranks make room for what the first one has decided before they know of it


@pytest.mark.parametrize("num_ranks", [2, 64])
def test_the_first_plan_of_a_model_of_any_size_can_be_gone_back_to(num_ranks: int) -> None:
    params = tuple(spec(f"layer {i}", 7_000_000_000 // 32) for i in range(32))  # 28 GB, cut into pieces of some MB
    plan = first_plan(params, SyncConfig(), num_ranks=num_ranks, splits=True)
    assert sum(map(len, plan.groups)) > len(params) + 1024
    decision = Decision(outcome=Outcome.BACK, next_look=100, groups=plan.groups)
    assert decision_from_array(decision.to_array(params), params) == decision


def test_a_plan_of_more_pieces_than_any_planner_makes_is_refused() -> None:
    groups = tuple((Piece(param=0, first=at, stop=at + 1),) for at in range(1026))
    decision = Decision(outcome=Outcome.MOVE, next_look=1, groups=groups)
    assert refusal(lambda: decision.to_array((spec("whole", 1026, dtype="uint8"),))) == (
        "a plan of 1026 slots is too long to tell the other ranks of.\n"
        "  1 parameters, at most 1025 slots\n  Cut parameters into fewer pieces."
    )
