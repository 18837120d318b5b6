"""The demo: the text that it trains on, its steps as traces, its verdict on ways to train, and its ranks as processes."""

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from support.errors import Call, refusal
from support.records import printed
from undertow.demo import DemoSettings, run_demo
from undertow.demo.launch import RanksLost, messages_of_ranks
from undertow.demo.rank import trace_of
from undertow.demo.run import comparison_table
from undertow.demo.settings import NUM_WARM_UP_STEPS, WayDone
from undertow.emulation.link import Carried
from undertow.engine.tuning import NUM_STEPS_BEFORE, NUM_STEPS_MEASURED
from undertow.trace import Event, Trace

TRACE = Trace(
    rank=0,
    step=4,
    events=(
        Event(lane="compute", kind="wait", start_us=200_000, stop_us=225_000),
        Event(lane="compute", kind="optimizer", start_us=1_409_560, stop_us=1_434_560),
        Event(lane="comm.dp", kind="all_reduce", start_us=100_000, stop_us=225_000),
    ),
)


def test_the_table_fits_a_narrow_terminal_and_a_way_that_is_wrong_is_marked() -> None:
    alone = Trace(rank=0, step=4, events=TRACE.events[1:2])
    results = [
        WayDone(way="bucketed", typical=TRACE, loss=2.5, wrong=("gradients are", "final loss is")),
        WayDone(way="undertow", typical=TRACE, loss=2.5, wrong=("parameters are",)),
        WayDone(way="zero2", typical=alone, loss=2.5),
    ]
    lines = [line.strip() for line in printed(comparison_table(results, num_steps=3), width=80).splitlines()]
    assert lines[-3:] == [
        "bucketed, after backward  1234.6   1.00x     25.0    80%     1  2.5000     NO",
        "Undertow, defaults        1234.6   1.00x     25.0    80%     1  2.5000    yes",
        "Undertow, ZeRO-2            25.0  49.38x        -      -     0  2.5000    yes",
    ]


def test_every_difference_from_the_first_way_is_named_and_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = [
        WayDone(way="torch-ddp", typical=TRACE, loss=2.5),
        WayDone(way="undertow", typical=TRACE, loss=2.5, wrong=("gradients are", "parameters are")),
    ]
    monkeypatch.setattr("undertow.demo.run._train", lambda *_: results)
    console = Console(file=io.StringIO(), width=100)
    assert run_demo(DemoSettings(out=tmp_path), console) == 1
    assert console.file.getvalue().splitlines()[-2:] == [
        "Undertow, defaults: its gradients are not the reference's.",
        "Undertow, defaults: its parameters are not the reference's.",
    ]


REFUSALS: dict[str, Call] = {
    "--nproc must be 1 to 16, got 0.\n  undertow demo\n  Two show the most on a small machine.": lambda: DemoSettings(
        num_ranks=0
    ),
    "--steps must be 1 to 10000, got 0.\n  undertow demo\n  Eight are enough for a stable median.": lambda: DemoSettings(
        num_steps=0
    ),
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


# Ranks as processes: started, listened to, and always ended.


SILENCE_S = 60.0


Send = Callable[[object], None]


def report_in(rank: int, send: Send) -> None:
    send((rank, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())))


def fail_on_rank_1(rank: int, send: Send) -> None:
    if rank == 0:
        threading.Event().wait()
    raise ValueError("as planned")


def rank_1_dies_and_rank_0_complains(rank: int, meeting: Path, send: Send) -> None:
    if rank == 1:
        meeting.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not meeting.exists():  # or rank 1 may die when rank 0 is blamed already
        time.sleep(0.005)
    raise ConnectionError("closed by peer")


def say_nothing(rank: int, send: Send) -> None:
    threading.Event().wait()


def ignore_every_request(rank: int, send: Send) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send("ready")
    threading.Event().wait()


def interrupt_the_parent(rank: int, send: Send) -> None:
    if rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    threading.Event().wait()


def our_children() -> list[psutil.Process]:
    """Without the helper that multiprocessing keeps for its semaphores."""
    return [child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.fixture
def others() -> Iterator[list[psutil.Process]]:
    """Processes of other tests: no other one is left."""
    before = our_children()
    yield before
    assert [child for child in our_children() if child not in before] == []


@pytest.mark.slow  # interpreters of their own
@pytest.mark.usefixtures("others")
def test_messages_of_all_ranks_come_in_until_the_last_has_ended() -> None:
    messages = messages_of_ranks(report_in, (), num_ranks=3, silence_s=SILENCE_S)
    # Ranks do not hear interrupts themselves.
    assert sorted(messages) == [(0, True), (1, True), (2, True)]


@pytest.mark.slow  # interpreters of their own
@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("target", "silence_s", "text"),
    [
        pytest.param(fail_on_rank_1, SILENCE_S, "ValueError: as planned", id="one fails"),
        # It is blamed rather than those who noticed it.
        pytest.param(
            rank_1_dies_and_rank_0_complains,
            SILENCE_S,
            "rank 1 has failed.\n  It ended with exit code -9.\n  Often the machine has run out of memory: try fewer ranks.",
            id="one is killed",
        ),
        pytest.param(
            say_nothing,
            1.0,
            "no rank has reported for 1 s.\n  ranks that still ran: 0, 1\n"
            "  They wait for each other, or the machine is far too busy; try again with fewer ranks.",
            id="all are silent",
        ),
    ],
)
def test_ranks_that_fail_are_named_and_the_others_ended(
    target: Callable[..., None], silence_s: float, text: str, tmp_path: Path
) -> None:
    given = (tmp_path / "rank-1-dies",) if target is rank_1_dies_and_rank_0_complains else ()
    with pytest.raises(RanksLost) as caught:
        list(messages_of_ranks(target, given, num_ranks=2, silence_s=silence_s))
    told = str(caught.value)
    assert told == text or (told.startswith("rank 1 has failed.\n  Traceback") and told.endswith(text))


@pytest.mark.slow  # interpreters of their own
@pytest.mark.usefixtures("others")
def test_an_interrupt_ends_the_ranks() -> None:
    with pytest.raises(KeyboardInterrupt):
        list(messages_of_ranks(interrupt_the_parent, (), num_ranks=2, silence_s=SILENCE_S))


@pytest.mark.slow  # interpreters of their own
def test_leaving_early_ends_even_ranks_that_refuse(others: list[psutil.Process]) -> None:
    with closing(messages_of_ranks(ignore_every_request, (), num_ranks=1, silence_s=SILENCE_S)) as messages:
        assert next(messages) == "ready"
        (child,) = [child for child in our_children() if child not in others]
    assert not child.is_running()
