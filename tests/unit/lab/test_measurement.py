"""Ranks tell each other the times of some steps, from which profiles are made."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.strategies import spec
from undertow.lab.measurement import Measurement, measurement_of
from undertow.plan import plan_from_groups
from undertow.trace import BucketRecord, StepRecord
from undertow.trace.measured import MeasuredSteps, array_of_records

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
    return [measurement_of(MeasuredSteps(PLAN, tuple(records), latest)) for records in ranks]


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
def test_a_profile_has_the_times_of_typical_steps_without_waits_for_late_ranks(
    ranks: tuple[list[StepRecord], ...], expected: dict[str, Any]
) -> None:
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
    samples = measurement_of(MeasuredSteps(whole, (GATHERED,), latest)).samples
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
