"""Marks the events of a step, and converts marks to times only when they are read."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeAlias

from undertow.device import Accelerator
from undertow.ranks.handle import Handle
from undertow.ranks.parcels import Coding
from undertow.ranks.transport import OwnGroup
from undertow.schedule import Op
from undertow.trace import BucketRecord, StepRecord

_NUM_KEPT = {"off": 0, "summary": 64, "full": None}  # steps

# seconds on a host, an event on a device; only the clock that made it can read it
Mark: TypeAlias = Any


@dataclass(slots=True)
class BucketMarks:
    """Marks of one collective."""

    num_bytes: int
    kind: str
    ready: Mark
    launched: Mark = None
    done: Mark = None
    wait_start: Mark = None
    wait_stop: Mark = None
    codings: tuple[Coding, ...] = ()

    def take_codings(self, noted: list[Coding]) -> None:
        """Moves the codings of messages that have arrived here."""
        self.codings += tuple(noted)
        noted.clear()


class HostClock:
    """Host clock: seconds of the monotonic clock."""

    mark = staticmethod(time.perf_counter)
    cpu_s = staticmethod(time.process_time)  # of all threads

    def completes(self, marks: BucketMarks, handle: Handle) -> None:
        """Marks the completion of a collective, now or later."""

        def done(_: object) -> None:
            marks.done = time.perf_counter()

        handle.on_done(done)

    def us_between(self, start: Mark, stop: Mark) -> float:
        return float(stop - start) * 1e6


class StreamClock:
    """Clock of streams: events on the current one; the host does not wait until times are read."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        # waits for collectives instead of the compute stream
        self._done_stream = device.new_stream()

    def mark(self) -> Mark:
        return self._device.record(timed=True)

    def cpu_s(self) -> float:
        return 0.0  # a device needs no processors

    def completes(self, marks: BucketMarks, handle: Handle) -> None:
        with self._device.use(self._done_stream):
            handle.block_stream()
            marks.done = self.mark()

    def us_between(self, start: Mark, stop: Mark) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3


@dataclass(slots=True)
class _StepMarks:
    step: int
    after: Mark = None  # the end of the previous synchronization
    generation: int = 0
    arrivals: dict[int, Mark] = field(default_factory=dict)
    forwards: list[list[Mark]] = field(default_factory=list)
    backwards: list[list[Mark]] = field(default_factory=list)
    buckets: dict[int, BucketMarks] = field(default_factory=dict)
    gathers: dict[int, BucketMarks] = field(default_factory=dict)  # launched before the step
    busy_ms: tuple[float, ...] = ()
    # processor time, first of the process when backward ended, then from there to the end of the
    # waits
    cpu_s: float = 0.0
    is_synchronized: bool = False
    stop: Mark = None

    @property
    def begin(self) -> Mark:
        return (self.forwards or self.backwards)[0][0]


# A context around every op that a model's plans issue, in the thread that issues it. Tests use
# it to count, delay or fail ops; without an observer a step pays nothing.
Observer: TypeAlias = Callable[[Op], AbstractContextManager[object]]


class Recorder:
    """The marks of the last steps. A step begins with the first forward after a synchronization.

    The `observer` outlives plans: each plan is compiled by itself, and all read the observer
    of the model's recorder.
    """

    # Of models whose backward has begun, and no synchronization has ended, by id. A WeakSet would
    # run Python code in every step.
    in_backward: ClassVar[set[int]] = set()

    def __init__(self, group: OwnGroup, *, level: str) -> None:
        self.observer: Observer | None = None
        self.is_on = level != "off"
        weakref.finalize(self, self.in_backward.discard, id(self)).atexit = False
        self._clock: HostClock | StreamClock = HostClock()
        if self.is_on and isinstance(group.hardware, Accelerator) and group.can.order_streams:
            self._clock = StreamClock(group.hardware)
        self.mark: Callable[[], Mark] = self._clock.mark  # returns a mark of this moment
        self._rank = group.rank
        self._steps: deque[_StepMarks] = deque(maxlen=_NUM_KEPT[level])
        self._now = _StepMarks(step=0)
        self._new_gathers: dict[int, BucketMarks] = {}  # of the next step
        self._round_stop: Mark = None
        self._round_stop_s = time.perf_counter()

    def us_between(self, start: Mark, stop: Mark) -> float:
        """Returns the time between two marks. On a device the host waits for the second one."""
        return self._clock.us_between(start, stop)

    def completes(self, marks: BucketMarks, handle: Handle) -> None:
        """Marks the completion of a collective, now or later."""
        if self.is_on:
            self._clock.completes(marks, handle)

    def forward_begins(self) -> None:
        mark = self.mark()
        if self._now.is_synchronized:
            self._step_begins(mark)
        self._now.forwards.append([mark, None])

    def forward_ends(self) -> None:
        forwards = self._now.forwards
        if forwards and forwards[-1][1] is None:
            forwards[-1][1] = self.mark()

    def backward_begins(self, *, generation: int) -> None:
        """Called at the first gradient.

        A backward is measured from the end of its forward, if there is one.
        """
        # a second backward without a forward counts as a separate step
        if self._now.is_synchronized:
            self._step_begins(self.mark())
        self.in_backward.add(id(self))
        now = self._now
        now.generation = generation
        begin = now.forwards[-1][1] if len(now.forwards) > len(now.backwards) else None
        now.backwards.append([self.mark() if begin is None else begin, None])

    def backward_ends(self) -> None:
        self._now.backwards[-1][1] = self.mark()
        self._now.cpu_s = self._clock.cpu_s()

    def gradient_arrives(self, param: int) -> None:
        """Called in some steps only, because it takes time with many parameters."""
        self._now.arrivals[param] = self.mark()

    def forgets_buckets(self) -> None:
        """Discards the buckets launched so far in this step, because they were empty."""
        self._now.buckets.clear()

    def forgets_gathers(self) -> None:
        """Discards recorded gathers, because they belong to another plan than the following
        steps."""
        self._new_gathers = {}

    def ready(self, bucket: int, *, num_bytes: int, kind: str) -> BucketMarks:
        """Marks a full bucket.

        Returns the marks of its reduction, into which the caller writes the later ones.
        """
        marks = self._now.buckets[bucket] = BucketMarks(num_bytes, kind, ready=self.mark())
        return marks

    def gather_launches(self, bucket: int, *, num_bytes: int) -> BucketMarks:
        """Records a gather after an optimizer step.

        It counts for the step whose forward it overlaps. Returns its marks, into which the caller
        writes the later ones.
        """
        mark = self.mark()
        marks = BucketMarks(num_bytes, "all_gather", ready=mark, launched=mark)
        self._new_gathers[bucket] = marks
        return marks

    def busy_ms(self) -> float:
        """Host time since the previous synchronization ended, for the trailer.

        Works without recording.
        """
        return (time.perf_counter() - self._round_stop_s) * 1e3

    def round_ends(self, busy_ms: tuple[float, ...]) -> None:
        self._round_stop_s = time.perf_counter()
        self.in_backward.discard(id(self))
        now = self._now
        if now.forwards or now.backwards:
            now.busy_ms = busy_ms
            now.cpu_s = self._clock.cpu_s() - now.cpu_s
            now.is_synchronized = True
            self._steps.append(now)
            self._round_stop = self.mark()

    def _step_begins(self, mark: Mark) -> None:
        self._now.stop = mark
        step = self._now.step + 1
        self._now = _StepMarks(step, after=self._round_stop, gathers=self._new_gathers)
        self._new_gathers = {}

    def records(
        self, *, generation: int | None = None, at_most: int | None = None
    ) -> tuple[StepRecord, ...]:
        """Returns the last steps that ran under that plan, or under all plans. On a device the host
        waits for it.

        The last step is complete when the next one has begun; until then it is left out, unless
        it is the only one.
        """
        steps = [marks for marks in self._steps if generation in (None, marks.generation)]
        wanted = [marks for marks in steps if marks.stop is not None] or steps
        return tuple(self._record(marks) for marks in wanted[-at_most if at_most else 0 :])

    def changed_at(self, generation: int) -> int | None:
        """Returns the first step that ran under that plan, if other recorded steps ran under
        another one."""
        steps = [marks.step for marks in self._steps if marks.generation == generation]
        return steps[0] if 0 < len(steps) < len(self._steps) else None

    def wall_ns(self, step: int) -> int:
        """Returns the wall clock at which a recorded step began, in nanoseconds since 1970.

        On a device the host waits for it.
        """
        (marks,) = [marks for marks in self._steps if marks.step == step]
        ago_us = self._clock.us_between(marks.begin, self._clock.mark())
        return time.time_ns() - round(ago_us * 1e3)

    def _record(self, marks: _StepMarks) -> StepRecord:
        begin = marks.begin
        end = marks.stop
        if end is None and marks.buckets:  # no other step has begun: its gradients are complete
            end = marks.buckets[max(marks.buckets)].wait_stop
        elif end is None:
            end = (marks.backwards or marks.forwards)[-1][1]

        us = partial(self._clock.us_between, begin)
        buckets = [_bucket_record(bucket, row, us) for bucket, row in sorted(marks.buckets.items())]
        # In launch order; a gather that has not been waited for is still in flight.
        gathers = [
            _bucket_record(bucket, row, us)
            for bucket, row in marks.gathers.items()
            if row.wait_stop is not None
        ]
        return StepRecord(
            step=marks.step,
            rank=self._rank,
            step_us=us(end),
            forwards=_intervals(marks.forwards, us),
            backwards=_intervals(marks.backwards, us),
            buckets=tuple(buckets),
            gathers=tuple(gathers),
            busy_ms=marks.busy_ms,
            cpu_us=marks.cpu_s * 1e6,
            generation=marks.generation,
            idle_us=0.0 if marks.after is None else self._clock.us_between(marks.after, begin),
            arrivals={param: us(mark) for param, mark in marks.arrivals.items()},
        )


def _bucket_record(bucket: int, row: BucketMarks, us: Callable[[Mark], float]) -> BucketRecord:
    return BucketRecord(
        bucket=bucket,
        kind=row.kind,
        num_bytes=row.num_bytes,
        ready_us=us(row.ready),
        launched_us=us(row.launched),
        # the backend's callback may come after the wait has ended
        done_us=us(row.wait_stop if row.done is None else row.done),
        waited=(us(row.wait_start), us(row.wait_stop)),
        codings=tuple((kind, us(start), us(stop)) for kind, start, stop in row.codings),
    )


def _intervals(
    ends: Sequence[Sequence[Mark]], us: Callable[[Mark], float]
) -> tuple[tuple[float, float], ...]:
    return tuple((us(start), us(stop)) for start, stop in ends if stop is not None)
