"""What ranks tell each other: the times of some steps, and the plan that was made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import text_of
from support.strategies import plans, spec
from undertow.config import SyncConfig
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, Piece, Plan, first_plan, plan_from_groups
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

PARAMS = [spec(name, 1000) for name in ("stem", "body", "head")]
PLAN = plan_from_groups(PARAMS, [(2, 1), (0,)], num_ranks=2)
# Reductions are as large as the planner thinks of them, gathers as large as they are.
LARGE, SMALL = (float(bucket.wire_bytes) for bucket in PLAN.buckets)


def sent(bucket: int, launched_us: float, done_us: float, *, kind: str = "all_reduce") -> BucketRecord:
    return BucketRecord(
        bucket=bucket,
        num_bytes=PLAN.buckets[bucket].num_bytes,
        kind=kind,
        ready_us=launched_us,
        launched_us=launched_us,
        done_us=done_us,
        waited=(done_us - 1, done_us),
    )


def step(*, idle_us: float = 100.0, arrivals: Mapping[int, float] | None = None, **changes: Any) -> StepRecord:
    """Forward to 200, backward to 500; b0 is on the link from 310 to 400, b1 from 500 to 560; 40 more until the next step."""
    whole = StepRecord(
        step=0,
        rank=0,
        step_us=600.0,
        forwards=((0.0, 200.0),),
        backwards=((200.0, 500.0),),
        buckets=(sent(0, 310.0, 400.0), sent(1, 500.0, 560.0)),
        busy_ms=(0.0, 0.0),
        idle_us=idle_us,
        arrivals={2: 250.0, 1: 310.0, 0: 490.0} if arrivals is None else arrivals,
    )
    return replace(whole, **changes)


def measured(*ranks: Sequence[StepRecord], num_steps: int = 1) -> list[Measurement | None]:
    """What each of these ranks learns."""
    latest = np.maximum.reduce([array_of_records(records, PLAN, num_steps=num_steps) for records in ranks])
    return [measurement_from_array(latest, records, PLAN) for records in ranks]


def known(*ranks: Sequence[StepRecord], num_steps: int = 1) -> Measurement:
    """What the first of these ranks learns."""
    measurement = measured(*ranks, num_steps=num_steps)[0]
    assert measurement is not None
    return measurement


def test_times_count_from_the_begin_of_the_step_or_of_backward() -> None:
    it = known([step()], [step()])
    assert it.ready_us == (290.0, 110.0, 50.0)
    assert (it.forward_us, it.backward_us, it.rest_us, it.synchronised_us, it.spread_us) == (200.0, 300.0, 40.0, 560.0, 0.0)
    assert it.samples == {"all_reduce": ((LARGE, pytest.approx(90.0)), (SMALL, pytest.approx(60.0)))}


def test_a_gradient_is_ready_when_the_last_rank_has_it() -> None:
    assert known([step()], [step(arrivals={2: 240.0, 1: 340.0, 0: 480.0})]).ready_us == (290.0, 140.0, 50.0)


def test_the_last_gradient_does_not_come_after_backward() -> None:
    assert known([step(arrivals={2: 240.0, 1: 340.0, 0: 520.0})], [step()]).ready_us[0] == 300.0


def test_a_rank_that_begins_late_delays_everything_and_makes_nothing_longer() -> None:
    assert known([step()], [step(idle_us=5100.0)]) == known([step()], [step()])


def test_what_others_waited_for_a_late_rank_is_not_what_a_collective_takes() -> None:
    early = step(buckets=(sent(0, 310.0, 5400.0), sent(1, 5500.0, 5560.0)))
    late = step(idle_us=5100.0)
    samples = known([early], [late]).samples["all_reduce"]
    assert samples == ((LARGE, pytest.approx(90.0)), (SMALL, pytest.approx(60.0)))


def test_every_rank_learns_the_same_but_for_its_own_clock() -> None:
    first, second = measured([step()], [step(idle_us=700.0, arrivals={2: 240.0, 1: 340.0, 0: 480.0})])
    assert first == second


def test_steps_count_by_their_medians_and_differ_by_their_quartiles() -> None:
    ends = (560.0, 570.0, 580.0, 600.0, 900.0)
    records = [step(buckets=(sent(0, 310.0, 400.0), sent(1, 500.0, end))) for end in ends]
    it = known(records, num_steps=5)
    assert (it.synchronised_us, it.spread_us) == (580.0, 30.0)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [step()] * 2,
        [step()] * 4,
        [step()] * 2 + [step(backwards=())],
        [step()] * 2 + [step(buckets=())],
        [step()] * 2 + [step(arrivals={})],
    ],
    ids=["nothing", "too few", "too many", "no backward", "no buckets", "no arrivals"],
)
def test_a_rank_that_has_not_recorded_the_steps_learns_nothing_and_disturbs_nobody(records: list[StepRecord]) -> None:
    whole = [step()] * 3
    latest = measured(whole, records, num_steps=3)
    assert latest == [known(whole, num_steps=3), None]


def test_where_nobody_has_recorded_the_steps_nobody_learns() -> None:
    assert measured([], [step()], num_steps=3) == [None, None]


def test_a_gradient_that_came_on_one_rank_only_is_as_late_as_there() -> None:
    assert known([step(arrivals={1: 310.0})], [step()]).ready_us == (290.0, 110.0, 50.0)


def test_a_gradient_that_never_comes_or_once_in_five_steps_is_ready_when_backward_ends() -> None:
    records = [step(arrivals={1: 310.0, 2: 250.0})] * 4 + [step()]
    assert known(records, records, num_steps=5).ready_us == (300.0, 110.0, 50.0)


def with_gathers(*, waited_us: float = 30.0) -> StepRecord:
    """The same in shards: gathers from -50 on, for which forward waits."""
    gathers = (sent(1, -50.0, 10.0, kind="all_gather"), sent(0, -40.0, 100.0, kind="all_gather"))
    reductions = tuple(replace(row, kind="reduce_scatter") for row in step().buckets)
    waits = [replace(gathers[0], waited=(0.0, 10.0)), replace(gathers[1], waited=(100.0 - waited_us, 100.0))]
    return step(buckets=reductions, gathers=tuple(waits))


def test_forward_is_without_its_waits_for_gathers() -> None:
    assert known([with_gathers()], [with_gathers()]).forward_us == 200.0 - 40.0


def test_of_a_wait_that_began_before_the_forward_only_the_rest_is_the_forwards() -> None:
    assert known([with_gathers(waited_us=900.0)]).forward_us == 200.0 - 110.0


def test_waits_are_each_ranks_own() -> None:
    """A rank that computes longer waits less: its time to compute counts, and nobody else's wait is taken out of it."""
    slow = replace(with_gathers(), gathers=())
    assert known([with_gathers()], [slow]).forward_us == 200.0


def test_gathers_and_reductions_are_samples_of_two_kinds() -> None:
    samples = known([with_gathers()], [with_gathers()]).samples
    assert samples.keys() == {"reduce_scatter", "all_gather"}
    assert sum(time for _, time in samples["all_gather"]) == pytest.approx(150.0)  # from -50 to 100 without a pause
    assert {size for size, _ in samples["all_gather"]} == {8000.0, 4000.0}


def test_a_gather_that_one_rank_did_not_wait_for_is_as_long_as_on_the_others() -> None:
    some = replace(with_gathers(), gathers=with_gathers().gathers[1:])
    assert known([with_gathers()], [some]).samples == known([with_gathers()], [with_gathers()]).samples


maybe_times = st.floats(0, 1e5)
records_of_any_kind = st.builds(
    lambda idle_us, arrivals, with_backward: step(
        idle_us=idle_us, arrivals=arrivals, **({} if with_backward else {"backwards": ()})
    ),
    maybe_times,
    st.dictionaries(st.integers(0, 2), maybe_times),
    st.booleans(),
)


@given(ranks=st.lists(st.lists(records_of_any_kind, min_size=2, max_size=2), min_size=1, max_size=4))
def test_no_measurement_has_a_time_that_is_none(ranks: list[list[StepRecord]]) -> None:
    for it in measured(*ranks, num_steps=2):
        if it is not None:
            times = (*it.ready_us, it.forward_us, it.backward_us, it.rest_us, it.synchronised_us, it.spread_us)
            assert all(math.isfinite(time) and time >= 0 for time in times)
            assert all(0 < time < math.inf for rows in it.samples.values() for _, time in rows)


def test_one_rank_learns_when_its_gradients_come() -> None:
    it = measurement_of_one_rank([step()] * 3, PLAN)
    assert it is not None
    assert it.ready_us == (290.0, 110.0, 50.0)
    assert (it.forward_us, it.backward_us, it.rest_us, it.synchronised_us, it.samples) == (200.0, 290.0, 110.0, 490.0, {})


def test_one_rank_without_records_or_without_gradients_learns_nothing() -> None:
    assert measurement_of_one_rank([], PLAN) is None
    assert measurement_of_one_rank([step(), step(arrivals={})], PLAN) is None


def test_a_gradient_that_never_comes_on_one_rank_is_ready_with_the_last() -> None:
    it = measurement_of_one_rank([step(arrivals={1: 310.0, 2: 250.0})] * 2, PLAN)
    assert it is not None
    assert it.ready_us == (110.0, 110.0, 50.0)


outcomes = st.sampled_from(Outcome)
microseconds = st.floats(0, 1e12)


@given(
    plan=plans() | plans(splits=True),
    outcome=outcomes,
    next_look=st.integers(1, 10**6),
    times=st.tuples(*[microseconds] * 3),
    is_interleaved=st.booleans(),
)
def test_a_decision_arrives_as_it_left(
    plan: Plan, outcome: Outcome, next_look: int, times: tuple[float, float, float], is_interleaved: bool
) -> None:
    present_us, predicted_us, limit_us = times
    decision = Decision(
        outcome=outcome,
        next_look=next_look,
        present_us=present_us,
        predicted_us=predicted_us,
        limit_us=limit_us,
        groups=plan.groups if plan.params else None,
        is_interleaved=is_interleaved,
    )
    assert decision_from_array(decision.to_array(plan.params), plan.params) == decision


@given(plan=plans(splits=True))
def test_decisions_on_the_same_parameters_are_of_one_length(plan: Plan) -> None:
    """All ranks make room for what the first one has decided before they know of it."""
    decisions = [Decision(outcome=Outcome.MOVE, next_look=1, groups=groups) for groups in (plan.groups, None)]
    assert len({len(decision.to_array(plan.params)) for decision in decisions}) == 1


@pytest.mark.parametrize("num_ranks", [2, 64])
def test_the_first_plan_of_a_model_of_any_size_can_be_gone_back_to(num_ranks: int) -> None:
    params = tuple(spec(f"layer {i}", 7_000_000_000 // 32) for i in range(32))  # 28 GB, cut into pieces of some MB
    plan = first_plan(params, SyncConfig(), num_ranks=num_ranks, splits=True)
    assert sum(map(len, plan.groups)) > len(params) + 1024
    decision = Decision(outcome=Outcome.BACK, next_look=100, groups=plan.groups)
    assert decision_from_array(decision.to_array(params), params) == decision


def test_a_plan_of_more_pieces_than_any_planner_makes_is_refused() -> None:
    params = (ParamSpec(name="whole", shape=(1026,), dtype="uint8", itemsize=1),)
    groups = tuple((Piece(param=0, first=at, stop=at + 1),) for at in range(1026))
    decision = Decision(outcome=Outcome.MOVE, next_look=1, groups=groups)
    assert text_of(ConfigError, lambda: decision.to_array(params)) == (
        "a plan of 1026 slots is too long to tell the other ranks of.\n"
        "  1 parameters, at most 1025 slots\n  Cut parameters into fewer pieces."
    )
