"""The times of one step, and of many, as traces."""

from __future__ import annotations

import pytest

from undertow.demo import Way
from undertow.demo.measure import StepTimes, trace_of
from undertow.demo.results import way_done
from undertow.runtime.emulated_link import Transfer
from undertow.trace import Event, Trace, overlap_of

SHARDED = StepTimes(forward_began_s=10.0, forward_s=10.1, last_gradient_s=10.3, synchronised_s=10.35, update=(9.98, 9.99))
GATHER = ("comm.dp", "all_gather", 1, -12_000, 9_000)


def sent(kind: str, launched_s: float, started_s: float, done_s: float, num_bytes: int = 8) -> Transfer:
    return Transfer(kind=kind, num_bytes=num_bytes, launched_s=launched_s, started_s=started_s, done_s=done_s)


def recorded(*rows: tuple[str, str, int | None, float, float]) -> Trace:
    """The library's own trace, whose clock starts 1 ms after ours."""
    events = (
        Event(lane=lane, kind=kind, bucket=bucket, start_us=start, stop_us=stop)
        for lane, kind, bucket, start, stop in (("compute", "forward", None, 0, 99_000), *rows)
    )
    return Trace(rank=0, step=3, events=tuple(events))


def rounded(trace: Trace, lane: str) -> list[tuple[str, int, int]]:
    return [(event.kind, round(event.start_us), round(event.stop_us)) for event in trace.events if event.lane == lane]


def test_a_step_becomes_phases_and_the_collectives_of_its_gradients() -> None:
    times = StepTimes(forward_began_s=10.0, forward_s=10.1, last_gradient_s=10.3, synchronised_s=10.35, update=(10.35, 10.36))
    transfers = [
        sent("broadcast", 10.05, 10.05, 10.06, num_bytes=4),  # before backward
        sent("all_reduce", 10.2, 10.25, 10.34),
        sent("all_reduce", 10.4, 10.45, 10.5),  # of the next step
    ]
    trace = trace_of(times, transfers, rank=1, step=3)
    assert [event.kind for event in trace.on_lane("compute")] == ["forward", "backward", "wait", "optimizer"]
    (collective,) = trace.communication
    assert (collective.bucket, collective.num_bytes) == (0, 8)
    overlap = overlap_of(trace)
    # Differences of doubles near 10 s are right to about 2e-9 s.
    assert (overlap.total_us, overlap.exposed_us) == pytest.approx((90_000, 50_000), abs=0.01)


def test_a_step_in_shards_begins_with_the_optimizer_and_waits_for_parameters_in_its_forward() -> None:
    # The wait for gradients is measured alike for every way.
    own = recorded(("compute", "wait", 1, 1_000, 9_000), ("compute", "wait", 0, 330_000, 340_000), GATHER)
    trace = trace_of(SHARDED, [], rank=0, step=3, recorded=own)
    assert rounded(trace, "compute") == [
        ("forward", 0, 100_000),
        ("backward", 100_000, 300_000),
        ("wait", 300_000, 350_000),
        ("optimizer", -20_000, -10_000),
        ("wait", 2_000, 10_000),
    ]
    assert rounded(trace, "comm.dp") == [("all_gather", -11_000, 10_000)]
    assert (trace.duration_us, SHARDED.step_ms) == pytest.approx((370_000, 370))


def test_an_op_of_messages_lasts_from_the_first_to_the_last_of_them() -> None:
    own = recorded(
        GATHER,
        ("comm.dp", "all_gather", 0, 9_000, 30_000),
        ("comm.dp", "reduce_scatter", 0, 150_000, 200_000),
    )
    messages = [
        (9.90, 9.90, 9.91),  # of another way's turn
        (9.99, 9.995, 10.002),
        (9.99, 10.002, 10.009),
        (9.99, 10.012, 10.029),
        (9.99, 10.19, 10.195),  # another rank was late with it
    ]
    trace = trace_of(SHARDED, [sent("send", *times_s) for times_s in messages], rank=0, step=3, recorded=own)
    assert rounded(trace, "comm.dp") == [
        ("all_gather", -5_000, 9_000),
        ("all_gather", 12_000, 29_000),
        ("reduce_scatter", 190_000, 195_000),
    ]


def step_of(length_us: float, exposed_us: float) -> Trace:
    wait_us = length_us - exposed_us
    events = (
        Event(lane="compute", kind="forward", start_us=0, stop_us=wait_us),
        Event(lane="compute", kind="wait", start_us=wait_us, stop_us=length_us),
        Event(lane="comm.dp", kind="all_reduce", start_us=length_us - 100, stop_us=length_us),
    )
    return Trace(rank=1, step=int(length_us), events=events)


def test_a_way_is_summed_up_by_medians_and_the_step_closest_to_them() -> None:
    steps = [step_of(*times_us) for times_us in [(900, 90), (500, 40), (510, 95), (490, 45), (100, 50)]]
    done = way_done(Way.OVERLAPPED, steps, loss=1.0, gradients_agree=True)
    assert (done.rank, done.step_ms, done.exposed_ms, done.overlap, done.typical.step) == (1, 0.5, 0.05, 0.5, 500)


def test_a_way_without_communication_has_no_overlap() -> None:
    silent = Trace(rank=0, step=0, events=(Event(lane="compute", kind="forward", start_us=0, stop_us=5),))
    assert way_done(Way.UNDERTOW, [silent], loss=1.0, gradients_agree=True).overlap is None
