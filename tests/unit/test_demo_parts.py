from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

import pytest
from rich.console import Console

from support.errors import text_of
from undertow.demo import DemoSettings, Way
from undertow.demo.measure import StepTimes, trace_of
from undertow.demo.results import WayDone, way_done
from undertow.demo.show import comparison_table
from undertow.demo.verdict import Verdict
from undertow.errors import ConfigError
from undertow.runtime.emulated_link import Transfer
from undertow.trace import Event, Trace, overlap_of

TRACE = Trace(
    rank=0,
    step=4,
    events=(
        Event(lane="compute", kind="wait", start_us=200_000, stop_us=225_000),
        Event(lane="comm.dp", kind="all_reduce", start_us=100_000, stop_us=225_000),
    ),
)


def results(
    *, wrong: Way | None = None, losses: Mapping[Way, float] | None = None, num_ranks: int = 2
) -> dict[Way, Sequence[WayDone]]:
    return {
        way: [
            WayDone(
                way=way,
                rank=rank,
                step_ms=1234.56,
                exposed_ms=25.0,
                overlap=0.8,
                typical=TRACE,
                loss=(losses or {}).get(way, 2.5),
                gradients_agree=way is not wrong,
            )
            for rank in range(num_ranks)
        ]
        for way in Way
    }


def test_ways_that_agree_leave_nothing_to_complain_about() -> None:
    assert Verdict.of(results(), num_ranks=2).complaints == []


def test_a_way_with_other_gradients_is_named() -> None:
    verdict = Verdict.of(results(wrong=Way.TORCH_DDP), num_ranks=2)
    assert not verdict.agrees(Way.TORCH_DDP)
    assert verdict.complaints == ["torch DDP, defaults: its gradients are not the reference's."]


def test_two_ranks_must_have_the_very_same_loss() -> None:
    almost = {Way.UNDERTOW: math.nextafter(2.5, 3)}
    assert Verdict.of(results(losses=almost), num_ranks=2).complaints == [
        "Undertow, defaults: its final loss is not the reference's."
    ]


def test_more_ranks_may_differ_by_rounding_only() -> None:
    assert Verdict.of(results(losses={Way.UNDERTOW: 2.501}, num_ranks=3), num_ranks=3).complaints == []
    assert Verdict.of(results(losses={Way.UNDERTOW: 2.6}, num_ranks=3), num_ranks=3).complaints != []


def test_a_loss_that_is_no_number_is_wrong() -> None:
    assert Verdict.of(results(losses={Way.BUCKETED: math.nan}), num_ranks=2).with_wrong_loss == [Way.BUCKETED]


def test_the_table_fits_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        console.print(
            comparison_table(results(wrong=Way.BUCKETED), Verdict.of(results(wrong=Way.BUCKETED), num_ranks=2), num_steps=3)
        )
    lines = captured.get().splitlines()
    assert "bucketed, after backward   1234.6  1.00x     25.0    80%       1  2.5000     NO" in [line.strip() for line in lines]
    assert "Undertow, defaults         1234.6  1.00x     25.0    80%       1  2.5000    yes" in [line.strip() for line in lines]


def test_a_step_becomes_phases_and_the_collectives_of_its_gradients() -> None:
    times = StepTimes(began_s=10.0, forward_s=10.1, last_gradient_s=10.3, synchronised_s=10.35, ended_s=10.36)
    sent = [
        Transfer(kind="broadcast", num_bytes=4, launched_s=10.05, started_s=10.05, done_s=10.06),  # before backward
        Transfer(kind="all_reduce", num_bytes=8, launched_s=10.2, started_s=10.25, done_s=10.34),
        Transfer(kind="all_reduce", num_bytes=8, launched_s=10.4, started_s=10.45, done_s=10.5),  # of the next step
    ]
    trace = trace_of(times, sent, rank=1, step=3)
    assert [event.kind for event in trace.on_lane("compute")] == ["forward", "backward", "wait", "optimizer"]
    (collective,) = trace.communication
    assert (collective.bucket, collective.num_bytes) == (0, 8)
    overlap = overlap_of(trace)
    # Differences of doubles near 10 s are right to about 2e-9 s.
    assert overlap.total_us == pytest.approx(90_000, abs=0.01)
    assert overlap.exposed_us == pytest.approx(50_000, abs=0.01)


def step_of(*, length_us: float, exposed_us: float) -> Trace:
    wait = Event(lane="compute", kind="wait", start_us=length_us - exposed_us, stop_us=length_us)
    sent = Event(lane="comm.dp", kind="all_reduce", start_us=length_us - 100, stop_us=length_us)
    return Trace(rank=1, step=int(length_us), events=(wait, sent))


def test_a_way_is_summed_up_by_medians_and_the_step_closest_to_them() -> None:
    lengths_and_waits = [(900, 90), (500, 40), (510, 95), (490, 45), (100, 50)]
    steps = [step_of(length_us=length, exposed_us=exposed) for length, exposed in lengths_and_waits]
    done = way_done(Way.OVERLAPPED, steps, loss=1.0, gradients_agree=True)
    assert (done.rank, done.step_ms, done.exposed_ms, done.overlap) == (1, 0.5, 0.05, 0.5)
    assert done.typical.step == 500


def test_a_way_without_communication_has_no_overlap() -> None:
    silent = Trace(rank=0, step=0, events=(Event(lane="compute", kind="forward", start_us=0, stop_us=5),))
    assert way_done(Way.UNDERTOW, [silent], loss=1.0, gradients_agree=True).overlap is None


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"num_ranks": 0}, "--nproc must be 1 to 16, got 0.\n  undertow demo\n  Two show the most on a small machine."),
        ({"num_ranks": 17}, "--nproc must be 1 to 16, got 17.\n  undertow demo\n  Two show the most on a small machine."),
        ({"num_steps": 0}, "--steps must be 1 to 10000, got 0.\n  undertow demo\n  Eight are enough for a stable median."),
        ({"seed": -1}, "--seed must be 0 to 2147483647, got -1.\n  undertow demo\n  Any such number will do."),
    ],
)
def test_an_impossible_setting_is_refused(setting: dict[str, int], text: str) -> None:
    assert text_of(ConfigError, lambda: DemoSettings(**setting)) == text  # type: ignore[arg-type]


def test_an_unknown_link_is_refused() -> None:
    assert "there is no link 'fast'." in text_of(ConfigError, lambda: DemoSettings(link="fast"))
