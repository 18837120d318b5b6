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
    *,
    wrong: Way | None = None,
    losses: Mapping[Way, float] | None = None,
    num_ranks: int = 2,
    with_other_parameters: Way | None = None,
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
                parameters_agree=way is not with_other_parameters,
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


def test_a_way_that_ends_with_other_parameters_is_named() -> None:
    verdict = Verdict.of(results(with_other_parameters=Way.ZERO2), num_ranks=2)
    assert verdict.complaints == ["Undertow, ZeRO-2: its parameters are not the reference's."]


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
    assert "bucketed, after backward   1234.6  1.00x     25.0    80%     1  2.5000     NO" in [line.strip() for line in lines]
    assert "Undertow, defaults         1234.6  1.00x     25.0    80%     1  2.5000    yes" in [line.strip() for line in lines]


def test_a_step_becomes_phases_and_the_collectives_of_its_gradients() -> None:
    times = StepTimes(forward_began_s=10.0, forward_s=10.1, last_gradient_s=10.3, synchronised_s=10.35, update=(10.35, 10.36))
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


SHARDED = StepTimes(forward_began_s=10.0, forward_s=10.1, last_gradient_s=10.3, synchronised_s=10.35, update=(9.98, 9.99))


def recorded(*events: tuple[str, str, int | None, float, float]) -> Trace:
    """The library's own trace, whose clock starts 1 ms after ours."""
    return Trace(
        rank=0,
        step=3,
        events=(
            Event(lane="compute", kind="forward", start_us=0, stop_us=99_000),
            *(
                Event(lane=lane, kind=kind, bucket=bucket, start_us=start, stop_us=stop)
                for lane, kind, bucket, start, stop in events
            ),
        ),
    )


def test_a_step_in_shards_begins_with_the_optimizer_and_waits_for_parameters_in_its_forward() -> None:
    own = recorded(
        ("compute", "wait", 1, 1_000, 9_000),
        ("compute", "wait", 0, 330_000, 340_000),  # for gradients: measured alike for every way
        ("comm.dp", "all_gather", 1, -12_000, 9_000),
    )
    trace = trace_of(SHARDED, [], rank=0, step=3, recorded=own)
    lane = [(event.kind, round(event.start_us), round(event.stop_us)) for event in trace.on_lane("compute")]
    assert lane == [
        ("forward", 0, 100_000),
        ("backward", 100_000, 300_000),
        ("wait", 300_000, 350_000),
        ("optimizer", -20_000, -10_000),
        ("wait", 2_000, 10_000),
    ]
    (gather,) = trace.communication
    assert (round(gather.start_us), round(gather.stop_us)) == (-11_000, 10_000)
    assert trace.duration_us == pytest.approx(370_000)
    assert SHARDED.step_ms == pytest.approx(370)


def message(started_s: float, done_s: float, launched_s: float = 9.99) -> Transfer:
    return Transfer(kind="send", num_bytes=4, launched_s=launched_s, started_s=started_s, done_s=done_s)


def test_an_op_of_messages_lasts_from_the_first_to_the_last_of_them() -> None:
    own = recorded(
        ("comm.dp", "all_gather", 1, -12_000, 9_000),
        ("comm.dp", "all_gather", 0, 9_000, 30_000),
        ("comm.dp", "reduce_scatter", 0, 150_000, 200_000),
    )
    sent = [
        message(9.90, 9.91, launched_s=9.90),  # of another way's turn
        message(9.995, 10.002),
        message(10.002, 10.009),
        message(10.012, 10.029),
        message(10.19, 10.195),  # another rank was late with it
    ]
    trace = trace_of(SHARDED, sent, rank=0, step=3, recorded=own)
    assert [(event.kind, round(event.start_us), round(event.stop_us)) for event in trace.communication] == [
        ("all_gather", -5_000, 9_000),
        ("all_gather", 12_000, 29_000),
        ("reduce_scatter", 190_000, 195_000),
    ]


def step_of(*, length_us: float, exposed_us: float) -> Trace:
    forward = Event(lane="compute", kind="forward", start_us=0, stop_us=length_us - exposed_us)
    wait = Event(lane="compute", kind="wait", start_us=length_us - exposed_us, stop_us=length_us)
    sent = Event(lane="comm.dp", kind="all_reduce", start_us=length_us - 100, stop_us=length_us)
    return Trace(rank=1, step=int(length_us), events=(forward, wait, sent))


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


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (
            "zero3",
            "there is no strategy 'zero3'.\n  strategy\n  Use torch.distributed.fsdp.fully_shard to shard parameters.",
        ),
        (
            "hybrid",
            'strategy \'hybrid\' is for several nodes, and the demo runs on one.\n  undertow demo\n  Take "zero1" or "zero2".',
        ),
        ("zero", "there is no strategy 'zero'.\n  strategy\n  Choose one of: 'ddp', 'zero1', 'zero2', 'hybrid'."),
    ],
)
def test_an_unknown_strategy_is_refused(strategy: str, text: str) -> None:
    assert text_of(ConfigError, lambda: DemoSettings(strategy=strategy)) == text


def test_a_strategy_with_shards_adds_a_way() -> None:
    assert [len(DemoSettings(strategy=strategy).ways) for strategy in ("ddp", "zero1", "zero2")] == [5, 6, 6]
    assert DemoSettings(strategy="zero1").ways[-1] is Way.ZERO1


def test_an_unknown_link_is_refused() -> None:
    assert "there is no link 'fast'." in text_of(ConfigError, lambda: DemoSettings(link="fast"))
