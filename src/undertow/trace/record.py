"""The measured times of one step, and the trace built from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from undertow.trace.event import COMPUTE, Event, Trace

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRecord:
    """One bucket in one step; times in microseconds since the step began."""

    bucket: int
    num_bytes: int  # passed to the collective; 0 if a communication hook sent them
    kind: str = "all_reduce"  # kind of the op
    ready_us: float  # its last gradient was ready
    launched_us: float
    done_us: float
    waited: Interval  # interval in which the compute lane waited for this bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one rank, from its first forward to the next one's; times in microseconds since it began."""

    step: int
    rank: int
    step_us: float
    forwards: tuple[Interval, ...]
    backwards: tuple[Interval, ...]  # from the end of the forward until the last bucket was launched
    buckets: tuple[BucketRecord, ...]  # in launch order
    busy_ms: tuple[float, ...]  # by rank: from the end of the previous synchronization until the last bucket was launched
    gathers: tuple[BucketRecord, ...] = ()  # of parameters, since the optimizer's step: they begin before this step
    idle_us: float = 0.0  # between the end of the previous synchronization, at which all ranks meet, and the start of this step
    arrivals: Mapping[int, float] = field(default_factory=dict)  # of gradients, by parameter; only in some steps

    def wire_intervals(self) -> tuple[Interval, ...]:
        """Returns when the link worked on each bucket: one starts after the other, so that queueing is not counted."""
        return _wire_intervals(self.buckets)

    def gather_intervals(self) -> tuple[Interval, ...]:
        """Returns when the link worked on each gather, in the same way; below 0 while the optimizer's step was running."""
        return _wire_intervals(self.gathers)

    def trace(self) -> Trace:
        """Returns the step as events; the optimizer runs from the end of the waits to the end of the step."""
        events = [_compute("forward", interval) for interval in self.forwards]
        events += [_compute("backward", interval) for interval in self.backwards]
        sent = (*self.gathers, *self.buckets)
        events += [_compute("wait", bucket.waited, bucket.bucket) for bucket in sent]
        synchronized_us = max((event.stop_us for event in events), default=0.0)
        if self.step_us > synchronized_us:
            events.append(_compute("optimizer", (synchronized_us, self.step_us)))
        events += [
            Event(
                lane="comm.dp",
                kind=bucket.kind,
                bucket=bucket.bucket,
                start_us=start,
                stop_us=stop,
                num_bytes=bucket.num_bytes,
            )
            for bucket, (start, stop) in zip(sent, (*self.gather_intervals(), *self.wire_intervals()), strict=True)
        ]
        return Trace(rank=self.rank, step=self.step, events=tuple(events))


def _wire_intervals(buckets: Sequence[BucketRecord]) -> tuple[Interval, ...]:
    intervals, free_us = [], float("-inf")
    for bucket in buckets:
        start = min(max(bucket.launched_us, free_us), bucket.done_us)
        intervals.append((start, bucket.done_us))
        free_us = max(free_us, bucket.done_us)
    return tuple(intervals)


def _compute(kind: str, interval: Interval, bucket: int | None = None) -> Event:
    return Event(lane=COMPUTE, kind=kind, start_us=interval[0], stop_us=interval[1], bucket=bucket)
