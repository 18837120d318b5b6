"""Summarizes where the time of the recorded steps went, by one that is typical of them."""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any

from undertow.plan import Plan
from undertow.trace.record import BucketRecord, StepRecord, length_us, limit_us, overlap_of, union_us, wires_of
from undertow.trace.step_report import BucketReport, GatherReport, StepReport

_MS = 1e-3  # milliseconds in a microsecond


def summarize(
    records: Sequence[StepRecord],
    plan: Plan,
    *,
    rank: int,
    num_skipped: int = 0,
    is_one_graph: bool = False,
    plan_since: int | None = None,
) -> StepReport:
    """Summarizes `records`, all made under `plan`, by the step whose times are nearest to the medians.

    Args:
        records: Steps of one rank.
        plan: The plan under which they ran.
        rank: The rank that made the records.
        num_skipped: Optimizer steps skipped by nonfinite="skip".
        is_one_graph: True if the model is compiled as a whole.
        plan_since: The first step under this plan if earlier recorded ones ran under another.
    """
    record, times = _typical(
        records or [StepRecord(step=0, rank=rank, step_us=0.0, forwards=(), backwards=(), buckets=(), busy_ms=())]
    )
    trace = record.trace()
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
        rest_ms=max(0.0, times["step_ms"] - times["forward_ms"] - times["backward_ms"] - times["exposed_ms"]),
        overlap=overlap_of(trace).fraction,
        slowest_rank=_slowest(record),
        slowest_share=[*map(_slowest, records)].count(_slowest(record)) / max(1, len(records)),
        busy_ms=record.busy_ms,
        buckets=tuple(
            _bucket_report(plan, row, wire_us) for row, (_, wire_us) in zip(record.buckets, wires_of(record.buckets), strict=True)
        ),
        gathers=tuple(
            GatherReport(bucket=row.bucket, num_bytes=row.num_bytes, **_row_ms(row, wire_us))
            for row, (_, wire_us) in zip(record.gathers, wires_of(record.gathers), strict=True)
        ),
        events=trace.events,
        **times,
    )


def _slowest(record: StepRecord) -> int | None:
    return max(range(len(record.busy_ms)), key=record.busy_ms.__getitem__, default=None)


def _typical(records: Sequence[StepRecord]) -> tuple[StepRecord, Mapping[str, Any]]:
    """Returns the step whose times are nearest to the medians, and its times.

    A step without gathers, whose optimizer's step was skipped, is not typical if others have some.
    """
    has_most = max((bool(record.buckets), bool(record.gathers)) for record in records)
    times = [(record, _times_ms(record)) for record in records if (bool(record.buckets), bool(record.gathers)) == has_most]
    medians = {name: median(of_one[name] for _, of_one in times) for name in times[0][1]}
    return min(times, key=lambda step: sum(abs(step[1][name] - medians[name]) for name in medians))


def _times_ms(record: StepRecord) -> dict[str, float]:
    overlap = overlap_of(record.trace())
    waits = [row.waited for row in (*record.gathers, *record.buckets)]
    # Time of each that is in none of the others, so that parts of a step add up.
    # Buckets that all leave after backward, as without overlap, have not been packed all that time.
    is_packed = any(row.launched_us < stop for row in record.buckets for _, stop in record.backwards[-1:])
    waited, computed = union_us(waits), union_us([*waits, *record.forwards])
    times_us = {
        "step_ms": record.step_us,
        "forward_ms": computed - waited,
        "backward_ms": union_us([*waits, *record.forwards, *record.backwards]) - computed,
        "communication_ms": overlap.total_us,
        "exposed_ms": overlap.exposed_us,
        "processors_ms": record.packing_us() * is_packed + min(overlap.exposed_us, record.cpu_us),
        "gather_ms": sum(wire_us for _, wire_us in wires_of(record.gathers)),
        "gather_exposed_ms": sum(length_us(gather.waited) for gather in record.gathers),
        "synchronized_ms": max((bucket.done_us for bucket in record.buckets), default=0.0),
        "limit_ms": limit_us(
            [bucket.ready_us for bucket in record.buckets], [wire_us for _, wire_us in wires_of(record.buckets)]
        ),
    }
    times_ms = {name: time_us * _MS for name, time_us in times_us.items()}
    behind_ms = max(record.busy_ms) - record.busy_ms[record.rank] if record.busy_ms else 0.0
    return times_ms | {"late_rank_ms": min(times_ms["exposed_ms"], behind_ms)}


def _bucket_report(plan: Plan, row: BucketRecord, wire_us: float) -> BucketReport:
    bucket = plan.buckets[row.bucket]
    largest = max(bucket.slots, key=lambda slot: slot.numel, default=None)
    return BucketReport(
        index=row.bucket,
        params=tuple(plan.params[param].name for param in bucket.params),
        largest="" if largest is None else plan.params[largest.param].name,
        largest_bytes=0 if largest is None else largest.numel * bucket.itemsize,
        num_bytes=bucket.num_bytes,
        itemsize=bucket.itemsize,
        sent_bytes=row.num_bytes,
        ready_ms=row.ready_us * _MS,
        **_row_ms(row, wire_us),
    )


def _row_ms(row: BucketRecord, wire_us: float) -> dict[str, float]:
    """Returns the times that buckets and gathers have in common, from a record and how long the link worked on it."""
    return {
        "launched_ms": row.launched_us * _MS,
        "done_ms": row.done_us * _MS,
        "wire_ms": wire_us * _MS,
        "waited_ms": length_us(row.waited) * _MS,
    }
