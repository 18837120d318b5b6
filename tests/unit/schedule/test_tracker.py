"""Which ops a round releases as gradients arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import refusal
from support.strategies import lowerings, plans
from undertow.plan import Plan
from undertow.schedule import Op, OpKind, Schedule, Tracker, lower_accumulation, lower_data_parallel, schedule_from_text
from undertow.schedule.op import EXTERNAL

FILLS_BACKWARDS = """
id  lane     kind  bucket  reads     writes    after
00  compute  fill  b1      -         grad[b1]  -
01  compute  fill  b0      -         grad[b0]  -
02  compute  pack  b0      grad[b0]  grad[b0]  01
03  compute  pack  b1      grad[b1]  grad[b1]  00
04  compute  end   *       -         -         00 01
05  compute  join  *       -         -         04
"""
BY_BUCKET = lower_data_parallel(3)
WHOLE = [(1, 0), (2,), (3,)]  # parameters of each bucket
PIECES = [(1, 0), (0, 2), (0,)]
ALL_LEAVE = "end: pack b0, all_reduce b0, pack b1, all_reduce b1, pack b2, all_reduce b2"
AFTER_REPEATS = ["0:", "1: pack b0, all_reduce b0", "0:", "repeats: True", "learn:"]  # of WHOLE

SCRIPTS = {
    "a full bucket is packed and leaves": (BY_BUCKET, WHOLE, ["1:", "0: pack b0, all_reduce b0"]),
    "a late bucket holds back those behind it": (
        BY_BUCKET,
        WHOLE,
        ["2: pack b1", "0:", "1: pack b0, all_reduce b0, all_reduce b1", "repeats: False"],
    ),
    "the end of backward releases what never filled and the last bucket, the join binds": (
        BY_BUCKET,
        WHOLE,
        ["repeats: False", "3:", ALL_LEAVE, "join: bind b0, bind b1, bind b2"],
    ),
    "without overlap every bucket leaves as soon as it is packed at the end": (
        lower_data_parallel(3, overlap=False),
        WHOLE,
        ["0:", "1:", "2:", "3:", "reset:", ALL_LEAVE],
    ),
    "an accumulation packs and binds each bucket when it is full": (
        lower_accumulation(3),
        WHOLE,
        ["2: pack b1, bind b1", "end: pack b0, bind b0, pack b2, bind b2", "join:"],
    ),
    "joining early and often binds nothing that has not left": (
        BY_BUCKET,
        WHOLE,
        [
            "join:",
            "join:",
            "2: pack b1",
            "end: pack b0, all_reduce b0, all_reduce b1, bind b0, bind b1, pack b2, all_reduce b2, bind b2",
        ],
    ),
    "a schedule may name the fills in any order": (schedule_from_text(FILLS_BACKWARDS), [(0,), (1,)], ["1: pack b1"]),
    "after learning a bucket waits for the repeats of its parameters": (
        BY_BUCKET,
        WHOLE,
        [*AFTER_REPEATS, "0:", "missing: 1 | 2 | 3", "arrived: 0", "1:", "0: pack b0, all_reduce b0", "repeats: False"],
    ),
    "repeats that do not come again leave the bucket to the end of backward": (
        BY_BUCKET,
        WHOLE,
        [*AFTER_REPEATS, "0:", "1:", "2: pack b1", "3:", "end: pack b0, all_reduce b0, all_reduce b1, pack b2, all_reduce b2"],
    ),
    "learning from a round without repeats forgets them": (
        BY_BUCKET,
        WHOLE,
        [*AFTER_REPEATS, "0:", "1:", "learn:", "0:", "1: pack b0, all_reduce b0"],
    ),
    "what is only noted has arrived and releases nothing": (
        BY_BUCKET,
        WHOLE,
        ["note 0:", "note 1:", "note 1:", "arrived: 0 1", "missing: - | 2 | 3", "repeats: False", ALL_LEAVE],
    ),
    "pieces leave in the order of their buckets": (
        BY_BUCKET,
        PIECES,
        ["2:", "0: pack b1", "1: pack b0, all_reduce b0, all_reduce b1", "end: pack b2, all_reduce b2"],
    ),
    "a parameter in pieces is missing in each of its buckets": (
        BY_BUCKET,
        PIECES,
        ["2:", "missing: 0 1 | 0 | 0", "arrived: 2", "0: pack b1", "missing: 1 | - | -", "arrived: 0 2"],
    ),
    "a noted parameter in pieces releases nothing and is missing nowhere": (
        BY_BUCKET,
        PIECES,
        ["note 0:", "note 0:", "note 1:", "missing: - | 2 | -", "arrived: 0 1", "repeats: False", "2: pack b1"],
    ),
    "after learning every bucket waits for the repeats of a parameter in pieces": (
        BY_BUCKET,
        PIECES,
        [
            *("0:", "1: pack b0, all_reduce b0", "2: pack b1, all_reduce b1", "0:", "repeats: True", "learn:"),
            *("0:", "1:", "2:", "0: pack b0, all_reduce b0, pack b1, all_reduce b1", "repeats: False", "0:", "repeats: True"),
        ],
    ),
}


def after(tracker: Tracker, event: str) -> str:
    """What an event releases: an arrival, if it is a number. Or the state that is asked for."""
    arrivals, ops = tracker.arrivals, list[Op]()
    match event.split():
        case ["end"]:
            ops += tracker.end_backward()
        case ["join"]:
            ops += tracker.join()
        case ["reset"]:
            tracker.reset()
        case ["learn"]:
            arrivals.learn_repeats()
            tracker.reset()
        case ["note", param]:
            arrivals.note(int(param))
        case ["arrived"]:
            return " ".join(map(str, sorted(arrivals.arrived)))
        case ["missing"]:
            return " | ".join(" ".join(map(str, sorted(arrivals.missing(bucket)))) or "-" for bucket in range(3))
        case ["repeats"]:
            return str(arrivals.has_repeats)
        case [param]:
            ops += tracker.arrive(int(param))
    return ", ".join(op.label for op in ops)


@pytest.mark.parametrize(("schedule", "buckets", "script"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_round(schedule: Schedule, buckets: list[tuple[int, ...]], script: list[str]) -> None:
    tracker = Tracker(schedule, buckets, num_params=1 + max(map(max, buckets)))
    assert [f"{event}: {after(tracker, event)}".strip() for event, _, _ in (line.partition(":") for line in script)] == script


class Case(NamedTuple):
    """A plan, its schedule, and which parameters arrive in which order, some of them again."""

    plan: Plan
    schedule: Schedule
    arrivals: list[int]

    @property
    def tracker(self) -> Tracker:
        return Tracker(self.schedule, [bucket.params for bucket in self.plan.buckets], num_params=len(self.plan.params))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    plan = draw(plans() | plans(splits=True))
    indices = range(len(plan.params))
    arrivals = draw(st.permutations(indices) | st.lists(st.sampled_from(indices)) if indices else st.just([]))
    return Case(plan, draw(lowerings)(len(plan.buckets)), arrivals)


def play(tracker: Tracker, arrivals: Sequence[int]) -> tuple[list[tuple[int, Op]], list[Op], list[Op]]:
    """What is released at arrivals, with the number of arrivals so far, at the end of backward, and at the join."""
    during = [(count, op) for count, param in enumerate(arrivals, start=1) for op in tracker.arrive(param)]
    return during, list(tracker.end_backward()), list(tracker.join())


@given(cases(), st.booleans())
def test_each_op_of_ours_is_released_once_in_order_and_in_its_time(case: Case, has_learned_repeats: bool) -> None:
    tracker = case.tracker
    if has_learned_repeats:
        play(tracker, [*case.arrivals, *case.arrivals])
        tracker.arrivals.learn_repeats()
        tracker.reset()
    during, at_end, at_join = play(tracker, case.arrivals)
    before_join = [*(op for _, op in during), *at_end]
    ops = [*before_join, *at_join]
    ours = [op for op in case.schedule.ops if op.kind not in EXTERNAL]
    assert sorted(ops, key=lambda op: op.id) == ours
    assert [op for op in ops if op.kind is OpKind.ALL_REDUCE] == list(case.schedule.collectives)
    for at, op in enumerate(ops):
        assert {case.schedule.ops[earlier] for earlier in op.after} & {*ours} <= {*ops[:at]}
    for count, op in during:
        assert {*case.plan.buckets[op.bucket].params} <= {*case.arrivals[:count]}  # only full buckets are packed
        assert (op.kind, op.bucket) != (OpKind.ALL_REDUCE, len(case.plan.buckets) - 1)  # the last one waits for backward
    crossed = {op.bucket for op in case.schedule.collectives}
    assert not any(op.kind is OpKind.BIND and op.bucket in crossed for op in before_join)


@given(cases(), st.data())
def test_repeats_release_nothing_what_is_missing_is_known_and_a_reset_forgets_all(case: Case, data: st.DataObject) -> None:
    tracker, some = case.tracker, case.arrivals[: data.draw(st.integers(0, len(case.arrivals)))]
    for param in some:
        tracker.arrive(param)
        assert list(tracker.arrive(param)) == []
    assert [tracker.arrivals.missing(bucket.index) for bucket in case.plan.buckets] == [
        {*bucket.params} - {*some} for bucket in case.plan.buckets
    ]
    tracker.reset()
    assert tracker.arrivals.arrived == set()
    assert play(tracker, case.arrivals) == play(case.tracker, case.arrivals)
    assert tracker.arrivals.arrived == {*case.arrivals}
    assert [*tracker.end_backward(), *tracker.join()] == []


def test_a_parameter_in_no_bucket_is_an_error() -> None:
    assert refusal(lambda: Tracker(lower_data_parallel(2), [(0,), (2,)], num_params=3)) == (
        "parameter 1 belongs to no bucket.\n  Put every parameter into one bucket."
    )
