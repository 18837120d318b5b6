"""What of communication lies under computation, and the limit of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.trace.event import Event, Trace
from undertow.trace.overlap import Overlap, limit_us, overlap_of, union_us

# Whole microseconds, so that sums are exact.
TIMES = st.integers(0, 60)
intervals = st.lists(st.tuples(TIMES, TIMES).map(sorted).map(tuple), max_size=8)


def trace(*events: tuple[str, str, float, float]) -> Trace:
    made = (Event(lane=lane, kind=kind, start_us=start, stop_us=stop) for lane, kind, start, stop in events)
    return Trace(rank=0, step=3, events=tuple(made))


STEP = trace(
    ("compute", "backward", 0, 100),
    ("comm.dp", "all_reduce", 20, 60),
    ("comm.dp", "all_reduce", 50, 90),
    ("comm.dp", "all_reduce", 100, 130),
    ("compute", "wait", 100, 125),
    ("compute", "wait", 125, 130),
    ("compute", "optimizer", 130, 150),
)
SHARDED = trace(
    ("comm.dp", "all_gather", -30, -10),
    ("comm.dp", "all_gather", -10, 20),
    ("compute", "wait", 5, 20),
    ("compute", "forward", 0, 50),
    ("comm.dp", "reduce_scatter", 60, 90),
)


@given(intervals)
def test_union_is_the_number_of_microseconds_under_any_interval(spans: list[tuple[int, int]]) -> None:
    assert union_us(spans) == len({us for start, stop in spans for us in range(start, stop)})


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (overlap_of(STEP), (100, 30, 70, 0.7)),
        (overlap_of(SHARDED), (80, 15, 65, 65 / 80)),
        (overlap_of(trace(("compute", "backward", 0, 100))), (0, 0, 0, None)),
        (Overlap(total_us=10, exposed_us=12), (10, 12, 0, 0)),
    ],
    ids=["a step", "gathers that began before it", "no communication", "a wait for longer than the link was in use"],
)
def test_overlap(overlap: Overlap, expected: tuple[float | None, ...]) -> None:
    assert (overlap.total_us, overlap.exposed_us, overlap.hidden_us, overlap.fraction) == expected


@pytest.mark.parametrize(
    ("step", "duration_us"),
    [(STEP, 150), (SHARDED, 50), (trace(("compute", "optimizer", -20, -5), ("compute", "backward", 0, 100)), 120), (trace(), 0)],
)
def test_a_step_lasts_as_long_as_its_compute_lane(step: Trace, duration_us: float) -> None:
    assert step.duration_us == duration_us


def test_events_of_a_lane_and_of_all_communication() -> None:
    assert [event.start_us for event in STEP.on_lane("compute")] == [0, 100, 125, 130]
    assert STEP.communication == STEP.on_lane("comm.dp")
    assert [event.duration_us for event in STEP.communication] == [40, 40, 30]


@given(st.lists(st.tuples(TIMES, TIMES), max_size=12))
def test_limit_is_reached_by_a_link_that_sends_each_bucket_when_it_is_ready_and_the_link_is_free(
    buckets: list[tuple[int, int]],
) -> None:
    free, (ready, wire) = 0, ([r for r, _ in buckets], [w for _, w in buckets])
    for ready_us, wire_us in buckets:
        free = max(free, ready_us) + wire_us
    # The largest ready time plus all wire time from there on.
    assert limit_us(ready, wire) == free == max((ready[i] + sum(wire[i:]) for i in range(len(buckets))), default=0)
