"""The report of steps whose times are known."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from undertow.plan import ParamSpec, plan_from_groups
from undertow.report.terminal import print_report
from undertow.trace import BucketRecord, StepRecord, summarize


def make_plan():
    params = [ParamSpec(name=name, shape=(1000,), dtype="float32", itemsize=4) for name in ("head", "body", "stem")]
    return plan_from_groups(params, [(0, 1), (2,)], num_ranks=2)


def make_record(*, step: int = 0, rank: int = 0, shift_us: float = 0.0, busy_ms: tuple[float, ...] = (50.0, 50.0)) -> StepRecord:
    """Forward 0 to 20 ms, backward to 60; b0 on the link 30 to 50, b1 60 to 80; the lane waits 60 to 80."""
    return StepRecord(
        step=step,
        rank=rank,
        step_us=100_000 + shift_us,
        forwards=((0.0, 20_000.0),),
        backwards=((20_000.0, 60_000.0),),
        buckets=(
            BucketRecord(bucket=0, num_bytes=8000, ready_us=30_000, launched_us=30_000, done_us=50_000, waited=(60_000, 60_000)),
            BucketRecord(bucket=1, num_bytes=4000, ready_us=60_000, launched_us=60_000, done_us=80_000, waited=(60_000, 80_000)),
        ),
        busy_ms=busy_ms,
    )


def with_gathers(record: StepRecord) -> StepRecord:
    """The same in shards: b1 is gathered from -10 to 5 ms, b0 behind it to 10; the forward waits for b1 from 0 to 5."""
    gathers = (
        BucketRecord(
            bucket=1, num_bytes=4000, kind="all_gather", ready_us=-10_000, launched_us=-10_000, done_us=5_000, waited=(0, 5_000)
        ),
        BucketRecord(
            bucket=0,
            num_bytes=8000,
            kind="all_gather",
            ready_us=-9_000,
            launched_us=-9_000,
            done_us=10_000,
            waited=(12_000, 12_000),
        ),
    )
    return dataclasses.replace(record, gathers=gathers)


def test_what_a_hook_has_really_sent_has_a_column_where_it_is_less() -> None:
    def shown(*sent: int) -> str:
        record = make_record()
        buckets = tuple(dataclasses.replace(row, num_bytes=num) for row, num in zip(record.buckets, sent, strict=True))
        report = summarize([dataclasses.replace(record, buckets=buckets)], make_plan(), rank=0)
        assert report.sent_bytes == sum(sent)
        console = Console(file=io.StringIO(), width=120)
        print_report(report, console)
        return console.file.getvalue()

    assert "sent" not in shown(8100, 4200)  # with trailers
    assert "sent" in shown(4050, 2100)


def test_gathers_are_communication_and_have_figures_of_their_own() -> None:
    report = summarize([with_gathers(make_record())], make_plan(), rank=0)
    assert (report.communication_ms, report.exposed_ms) == (60.0, 25.0)
    assert (report.gather_ms, report.gather_exposed_ms, report.gather_overlap) == (20.0, 5.0, 0.75)
    assert [(gather.bucket, gather.launched_ms, gather.done_ms) for gather in report.gathers] == [(1, -10, 5), (0, -9, 10)]
    assert [(gather.num_bytes, gather.wire_ms, gather.waited_ms) for gather in report.gathers] == [(4000, 15, 5), (8000, 5, 0)]
    assert report.limit_ms == 80.0  # of the gradients


def test_a_step_without_gathers_does_not_count_to_their_medians() -> None:
    records = [make_record(), with_gathers(make_record(step=1))]  # the scaler has skipped an optimizer's step
    assert [gather.waited_ms for gather in summarize(records, make_plan(), rank=0).gathers] == [5, 0]


def test_without_a_sharded_optimizer_there_are_no_gathers() -> None:
    report = summarize([make_record()], make_plan(), rank=0)
    assert (report.gathers, report.gather_ms, report.gather_overlap) == ((), 0.0, None)


def test_the_wait_for_its_parameters_counts_to_the_worst_bucket() -> None:
    record = with_gathers(make_record())
    slow = dataclasses.replace(record.gathers[1], waited=(12_000, 40_000))
    worst = summarize([dataclasses.replace(record, gathers=(slow,))], make_plan(), rank=0).worst_bucket
    assert worst is not None
    assert worst.index == 0


def test_a_step_is_split_into_forward_backward_hidden_and_exposed() -> None:
    report = summarize([make_record()], make_plan(), rank=0)
    assert (report.step_ms, report.forward_ms, report.backward_ms) == (100.0, 20.0, 40.0)
    assert (report.communication_ms, report.exposed_ms, report.hidden_ms) == (40.0, 20.0, 20.0)
    assert report.overlap == 0.5
    assert report.synchronised_ms == report.limit_ms == 80.0


def test_times_are_medians_over_steps() -> None:
    records = [make_record(step=step, shift_us=shift) for step, shift in enumerate((0, 4_000, 90_000))]
    assert summarize(records, make_plan(), rank=0).step_ms == 104.0


def test_the_wait_for_a_slower_rank_is_told_from_the_wait_for_the_network() -> None:
    report = summarize([make_record(busy_ms=(50.0, 65.0))], make_plan(), rank=0)
    assert (report.late_rank_ms, report.wire_ms, report.slowest_rank) == (15.0, 5.0, 1)


def test_the_slowest_rank_itself_waits_for_nobody() -> None:
    report = summarize([make_record(rank=1, busy_ms=(50.0, 65.0))], make_plan(), rank=1)
    assert (report.late_rank_ms, report.wire_ms) == (0.0, 20.0)


def test_a_bucket_that_queued_is_charged_only_for_its_own_time_on_the_link() -> None:
    record = make_record()
    queued = BucketRecord(bucket=1, num_bytes=4000, ready_us=35_000, launched_us=35_000, done_us=80_000, waited=(60_000, 80_000))
    wires = StepRecord(**{**{f: getattr(record, f) for f in record.__slots__}, "buckets": (record.buckets[0], queued)})
    assert wires.wire_intervals() == ((30_000, 50_000), (50_000, 80_000))


def test_the_worst_bucket_is_the_one_waited_for_longest() -> None:
    report = summarize([make_record()], make_plan(), rank=0)
    assert report.worst_bucket is not None
    assert (report.worst_bucket.index, report.worst_bucket.params) == (1, ("stem",))


def test_str_is_one_line() -> None:
    assert str(summarize([make_record()], make_plan(), rank=0)) == "50% hidden; exposed 20.0 ms of 100.0 ms; worst: bucket 1"


def test_without_steps_it_says_so() -> None:
    assert str(summarize([], make_plan(), rank=0)) == "no step recorded yet"


def test_without_communication_overlap_is_none() -> None:
    record = make_record()
    alone = StepRecord(**{**{f: getattr(record, f) for f in record.__slots__}, "buckets": (), "busy_ms": ()})
    report = summarize([alone], make_plan(), rank=0)
    assert (report.overlap, report.buckets, report.slowest_rank) == (None, (), None)
    assert str(report) == "no communication; step 100.0 ms"


def test_to_dict_is_plain_enough_for_json() -> None:
    report = summarize([make_record()], make_plan(), rank=0)
    assert json.loads(json.dumps(report.to_dict()))["buckets"][1]["params"] == ["stem"]


@pytest.mark.parametrize("num_steps", [0, 1])
def test_the_terminal_shows_every_bucket_with_its_parameters(num_steps: int) -> None:
    text = io.StringIO()
    report = summarize([make_record()] * num_steps, make_plan(), rank=0)
    print_report(report, Console(file=text, width=120))
    expected = ("head, body", "stem", "50% hidden", "slowest is rank") if num_steps else ("no step recorded yet",)
    assert all(part in text.getvalue() for part in expected)


def test_the_terminal_shows_gathers_where_there_are_some() -> None:
    plain, sharded = io.StringIO(), io.StringIO()
    for text, record in ((plain, make_record()), (sharded, with_gathers(make_record()))):
        print_report(summarize([record], make_plan(), rank=0), Console(file=text, width=80))
    assert "gather" not in plain.getvalue().lower()
    (line,) = (line for line in sharded.getvalue().splitlines() if "of it gathers" in line)
    assert [cell.strip() for cell in line.split("│")[1:-1]] == ["of it gathers", "20.0", "0.0 MB, 75% hidden"]
    lines = [line.rstrip() for line in sharded.getvalue().splitlines()]
    assert "\n".join(lines[-7:]) == (
        "Gathers of parameters, ms since the step began\n"
        "┏━━━━━━━━┳━━━━━━┳━━━━━━━━━━┳━━━━━━┳━━━━━━┳━━━━━━━━┓\n"
        "┃ bucket ┃   MB ┃ launched ┃ done ┃ wire ┃ waited ┃\n"
        "┡━━━━━━━━╇━━━━━━╇━━━━━━━━━━╇━━━━━━╇━━━━━━╇━━━━━━━━┩\n"
        "│      1 │ 0.00 │    -10.0 │  5.0 │ 15.0 │    5.0 │\n"
        "│      0 │ 0.01 │     -9.0 │ 10.0 │  5.0 │    0.0 │\n"
        "└────────┴──────┴──────────┴──────┴──────┴────────┘"
    )


def test_gathers_begin_before_the_step_in_its_trace() -> None:
    trace = with_gathers(make_record()).trace()
    assert [(event.kind, event.bucket, event.start_us, event.stop_us) for event in trace.communication] == [
        ("all_gather", 1, -10_000, 5_000),
        ("all_gather", 0, 5_000, 10_000),
        ("all_reduce", 0, 30_000, 50_000),
        ("all_reduce", 1, 60_000, 80_000),
    ]
    waits = [(event.bucket, event.start_us, event.stop_us) for event in trace.on_lane("compute") if event.kind == "wait"]
    assert waits[:2] == [(1, 0, 5_000), (0, 12_000, 12_000)]


def test_the_trace_holds_the_lanes_of_the_step() -> None:
    trace = make_record().trace()
    assert [(event.kind, event.start_us, event.stop_us) for event in trace.on_lane("compute")] == [
        ("forward", 0, 20_000),
        ("backward", 20_000, 60_000),
        ("wait", 60_000, 60_000),
        ("wait", 60_000, 80_000),
        ("optimizer", 80_000, 100_000),
    ]
    assert [(event.kind, event.bucket, event.num_bytes) for event in trace.communication] == [
        ("all_reduce", 0, 8000),
        ("all_reduce", 1, 4000),
    ]


def test_a_step_with_gathers_has_a_limit_of_its_own() -> None:
    # Computing takes 100 - 20 - 5 ms. The link carries b1 (20 both ways: 20 + 15 to gather), behind its gradient at 60 - 5; the
    # forward reads b1 at 0: 55 + 35 = 90. With b0 (20 + 5), ready at 30 - 5 and read at 12 - 5: 25 + 60 - 7 = 78.
    report = summarize([with_gathers(make_record())], make_plan(), rank=0)
    assert report.step_limit_ms == 90.0
    out = io.StringIO()
    print_report(report, Console(file=out, width=120))
    assert "limit of the step" in out.getvalue()
    assert "achieved / limit 1.111" in out.getvalue()


def test_a_step_without_gathers_has_no_other_limit() -> None:
    assert summarize([make_record()], make_plan(), rank=0).step_limit_ms == 0.0


@pytest.mark.parametrize(("num_skipped", "said"), [(0, False), (3, True)])
def test_skipped_steps_are_counted(num_skipped: int, said: bool) -> None:
    text = io.StringIO()
    print_report(summarize([make_record()], make_plan(), rank=0, num_skipped=num_skipped), Console(file=text, width=120))
    assert ("Optimizer steps skipped so far, for gradients were not finite: 3\n" in text.getvalue()) == said


@pytest.mark.parametrize("is_one_graph", [False, True])
def test_a_model_that_is_compiled_as_one_graph_is_said_to_be(is_one_graph: bool) -> None:
    text = io.StringIO()
    print_report(summarize([make_record()], make_plan(), rank=0, is_one_graph=is_one_graph), Console(file=text, width=120))
    assert ("none of its buckets has 1 MiB: its gradients come all at once.\n" in text.getvalue()) == is_one_graph
