"""Computes hidden and exposed communication, and lower bounds of its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from undertow.trace.event import COMPUTE, Trace
from undertow.trace.record import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Communication of one step in microseconds."""

    total_us: float  # time in which the link was in use
    exposed_us: float  # time in which the compute lane waited for it

    @property
    def hidden_us(self) -> float:
        return max(0.0, self.total_us - self.exposed_us)

    @property
    def fraction(self) -> float | None:
        """Hidden share of the total, 0 to 1; None if nothing was communicated."""
        return self.hidden_us / self.total_us if self.total_us > 0 else None


def union_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of half-open intervals: overlaps count once."""
    total, covered_until = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, covered_until))
        covered_until = max(covered_until, stop)
    return total


def overlap_of(trace: Trace) -> Overlap:
    """Computes the overlap: `total` is the union of the communication lanes, `exposed` the waits of the compute lane."""
    return Overlap(
        total_us=union_us((event.start_us, event.stop_us) for event in trace.communication),
        exposed_us=sum(event.duration_us for event in trace.on_lane(COMPUTE) if event.kind == "wait"),
    )


def limit_us(ready_us: Sequence[float], wire_us: Sequence[float]) -> float:
    """Returns the earliest end of communication for these buckets, given in launch order; microseconds.

    It is the maximum, over all buckets, of ready time + wire time of this bucket and all later ones.
    """
    remaining, limit = 0.0, 0.0
    for ready, wire in zip(reversed(ready_us), reversed(wire_us), strict=True):
        remaining += wire
        limit = max(limit, ready + remaining)
    return limit


def step_limit_us(record: StepRecord) -> float:
    """Returns a lower bound of the period of steps with these buckets, in microseconds.

    Gathers may run under backward as well as under the next forward. The bound is the maximum of the step's computation, the
    link's total wire time, and over all buckets: ready time + wire time, for reduction and gather, of this bucket and all later
    ones - the time at which the forward reads the last of these. Ready times and reads are counted without waits for parameters.
    Returns 0 if no parameters are gathered.
    """
    if not record.gathers:
        return 0.0
    gather_us = {row.bucket: stop - start for row, (start, stop) in zip(record.gathers, record.gather_intervals(), strict=True)}
    read_us, waited_us = {}, 0.0
    for row in sorted(record.gathers, key=lambda row: row.waited):
        read_us[row.bucket] = max(0.0, row.waited[0] - waited_us)
        waited_us += row.waited[1] - row.waited[0]
    exposed_us = waited_us + sum(row.waited[1] - row.waited[0] for row in record.buckets)
    carried_us, last_read_us, limit = 0.0, 0.0, record.step_us - exposed_us
    for row, (start, stop) in zip(reversed(record.buckets), reversed(record.wire_intervals()), strict=True):
        carried_us += stop - start + gather_us.get(row.bucket, 0.0)
        last_read_us = max(last_read_us, read_us.get(row.bucket, 0.0))
        limit = max(limit, row.ready_us - waited_us + carried_us - last_read_us)
    return max(limit, carried_us)
