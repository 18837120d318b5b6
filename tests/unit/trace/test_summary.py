"""The report of steps whose times are known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from support.records import GATHERS, record, report, row
from undertow.trace import StepReport

PLAIN, SHARDED = report(record()), report(record(gathers=GATHERS))
ALONE = report(record(buckets=(), busy_ms=()))
# A report, and the values of some of its fields.
REPORTS: dict[str, tuple[StepReport, dict[str, Any]]] = {
    "a step is split into forward, backward, hidden and exposed": (
        PLAIN,
        {
            "step_ms": 100.0,
            "forward_ms": 20.0,
            "backward_ms": 40.0,
            "communication_ms": 40.0,
            "exposed_ms": 20.0,
            "hidden_ms": 20.0,
            "overlap": 0.5,
            "synchronised_ms": 80.0,
            "limit_ms": 80.0,
        },
    ),
    "gathers are communication and have figures of their own": (
        SHARDED,
        {
            "communication_ms": 60.0,
            "exposed_ms": 25.0,
            "gather_ms": 20.0,
            "gather_exposed_ms": 5.0,
            "gather_overlap": 0.75,
            "limit_ms": 80.0,  # of the gradients
            # Computing takes 100 - 20 - 5 ms. The link carries b1 (20 both ways: 20 + 15 to gather), behind its gradient at
            # 60 - 5; the forward reads b1 at 0: 55 + 35 = 90. With b0 (20 + 5), ready at 30 - 5, read at 12 - 5: 78.
            "step_limit_ms": 90.0,
        },
    ),
    "without a sharded optimizer there are no gathers": (
        PLAIN,
        {"gathers": (), "gather_ms": 0.0, "gather_overlap": None, "step_limit_ms": 0.0},
    ),
    "times are medians over steps": (
        report(*(record(step=step, step_us=100_000 + us) for step, us in enumerate((0, 4_000, 90_000)))),
        {"step_ms": 104.0},
    ),
    "the wait for a slower rank is told from the wait for the network": (
        report(record(busy_ms=(50.0, 65.0))),
        {"late_rank_ms": 15.0, "wire_ms": 5.0, "slowest_rank": 1},
    ),
    "the slowest rank itself waits for nobody": (
        report(record(rank=1, busy_ms=(50.0, 65.0)), rank=1),
        {"late_rank_ms": 0.0, "wire_ms": 20.0},
    ),
    "without communication": (ALONE, {"overlap": None, "buckets": (), "slowest_rank": None}),
}


@pytest.mark.parametrize(("found", "fields"), REPORTS.values(), ids=REPORTS)
def test_a_report(found: StepReport, fields: dict[str, Any]) -> None:
    assert {name: getattr(found, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (PLAIN, "50% hidden; exposed 20.0 ms of 100.0 ms; worst: bucket 1"),
        (ALONE, "no communication; step 100.0 ms"),
        (report(), "no step recorded yet"),
    ],
)
def test_a_report_as_text_is_one_line(found: StepReport, text: str) -> None:
    assert str(found) == text


def test_gathers_have_rows() -> None:
    assert [(it.bucket, it.launched_ms, it.done_ms) for it in SHARDED.gathers] == [(1, -10, 5), (0, -9, 10)]
    assert [(it.num_bytes, it.wire_ms, it.waited_ms) for it in SHARDED.gathers] == [(4000, 15, 5), (8000, 5, 0)]
    # A step without gathers, whose optimizer's step the scaler has skipped, does not count to their medians.
    assert [it.waited_ms for it in report(record(), record(step=1, gathers=GATHERS)).gathers] == [5, 0]


@pytest.mark.parametrize(
    ("found", "index", "params"),
    [
        (PLAIN, 1, ("stem",)),
        # The wait for its parameters counts too.
        (report(record(gathers=(replace(GATHERS[1], waited=(12_000, 40_000)),))), 0, ("head", "body")),
    ],
)
def test_the_worst_bucket_is_the_one_waited_for_longest(found: StepReport, index: int, params: tuple[str, ...]) -> None:
    assert found.worst_bucket is not None
    assert (found.worst_bucket.index, found.worst_bucket.params) == (index, params)


def test_a_bucket_that_queued_is_charged_only_for_its_own_time_on_the_link() -> None:
    queued = record(buckets=(record().buckets[0], row(1, 35_000, 80_000, (60_000, 80_000))))
    assert queued.wire_intervals() == ((30_000, 50_000), (50_000, 80_000))


def test_to_dict_is_plain_enough_for_json() -> None:
    assert json.loads(json.dumps(PLAIN.to_dict()))["buckets"][1]["params"] == ["stem"]


def test_the_trace_holds_the_lanes_of_the_step() -> None:
    trace = record().trace()
    assert [(event.kind, event.start_us, event.stop_us) for event in trace.on_lane("compute")] == [
        ("forward", 0, 20_000),
        ("backward", 20_000, 60_000),
        ("wait", 60_000, 60_000),
        ("wait", 60_000, 80_000),
        ("optimizer", 80_000, 100_000),
    ]
    assert [event.num_bytes for event in trace.communication] == [8000, 4000]


def test_gathers_begin_before_the_step_in_its_trace() -> None:
    trace = record(gathers=GATHERS).trace()
    assert [(event.kind, event.bucket, event.start_us, event.stop_us) for event in trace.communication] == [
        ("all_gather", 1, -10_000, 5_000),
        ("all_gather", 0, 5_000, 10_000),
        ("all_reduce", 0, 30_000, 50_000),
        ("all_reduce", 1, 60_000, 80_000),
    ]
    waits = [(event.bucket, event.start_us, event.stop_us) for event in trace.on_lane("compute") if event.kind == "wait"]
    assert waits[:2] == [(1, 0, 5_000), (0, 12_000, 12_000)]
