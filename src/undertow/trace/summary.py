"""Summarizes where the time of the recorded steps went, by one that is typical of them."""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any, TypeAlias

from undertow.plan import Plan
from undertow.trace.bucket_report import BucketReport
from undertow.trace.record import (
    BucketRecord,
    StepRecord,
    length_us,
    limit_us,
    union_us,
    wires_of,
)
from undertow.trace.step_report import StepReport

_TimedStep: TypeAlias = tuple[StepRecord, Mapping[str, Any]]  # with its times

_MS = 1e-3  # milliseconds in a microsecond
# Of 100 Mb/s, the slowest link that the guides have settings for (docs/slow-networks.md).
_SLOWEST_BYTES_PER_MS = 100e6 / 8 / 1e3


def summarize(
    records: Sequence[StepRecord],
    plan: Plan,
    *,
    rank: int,
    num_skipped: int = 0,
    is_one_graph: bool = False,
    plan_since: int | None = None,
) -> StepReport:
    """Summarizes `records`, all made under `plan`, by the step whose times are nearest to the
    medians.

    Args:
        records: Steps of one rank.
        plan: The plan that they ran under.
        rank: The rank that made the records.
        num_skipped: Optimizer steps skipped by nonfinite="skip".
        is_one_graph: True if the model is compiled as a whole.
        plan_since: The first step under this plan if earlier recorded ones ran under another.
    """
    without = StepRecord(
        step=0, rank=rank, step_us=0.0, forwards=(), backwards=(), buckets=(), busy_ms=()
    )
    comparable = _comparable(records or [without])
    record, times = _typical(comparable)
    shortest_ms = min(of_one["communication_ms"] for _, of_one in comparable)
    buckets = _bucket_reports(plan, record.buckets)
    gathers = _bucket_reports(plan, record.gathers)
    steps_ms = sorted(each.step_us * _MS for each in records) or [0.0]
    return StepReport(
        num_steps=len(records),
        plan_since=plan_since,
        num_skipped=num_skipped,
        is_one_graph=is_one_graph,
        rank=rank,
        num_ranks=plan.num_ranks,
        step=record.step,
        step_p50_ms=median(steps_ms),
        step_p95_ms=steps_ms[ceil(0.95 * len(steps_ms)) - 1],
        rest_ms=max(
            0.0, times["step_ms"] - times["forward_ms"] - times["backward_ms"] - times["exposed_ms"]
        ),
        overlap=record.overlap().fraction,
        slowest_rank=max(range(len(record.busy_ms)), key=record.busy_ms.__getitem__, default=None),
        busy_ms=record.busy_ms,
        bytes_ms=min(shortest_ms, _slowest_ms((*buckets, *gathers), plan.num_ranks)),
        buckets=buckets,
        gathers=gathers,
        events=record.trace().events,
        **times,
    )


def _comparable(records: Sequence[StepRecord]) -> list[_TimedStep]:
    """Returns the steps that may be typical, with their times.

    A step without gathers, whose optimizer's step was skipped, is not if others have some.
    """
    has_most = max((bool(record.buckets), bool(record.gathers)) for record in records)
    return [
        (record, _times_ms(record))
        for record in records
        if (bool(record.buckets), bool(record.gathers)) == has_most
    ]


def _typical(steps: Sequence[_TimedStep]) -> _TimedStep:
    """Returns the step whose times are nearest to the medians."""
    medians = {name: median(of_one[name] for _, of_one in steps) for name in steps[0][1]}
    return min(steps, key=lambda step: sum(abs(step[1][name] - medians[name]) for name in medians))


def _slowest_ms(messages: Sequence[BucketReport], num_ranks: int) -> float:
    """Returns how long the bytes of these messages take on the slowest link.

    Messages are few and steps have equal ones, so that a fit cannot tell bytes from latency. But a
    link where training makes sense has a rate, and few bytes cost little at any such rate.
    """
    # A communication hook does not tell its bytes.
    num_bytes = sum(message.sent_bytes or message.num_bytes for message in messages)
    # A rank sends so many times the bytes in an all-reduce, and half of that in other collectives.
    times_sent = 2 * (num_ranks - 1) / num_ranks
    return times_sent * num_bytes / _SLOWEST_BYTES_PER_MS


def _times_ms(record: StepRecord) -> dict[str, float]:
    overlap = record.overlap()
    # Time of each that is in none of the others, so that parts of a step add up.
    waits = [row.waited for row in (*record.gathers, *record.buckets)]
    waited_us = union_us(waits)
    forward_us = union_us([*waits, *record.forwards])
    backward_us = union_us([*waits, *record.forwards, *record.backwards])
    processors_us = min(overlap.exposed_us, record.cpu_us)
    # Buckets that all leave after backward, as without overlap, have not been packed all that time.
    if any(row.launched_us < stop for row in record.buckets for _, stop in record.backwards[-1:]):
        processors_us += record.packing_us()
    wires_us = [wire_us for _, wire_us in wires_of(record.buckets)]
    times_us = {
        "step_ms": record.step_us,
        "forward_ms": forward_us - waited_us,
        "backward_ms": backward_us - forward_us,
        "communication_ms": overlap.total_us,
        "exposed_ms": overlap.exposed_us,
        "late_rank_ms": record.late_rank_us(),
        "processors_ms": processors_us,
        "coding_ms": union_us((event.start_us, event.stop_us) for event in record.codings()),
        "gather_ms": sum(wire_us for _, wire_us in wires_of(record.gathers)),
        "gather_exposed_ms": sum(length_us(gather.waited) for gather in record.gathers),
        "synchronized_ms": max((bucket.done_us for bucket in record.buckets), default=0.0),
        "limit_ms": limit_us([bucket.ready_us for bucket in record.buckets], wires_us),
    }
    return {name: time_us * _MS for name, time_us in times_us.items()}


def _bucket_reports(plan: Plan, rows: Sequence[BucketRecord]) -> tuple[BucketReport, ...]:
    reports = []
    for row, (_, wire_us) in zip(rows, wires_of(rows), strict=True):
        bucket = plan.buckets[row.bucket]
        specs = [plan.params[param] for param in bucket.params]
        largest = max(specs, key=lambda spec: spec.num_bytes, default=None)
        made = BucketReport(
            index=row.bucket,
            params=tuple(spec.name for spec in specs),
            largest="" if largest is None else largest.name,
            num_bytes=bucket.num_bytes,
            sent_bytes=row.num_bytes,
            ready_ms=row.ready_us * _MS,
            launched_ms=row.launched_us * _MS,
            done_ms=row.done_us * _MS,
            wire_ms=wire_us * _MS,
            waited_ms=length_us(row.waited) * _MS,
            coding_ms=sum(stop_us - start_us for _, start_us, stop_us in row.codings) * _MS,
        )
        reports.append(made)
    return tuple(reports)
