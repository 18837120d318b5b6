"""Summarizes where the time of the recorded steps went: medians over steps."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table

from undertow.plan import Plan
from undertow.shown import Shown, cell, with_experts
from undertow.trace.record import BucketRecord, Interval, StepRecord, length_us, limit_us, overlap_of, step_limit_us, union_us

_MS = 1e-3  # milliseconds in a microsecond


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """The gradients of one bucket, in milliseconds since the step began; medians over the recorded steps."""

    index: int
    params: tuple[str, ...]
    num_bytes: int  # bytes of its gradients
    sent_bytes: int  # bytes passed to collectives, with the trailer; 0 if a communication hook sent them
    ready_ms: float
    launched_ms: float
    done_ms: float
    wire_ms: float  # time in which the link worked on it
    waited_ms: float  # time in which the step waited for it


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherReport:
    """The all-gather of one bucket's parameters under the forward, in milliseconds since the step began; medians."""

    bucket: int
    num_bytes: int
    launched_ms: float  # below 0: after the previous step of the optimizer
    done_ms: float
    wire_ms: float  # time in which the link worked on it
    waited_ms: float  # time in which the forward waited for it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(Shown):
    """Where the time of a step went, on this rank; medians over the recorded steps, in milliseconds.

    `print` and notebooks show it as tables.

    Communication is the reduction of gradients and, with a sharded optimizer, the gathers of the parameters that it updated in
    the previous step. `communication_ms`, `exposed_ms` and `overlap` cover both; `gather_ms` and `gather_exposed_ms` cover the
    gathers alone.

    - `communication_ms` is the time in which the link was in use, `exposed_ms` the time in which the compute lane waited for it,
      `hidden_ms` the rest, and `overlap` the hidden share (None: no communication).
    - `late_rank_ms` is the part of the exposed time spent waiting for a rank that was slower than this one; `wire_ms` is the part
      spent waiting for the network.
    - `limit_ms` is a lower bound: the earliest time at which the gradients of these buckets, with their ready times, could have
      been reduced. It does not include gathers.
    - `step_limit_ms` is the shortest step with these buckets if gathers may run at any time after the reduction of the same
      bucket (0 without gathers).
    """

    num_steps: int
    num_skipped: int  # by nonfinite="skip", since the model was wrapped
    is_one_graph: bool  # the model is compiled as a whole, and its gradients become ready all at once
    rank: int
    step_ms: float
    forward_ms: float
    backward_ms: float
    communication_ms: float
    hidden_ms: float
    exposed_ms: float
    wire_ms: float
    late_rank_ms: float
    overlap: float | None
    gather_ms: float
    gather_exposed_ms: float
    synchronized_ms: float  # from the start of the step until the last bucket of gradients was reduced
    limit_ms: float
    step_limit_ms: float
    slowest_rank: int | None
    busy_ms: tuple[float, ...]  # by rank
    buckets: tuple[BucketReport, ...]
    gathers: tuple[GatherReport, ...]  # in launch order; empty if the optimizer is not sharded
    experts: Mapping[str, "StepReport"] = field(default_factory=dict)  # by pattern and ranks; all else is of the dense parameters

    @property
    def worst_bucket(self) -> BucketReport | None:
        """The bucket for which the step waited longest, for gradients and parameters together; None if it waited for none."""
        waited_ms = {bucket.index: bucket.waited_ms for bucket in self.buckets}
        for gather in self.gathers:
            waited_ms[gather.bucket] += gather.waited_ms
        worst = max(self.buckets, key=lambda bucket: waited_ms[bucket.index], default=None)
        return worst if worst is not None and waited_ms[worst.index] > 0 else None

    @property
    def sent_bytes(self) -> int:
        """Bytes passed to collectives of gradients in a step; 0 if a communication hook sent them."""
        return sum(bucket.sent_bytes for bucket in self.buckets)

    @property
    def gather_overlap(self) -> float | None:
        """Hidden share of the gathers, 0 to 1; None without gathers."""
        return max(0.0, 1 - self.gather_exposed_ms / self.gather_ms) if self.gather_ms > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, ready for JSON."""
        return asdict(self)

    def __rich__(self) -> RenderableType:
        return with_experts(_tables(self), self.experts)


def summarize(
    records: Sequence[StepRecord], plan: Plan, *, rank: int, num_skipped: int = 0, is_one_graph: bool = False
) -> StepReport:
    """Summarizes `records`, all made under `plan`, as medians over steps.

    Args:
        records: Steps of one rank.
        plan: The plan under which they ran.
        rank: The rank that made the records.
        num_skipped: Optimizer steps skipped by nonfinite="skip".
        is_one_graph: True if the model is compiled as a whole.
    """
    nothing = StepRecord(step=0, rank=rank, step_us=0.0, forwards=(), backwards=(), buckets=(), busy_ms=())
    splits = [_times_ms(record) for record in records or [nothing]]
    times: dict[str, Any] = {name: median(split[name] for split in splits) for name in splits[0]}
    # Times that are parts of others are computed from the medians, so that the lines of the report add up.
    communication_ms, exposed_ms = times["communication_ms"], times["exposed_ms"]
    busy = tuple(median(of_rank) for of_rank in zip(*(record.busy_ms for record in records), strict=True))
    sent = [record for record in records if record.buckets]
    return StepReport(
        num_steps=len(records),
        num_skipped=num_skipped,
        is_one_graph=is_one_graph,
        rank=rank,
        hidden_ms=max(0.0, communication_ms - exposed_ms),
        wire_ms=max(0.0, exposed_ms - times["late_rank_ms"]),
        overlap=max(0.0, 1 - exposed_ms / communication_ms) if communication_ms > 0 else None,
        slowest_rank=max(range(len(busy)), key=busy.__getitem__) if busy else None,
        busy_ms=busy,
        buckets=tuple(_bucket_report(sent, plan, index) for index in range(len(plan.buckets))) if sent else (),
        gathers=_gather_reports(records),
        **times,
    )


def _times_ms(record: StepRecord) -> dict[str, float]:
    overlap = overlap_of(record.trace())
    times_us = {
        "step_ms": record.step_us,
        "forward_ms": sum(map(length_us, record.forwards)),
        "backward_ms": sum(map(length_us, record.backwards)),
        "communication_ms": overlap.total_us,
        "exposed_ms": overlap.exposed_us,
        "gather_ms": union_us(record.gather_intervals()),
        "gather_exposed_ms": sum(length_us(gather.waited) for gather in record.gathers),
        "synchronized_ms": max((bucket.done_us for bucket in record.buckets), default=0.0),
        "limit_ms": limit_us([bucket.ready_us for bucket in record.buckets], [*map(length_us, record.wire_intervals())]),
        "step_limit_ms": step_limit_us(record),
    }
    times_ms = {name: time_us * _MS for name, time_us in times_us.items()}
    behind_ms = max(record.busy_ms) - record.busy_ms[record.rank] if record.busy_ms else 0.0
    return times_ms | {"late_rank_ms": min(times_ms["exposed_ms"], behind_ms)}


def _bucket_report(records: Sequence[StepRecord], plan: Plan, index: int) -> BucketReport:
    bucket, rows = plan.buckets[index], [(record.buckets[index], record.wire_intervals()[index]) for record in records]
    return BucketReport(
        index=index,
        params=tuple(plan.params[param].name for param in bucket.params),
        num_bytes=bucket.num_bytes,
        sent_bytes=int(median(row.num_bytes for row, _ in rows)),
        ready_ms=median(row.ready_us for row, _ in rows) * _MS,
        **_medians_ms(rows),
    )


def _gather_reports(records: Sequence[StepRecord]) -> tuple[GatherReport, ...]:
    rows: dict[int, list[tuple[BucketRecord, Interval]]] = defaultdict(list)
    for record in reversed(records):  # in the order of the newest step
        for row, wire in zip(record.gathers, record.gather_intervals(), strict=True):
            rows[row.bucket].append((row, wire))
    return tuple(
        GatherReport(bucket=bucket, num_bytes=of_bucket[0][0].num_bytes, **_medians_ms(of_bucket))
        for bucket, of_bucket in rows.items()
    )


def _medians_ms(rows: Sequence[tuple[BucketRecord, Interval]]) -> dict[str, float]:
    """Returns the times that buckets and gathers have in common, from their records and when the link worked on them."""
    return {
        "launched_ms": median(row.launched_us for row, _ in rows) * _MS,
        "done_ms": median(row.done_us for row, _ in rows) * _MS,
        "wire_ms": median(length_us(wire) for _, wire in rows) * _MS,
        "waited_ms": median(length_us(row.waited) for row, _ in rows) * _MS,
    }


# The report as tables.

_NUM_NAMES = 3  # parameters of a bucket that are named


def _tables(report: StepReport) -> Iterator[RenderableType]:
    if report.num_steps == 0:
        yield "Undertow: no step recorded yet; run a training step, and leave record on."
        return
    yield _step_table(report)
    if report.buckets:
        yield _bucket_table(report)
    if report.gathers:
        yield _gather_table(report)
    notes = {
        "The model is compiled as one graph, for none of its buckets has 1 MiB: its gradients come all at once.\n"
        "Set bucket_cap_mb to 1 or more, or compile its layers one by one.": report.is_one_graph,
        f"Optimizer steps skipped so far, for gradients were not finite: {report.num_skipped}": report.num_skipped > 0,
    }
    yield from (note for note, applies in notes.items() if applies)


def _step_table(report: StepReport) -> Table:
    hidden = "no communication" if report.overlap is None else f"{report.overlap:.0%} hidden"
    rows = [
        ("step", report.step_ms, ""),
        ("forward", report.forward_ms, ""),
        ("backward", report.backward_ms, ""),
        ("communication", report.communication_ms, hidden),
    ]
    if report.gather_overlap is not None:
        num_bytes = sum(gather.num_bytes for gather in report.gathers)
        rows.append(("  of it gathers", report.gather_ms, f"{num_bytes / 1e6:.1f} MB, {report.gather_overlap:.0%} hidden"))
    if report.overlap is not None:
        worst, slowest = report.worst_bucket, report.slowest_rank
        rows += [
            ("  hidden", report.hidden_ms, ""),
            ("  exposed", report.exposed_ms, "" if worst is None else f"longest for bucket {worst.index}"),
            ("    the network", report.wire_ms, ""),
            ("    a late rank", report.late_rank_ms, "" if slowest is None else f"slowest is rank {slowest}"),
            ("synchronized after", report.synchronized_ms, _achieved(report.synchronized_ms, report.limit_ms)),
            ("  limit", report.limit_ms, "for these buckets and ready times"),
        ]
        if report.step_limit_ms > 0:
            rows.append(("limit of the step", report.step_limit_ms, _achieved(report.step_ms, report.step_limit_ms)))
    title = f"Where a step goes: rank {report.rank}, median of {report.num_steps} steps"
    table = Table("", Column("ms", justify="right"), "", title=title, title_justify="left")
    for name, milliseconds, note in rows:
        table.add_row(name, f"{milliseconds:.1f}", note)
    return table


def _achieved(milliseconds: float, limit_ms: float) -> str:
    return f"achieved / limit {milliseconds / limit_ms:.3f}" if limit_ms > 0 else ""


def _bucket_table(report: StepReport) -> Table:
    # Without compression the trailer makes sent bytes exceed the gradients, which is not of interest; a hook's bytes are not
    # known.
    is_compressed = any(0 < bucket.sent_bytes < bucket.num_bytes for bucket in report.buckets)
    table = _times_table(
        f"Buckets{' of gradients' if report.gathers else ''}",
        *("bucket", "MB", *(["sent"] if is_compressed else []), "ready", "launched", "done", "wire", "waited"),
    )
    table.add_column("parameters", overflow="fold")
    for bucket in report.buckets:
        more = len(bucket.params) - _NUM_NAMES
        table.add_row(
            str(bucket.index),
            *_megabytes(bucket.num_bytes, *([bucket.sent_bytes] if is_compressed else [])),
            *_times(bucket.ready_ms, bucket.launched_ms, bucket.done_ms, bucket.wire_ms, bucket.waited_ms),
            cell(", ".join(bucket.params[:_NUM_NAMES]) + (f" and {more} more" if more > 0 else "")),
            style="bold" if bucket is report.worst_bucket else None,
        )
    return table


def _gather_table(report: StepReport) -> Table:
    table = _times_table("Gathers of parameters", "bucket", "MB", "launched", "done", "wire", "waited")
    worst = report.worst_bucket
    for gather in report.gathers:
        table.add_row(
            str(gather.bucket),
            *_megabytes(gather.num_bytes),
            *_times(gather.launched_ms, gather.done_ms, gather.wire_ms, gather.waited_ms),
            style="bold" if worst is not None and gather.bucket == worst.index else None,
        )
    return table


def _times_table(title: str, *names: str) -> Table:
    columns = (Column(name, justify="right") for name in names)
    return Table(*columns, title=f"{title}, ms since the step began", title_justify="left")


def _times(*milliseconds: float) -> Iterator[str]:
    return (f"{it:.1f}" for it in milliseconds)


def _megabytes(*num_bytes: int) -> Iterator[str]:
    return (f"{it / 1e6:.2f}" for it in num_bytes)
