"""The demo: the text that it trains on, its steps as traces, and its verdict on ways to train."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.errors import Call, refusal
from support.records import printed
from undertow.engine.measuring import NUM_STEPS_BEFORE, NUM_STEPS_MEASURED
from undertow.lab.demo import DemoSettings, run_demo
from undertow.lab.demo.rank import trace_of
from undertow.lab.demo.run import comparison_table, headline
from undertow.lab.demo.settings import NUM_WARM_UP_STEPS, WayDone
from undertow.lab.emulation.link import Carried
from undertow.trace import Event, Overlap, Trace, overlap_of

TRACE = Trace(
    rank=0,
    step=4,
    events=(
        Event(lane="compute", kind="wait", start_us=200_000, stop_us=225_000),
        Event(lane="compute", kind="optimizer", start_us=1_409_560, stop_us=1_434_560),
        Event(lane="comm.dp", kind="all_reduce", start_us=100_000, stop_us=225_000),
    ),
)


def done(way: str, typical: Trace = TRACE, **figures: Any) -> WayDone:
    known = {"step_us": typical.duration_us, "overlap": overlap_of(typical), "num_ops": str(len(typical.communication))}
    return WayDone(way=way, typical=typical, loss=2.5, **{**known, **figures})


def test_the_table_fits_a_narrow_terminal_and_a_way_that_is_wrong_is_marked() -> None:
    alone = Trace(rank=0, step=4, events=TRACE.events[1:2])
    results = [
        done("bucketed", is_right=False),
        done("torch-ddp"),
        done("undertow"),
        done("int8"),
        done("outer", step_us=30_000.0, overlap=Overlap(total_us=6_000.0, exposed_us=1_000.0), num_ops="2/30"),
        done("zero2", alone),
    ]
    lines = [line.strip() for line in printed(comparison_table(results, num_steps=3), width=80).splitlines()]
    assert lines[-6:] == [
        "bucketed, after backward  1234.6   1.00x     25.0    80%     1  2.5000      NO",
        "torch DDP, defaults       1234.6   1.00x     25.0    80%     1  2.5000     yes",
        "Undertow, defaults        1234.6   1.00x     25.0    80%     1  2.5000     yes",
        'Undertow, wire="int8"     1234.6   1.00x     25.0    80%     1  2.5000   close',
        "Undertow, outer             30.0  41.15x      1.0    83%  2/30  2.5000     own",
        "Undertow, ZeRO-2            25.0  49.38x        -      -     0  2.5000     yes",
    ]


def test_one_sentence_has_the_speeds_of_undertows_ways() -> None:
    results = [
        done("torch-ddp"),
        done("undertow"),
        done("outer", step_us=TRACE.duration_us / 3),
    ]
    assert headline(results) == "Undertow trains 1.00 times (defaults), 3.00 times (outer) as fast as torch DDP"


def test_a_way_with_other_results_is_named_and_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = [
        done("torch-ddp"),
        done("undertow", is_right=False),
    ]
    monkeypatch.setattr("undertow.lab.demo.run.train", lambda _: results)
    console = Console(file=io.StringIO(), width=100)
    assert run_demo(DemoSettings(out=tmp_path), console) == 1
    assert console.file.getvalue().splitlines()[-1] == "Results differ from the first variant: Undertow, defaults."


def test_with_outer_synchronization_whole_periods_are_measured() -> None:
    settings = DemoSettings(outer=3, num_steps=8)
    assert settings.ways == ("per-parameter", "bucketed", "torch-ddp", "undertow", "int8", "outer")
    assert [settings.num_measured(way) for way in ("int8", "outer")] == [8, 9]


REFUSALS: dict[str, Call] = {
    "every must be a whole number of steps, at least 1, got 0.": lambda: DemoSettings(outer=0),
    'strategy \'hybrid\' is for several nodes, and the demo runs on one.\n  undertow demo\n  Take "zero1" or "zero2".': (
        lambda: DemoSettings(strategy="hybrid")
    ),
}


@pytest.mark.parametrize("text", REFUSALS)
def test_impossible_settings_are_refused(text: str) -> None:
    assert refusal(REFUSALS[text]).startswith(text)


def test_the_plan_is_chosen_before_steps_are_measured() -> None:
    # Two rounds exchange times and the decision; the first step under a new plan allocates its buckets.
    assert NUM_WARM_UP_STEPS == NUM_STEPS_BEFORE + NUM_STEPS_MEASURED + 2 + 1


def phases(*optimizer_s: float) -> Trace:
    """A step from 10 s of the clock on."""
    times_s = {"forward": (10.0, 10.1), "backward": (10.1, 10.3), "wait": (10.3, 10.35), "optimizer": optimizer_s}
    events = (
        Event(lane="compute", kind=kind, start_us=start * 1e6, stop_us=stop * 1e6) for kind, (start, stop) in times_s.items()
    )
    return Trace(rank=1, step=3, events=tuple(events))


SHARDED = phases(9.98, 9.99)


def sent(kind: str, launched_s: float, started_s: float, done_s: float, num_bytes: int = 8) -> Carried:
    return Carried(kind=kind, num_bytes=num_bytes, launched_s=launched_s, started_s=started_s, done_s=done_s)


def recorded(*rows: tuple[str, str, int | None, float, float]) -> Trace:
    """The library's own trace, whose clock starts 1 ms after ours."""
    events = (
        Event(lane=lane, kind=kind, bucket=bucket, start_us=start, stop_us=stop)
        for lane, kind, bucket, start, stop in (("compute", "forward", None, 0, 99_000), *rows)
    )
    return Trace(rank=0, step=3, events=tuple(events))


def rounded(trace: Trace, lane: str) -> list[tuple[str, int, int]]:
    return [(event.kind, round(event.start_us), round(event.stop_us)) for event in trace.events if event.lane == lane]


def test_a_step_in_shards_begins_with_the_optimizer_and_waits_for_parameters_in_its_forward() -> None:
    # The wait for gradients is measured alike for every way.
    own = recorded(("compute", "wait", 1, 1_000, 9_000), ("compute", "wait", 0, 330_000, 340_000))
    messages = [
        (9.90, 9.90, 9.91),  # of another way's turn
        (9.985, 9.995, 10.002),
        (10.19, 10.19, 10.195),
    ]
    trace = trace_of(SHARDED, [sent("send", *times_s) for times_s in messages], own)
    assert [*rounded(trace, "compute"), *rounded(trace, "comm.dp")] == [
        ("forward", 0, 100_000),
        ("backward", 100_000, 300_000),
        ("wait", 300_000, 350_000),
        ("optimizer", -20_000, -10_000),
        ("wait", 2_000, 10_000),
        ("send", -5_000, 2_000),
        ("send", 190_000, 195_000),
    ]
    assert (trace.duration_us, SHARDED.duration_us) == pytest.approx((370_000, 370_000))


def test_an_exchange_is_cut_into_the_steps_that_it_lasts() -> None:
    messages = [sent("send", 9.0, 9.5, 10.002), sent("send", 9.9, 10.35, 10.5), sent("send", 9.0, 9.0, 9.5)]
    trace = trace_of(phases(10.35, 10.36), messages)
    assert rounded(trace, "comm.dp") == [("send", 0, 2_000), ("send", 350_000, 360_000)]
