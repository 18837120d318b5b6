"""The measured times of one step, its events, how much of its communication is hidden, and lower
bounds.

Reasons: docs/design/records.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

COMPUTE = "compute"
CODING = "coding"
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A half-open interval on a lane; times in microseconds since the step began.

    Gathers may have started before that.
    """

    # "compute", "comm." and the name of a mesh axis, or "coding" for work on messages in a format
    lane: str
    # an op's kind, or "forward", "backward", "wait", "optimizer"; "encode", "decode"
    kind: str
    start_us: float
    stop_us: float
    bucket: int | None = None
    num_bytes: int = 0  # payload of a collective; 0 if a communication hook sent it

    @property
    def duration_us(self) -> float:
        return self.stop_us - self.start_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The events of one step of one rank."""

    rank: int
    step: int
    events: tuple[Event, ...]

    def on_lane(self, lane: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.lane == lane)

    def to_dict(self) -> dict[str, Any]:
        """Returns the trace as plain values, ready for JSON."""
        return asdict(self)

    @property
    def duration_us(self) -> float:
        """Microseconds from the first event of the compute lane to the end of the last one."""
        events = self.on_lane(COMPUTE)
        return (
            max(event.stop_us for event in events) - min(event.start_us for event in events)
            if events
            else 0.0
        )

    @property
    def communication(self) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.lane not in (COMPUTE, CODING))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRecord:
    """One bucket in one step; times in microseconds since the step began."""

    bucket: int
    # passed to its collectives, as they are sent; 0 if a communication hook sent them
    num_bytes: int
    kind: str = "all_reduce"  # kind of the op
    ready_us: float  # its last gradient was ready
    launched_us: float
    done_us: float
    waited: Interval  # interval of the compute lane's wait for this bucket
    # with a format, on the host: "encode" or "decode", its start and its stop
    codings: tuple[tuple[str, float, float], ...] = ()

    def shifted(self, by_us: float) -> "BucketRecord":
        """Returns the record with all times later by `by_us`."""
        return replace(
            self,
            ready_us=self.ready_us + by_us,
            launched_us=self.launched_us + by_us,
            done_us=self.done_us + by_us,
            waited=(self.waited[0] + by_us, self.waited[1] + by_us),
            codings=tuple(
                (kind, start_us + by_us, stop_us + by_us)
                for kind, start_us, stop_us in self.codings
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one rank, from its first forward to the next one's.

    Times in microseconds since it began.
    """

    step: int
    rank: int
    step_us: float
    forwards: tuple[Interval, ...]
    # from the end of the forward until the last bucket was launched
    backwards: tuple[Interval, ...]
    buckets: tuple[BucketRecord, ...]  # in launch order
    # by rank: from the end of the previous synchronization until the last bucket was launched
    busy_ms: tuple[float, ...]
    # of parameters, since the optimizer's step: they begin before this step
    gathers: tuple[BucketRecord, ...] = ()
    # between the end of the previous synchronization, at which all ranks meet, and the start of
    # this step
    idle_us: float = 0.0
    # of gradients, by parameter; only in some steps
    arrivals: Mapping[int, float] = field(default_factory=dict)
    # processor time of all threads from the end of the last backward to the end of the waits
    cpu_us: float = 0.0
    generation: int = 0  # of the plan, which counts from 0

    def codings(self) -> list[Event]:
        """Returns when values were encoded and decoded."""
        return [
            Event(lane=CODING, kind=kind, start_us=start_us, stop_us=stop_us, bucket=row.bucket)
            for row in (*self.gathers, *self.buckets)
            for kind, start_us, stop_us in row.codings
        ]

    def packings(self) -> list[tuple[BucketRecord, float]]:
        """Returns the buckets, each with the time at which its packing began.

        Its last gradient, or the launch before.
        """
        found, before_us = [], float("-inf")
        for row in self.buckets:
            found.append((row, max(row.ready_us, before_us)))
            before_us = row.launched_us
        return found

    def packing_us(self) -> float:
        """Returns the time that packing took from backward."""
        end_us = self.backwards[-1][1] if self.backwards else 0.0
        return sum(
            max(0.0, min(row.launched_us, end_us) - begin_us) for row, begin_us in self.packings()
        )

    def overlap(self) -> "Overlap":
        """Returns the communication of the step, and the part that the step waited for."""
        return overlap_of(self.trace())

    def late_rank_us(self) -> float:
        """Returns the part of the exposed time that this rank waited for a slower one."""
        if not self.busy_ms:
            return 0.0
        behind_us = 1e3 * (max(self.busy_ms) - self.busy_ms[self.rank])
        return min(self.overlap().exposed_us, behind_us)

    def trace(self) -> Trace:
        """Returns the step as events.

        The optimizer runs from the end of the waits to the end of the step.
        """
        events = [_computed("forward", interval) for interval in self.forwards]
        events += [_computed("backward", interval) for interval in self.backwards]
        events += [
            _computed("wait", row.waited, row.bucket) for row in (*self.gathers, *self.buckets)
        ]
        synchronized_us = max((event.stop_us for event in events), default=0.0)
        if self.step_us > synchronized_us:
            events.append(_computed("optimizer", (synchronized_us, self.step_us)))
        for rows in (self.gathers, self.buckets):
            for row, ((start_us, stop_us), _) in zip(rows, wires_of(rows), strict=True):
                sent = Event(
                    lane="comm.dp",
                    kind=row.kind,
                    bucket=row.bucket,
                    start_us=start_us,
                    stop_us=stop_us,
                    num_bytes=row.num_bytes,
                )
                events.append(sent)
        events += self.codings()
        return Trace(rank=self.rank, step=self.step, events=tuple(events))


def _computed(kind: str, interval: Interval, bucket: int | None = None) -> Event:
    return Event(lane=COMPUTE, kind=kind, start_us=interval[0], stop_us=interval[1], bucket=bucket)


def wires_of(rows: Sequence[BucketRecord]) -> list[tuple[Interval, float]]:
    """Returns when the link worked on each row, given in launch order, and for how long it worked
    on this one alone.

    The link works on the row in flight that ends first. So queueing is not
    counted, a row that overtakes another lies within the other's interval, and the times add up to
    the time that the link was in use.
    """
    wires: dict[int, tuple[Interval, float]] = {}  # by place in `rows`
    # when rows that ended earlier were in flight: apart and in order
    flights: list[Interval] = []
    # Of rows that end together, the last one has overtaken the others.
    for at in sorted(range(len(rows)), key=lambda at: (rows[at].done_us, -rows[at].launched_us)):
        row = rows[at]
        flight_us = start_us = min(row.launched_us, row.done_us)
        within_us = 0.0
        while flights and flights[-1][0] > start_us:
            within_us += length_us(flights.pop())
        if flights and flights[-1][1] > start_us:
            flight_us, start_us = flights.pop()
        flights.append((flight_us, row.done_us))
        wire = (start_us, row.done_us)
        wires[at] = wire, max(0.0, length_us(wire) - within_us)
    return [wires[at] for at in range(len(rows))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Communication of one step in microseconds."""

    total_us: float  # time that the link was in use
    exposed_us: float  # time that the compute lane waited for it

    @property
    def fraction(self) -> float | None:
        """Hidden share of the total, 0 to 1; None if nothing was communicated."""
        return max(0.0, 1 - self.exposed_us / self.total_us) if self.total_us > 0 else None


def length_us(interval: Interval) -> float:
    """Returns the length of an interval."""
    return interval[1] - interval[0]


def union_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of half-open intervals: overlaps count once."""
    total_us, covered_until_us = 0.0, float("-inf")
    for start_us, stop_us in sorted(intervals):
        if stop_us > covered_until_us:
            total_us += stop_us - max(start_us, covered_until_us)
            covered_until_us = stop_us
    return total_us


def overlap_of(trace: Trace) -> Overlap:
    """Computes the overlap.

    `total` is the union of the communication lanes, `exposed` the waits of the compute lane.
    """
    return Overlap(
        total_us=union_us((event.start_us, event.stop_us) for event in trace.communication),
        exposed_us=sum(
            event.duration_us for event in trace.on_lane(COMPUTE) if event.kind == "wait"
        ),
    )


def limit_us(ready_us: Sequence[float], wire_us: Sequence[float]) -> float:
    """Returns the earliest end of communication for these buckets, given in launch order;
    microseconds.

    It is the maximum, over all buckets, of ready time + wire time of this bucket and all later
    ones.
    """
    limit_us, remaining_us = 0.0, 0.0
    for ready, wire in zip(reversed(ready_us), reversed(wire_us), strict=True):
        remaining_us += wire
        limit_us = max(limit_us, ready + remaining_us)
    return limit_us
