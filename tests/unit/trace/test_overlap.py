from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.trace.event import Event, Trace
from undertow.trace.overlap import Overlap, limit_us, overlap_of, union_us

# Whole microseconds, so that sums are exact.
TIMES = st.integers(0, 60)
intervals = st.lists(st.tuples(TIMES, TIMES).map(sorted).map(tuple), max_size=8)
buckets = st.lists(st.tuples(TIMES, TIMES), max_size=12)


def trace(*events: tuple[str, str, float, float]) -> Trace:
    return Trace(
        rank=0,
        step=3,
        events=tuple(Event(lane=lane, kind=kind, start_us=start, stop_us=stop) for lane, kind, start, stop in events),
    )


STEP = trace(
    ("compute", "backward", 0, 100),
    ("comm.dp", "all_reduce", 20, 60),
    ("comm.dp", "all_reduce", 50, 90),
    ("comm.dp", "all_reduce", 100, 130),
    ("compute", "wait", 100, 125),
    ("compute", "wait", 125, 130),
    ("compute", "optimizer", 130, 150),
)


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0),
        ([(3, 7)], 4),
        ([(3, 3)], 0),
        ([(0, 2), (5, 6)], 3),
        ([(0, 5), (2, 8)], 8),
        ([(0, 9), (2, 4)], 9),
        ([(5, 6), (0, 5)], 6),
        ([(-4, -1), (-2, 0)], 4),
    ],
    ids=["none", "one", "empty", "apart", "crossing", "nested", "touching", "negative"],
)
def test_union_counts_what_lies_under_two_intervals_once(spans: list[tuple[float, float]], length: float) -> None:
    assert union_us(spans) == length


@given(intervals)
def test_union_is_the_number_of_microseconds_under_any_interval(spans: list[tuple[int, int]]) -> None:
    assert union_us(spans) == len({us for start, stop in spans for us in range(start, stop)})


def test_overlap_of_a_step() -> None:
    overlap = overlap_of(STEP)
    assert overlap == Overlap(total_us=100, exposed_us=30)
    assert overlap.hidden_us == 70
    assert overlap.fraction == 0.7


def test_gathers_that_began_before_the_step_are_communication_of_it() -> None:
    sharded = trace(
        ("comm.dp", "all_gather", -30, -10),
        ("comm.dp", "all_gather", -10, 20),
        ("compute", "wait", 5, 20),
        ("compute", "forward", 0, 50),
        ("comm.dp", "reduce_scatter", 60, 90),
    )
    assert overlap_of(sharded) == Overlap(total_us=80, exposed_us=15)
    assert sharded.duration_us == 50


def test_a_step_lasts_as_long_as_its_compute_lane() -> None:
    assert STEP.duration_us == 150
    assert trace(("compute", "optimizer", -20, -5), ("compute", "backward", 0, 100)).duration_us == 120
    assert trace().duration_us == 0


def test_without_communication_there_is_no_fraction() -> None:
    overlap = overlap_of(trace(("compute", "backward", 0, 100)))
    assert (overlap.total_us, overlap.exposed_us, overlap.fraction) == (0, 0, None)


def test_waiting_for_longer_than_the_link_was_in_use_hides_nothing() -> None:
    overlap = Overlap(total_us=10, exposed_us=12)
    assert (overlap.hidden_us, overlap.fraction) == (0, 0)


def test_events_of_a_lane_and_of_all_communication() -> None:
    assert [event.start_us for event in STEP.on_lane("compute")] == [0, 100, 125, 130]
    assert STEP.communication == STEP.on_lane("comm.dp")
    assert [event.duration_us for event in STEP.communication] == [40, 40, 30]


@pytest.mark.parametrize(
    ("ready", "wire", "limit"),
    [([], [], 0), ([5], [3], 8), ([0, 10], [4, 4], 14), ([0, 10], [40, 4], 44), ([0, 9, 10], [1, 8, 8], 25)],
)
def test_limit_examples(ready: list[float], wire: list[float], limit: float) -> None:
    assert limit_us(ready, wire) == limit


@given(buckets)
def test_limit_is_the_largest_ready_time_plus_all_wire_time_from_there_on(case: list[tuple[int, int]]) -> None:
    ready, wire = [r for r, _ in case], [w for _, w in case]
    assert limit_us(ready, wire) == max((ready[i] + sum(wire[i:]) for i in range(len(case))), default=0)


@given(buckets)
def test_limit_is_reached_by_a_link_that_sends_each_bucket_when_it_is_ready_and_the_link_is_free(
    case: list[tuple[int, int]],
) -> None:
    free = 0
    for ready, wire in case:
        free = max(free, ready) + wire
    assert limit_us([r for r, _ in case], [w for _, w in case]) == free
