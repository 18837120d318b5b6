"""Recorded steps as a trace in Chrome's JSON format, for Perfetto and Holistic Trace Analysis (HTA).

Each rank is a process of the picture, and the steps that the simulator predicts for it are another. Threads of a process:

    steps            one event per step, named as torch's profiler names it
    compute          forward, backward, the rest, and waits between them; a mark where a bucket is ready
    communication    collectives from launch to completion; as many threads as are in flight at a time

No two events of a thread overlap: Perfetto would nest or drop one of them. Times are whole nanoseconds until they are written, so
rounding makes no overlaps either. No time is negative: Perfetto drops such events.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from undertow.plan import Plan
from undertow.plan.layout import ITEMSIZES
from undertow.trace.record import BucketRecord, StepRecord

Json = dict[str, Any]
Block = tuple[int, int, str, int]  # start and end in nanoseconds, name, and step

KEY, FLOWS = "undertow_trace", 10**9  # the field that only our files have; the most flows of a process
_STEPS, _COMPUTE, _COMMUNICATION = 1, 2, 10  # threads; Perfetto takes thread 0 for an idle processor
_CORRELATED = 2**20  # HTA stores correlations, and later indices of events, in the smallest integers that hold the former
# Names of dtypes as torch's profiler writes them.
_DTYPES = {"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16"}


def message(num_bytes: int, kind: str, index: int, plan: Plan, wire_dtype: str | None) -> tuple[int, str]:
    """Returns elements and dtype of a collective of a bucket; no elements if a communication hook sent them."""
    bucket = plan.buckets[min(index, len(plan.buckets) - 1)]  # steps of an earlier plan may have had more
    dtype = (bucket.own_dtype or bucket.dtype) if kind == "all_gather" else (wire_dtype or bucket.dtype)
    return num_bytes // ITEMSIZES[dtype], dtype


def sequence_number(step: int, bucket: int, kind: str) -> int:
    """Returns the number of a collective: the same on all ranks, and larger in later steps."""
    return step * 100_000 + 2 * bucket + (kind != "all_gather")


def trace_text(
    records: Sequence[StepRecord], about: Json, plan: Plan, predicted: StepRecord | None, *, wire_dtype: str | None = None
) -> str:
    """Returns the trace of consecutive steps, at least one, as JSON.

    Args:
        records: The steps of one rank.
        about: Facts of the run for the file: "run", "model" (a number), "rank" (in the world), "ranks", "backend", "began_ns",
            "prediction".
        plan: The plan of the last step.
        predicted: The step that the simulator expects; drawn beside the last step.
        wire_dtype: The dtype that gradients are sent in, if it differs from theirs.
    """
    lead_ns = 0  # gathers begin before their step
    for record in (records[0], predicted or records[0]):
        for row in record.gathers:
            lead_ns = max(lead_ns, -_ns(min(row.ready_us, row.launched_us, row.waited[0])))
    starts = accumulate((_ns(record.step_us) for record in records), initial=lead_ns)
    steps = list(zip(starts, records, strict=False))
    beside: list[tuple[int, StepRecord]] = []
    if predicted is not None:
        beside.append((steps[-1][0], predicted))
    # All ranks leave a synchronization together: these times align the clocks of different hosts.
    ends_us = {it.step: at / 1e3 + max(row.waited[1] for row in it.buckets) for at, it in steps if it.buckets}
    head = {
        "schemaVersion": 1,
        "distributedInfo": {"rank": about["rank"], "world_size": len(about["ranks"]), "backend": about["backend"]},
        KEY: {**about, "format": 1, "synchronized_us": ends_us, "began_ns": about["began_ns"] - lead_ns},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": about["began_ns"] - lead_ns,
    }
    measured, expected = (_Process(about, plan, wire_dtype, is_measured) for is_measured in (True, False))
    return file_text(head, [*measured.events(steps), *expected.events(beside)])


def file_text(head: Json, events: Iterable[Json]) -> str:
    """Returns JSON with one event per line. HTA looks for the rank line by line, and takes the first one."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items())
    return f'{{\n{lines},\n"traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n"


@dataclass(frozen=True, slots=True)
class _Process:
    """A process of the picture. HTA counts events with a `stream`, which predictions do not have."""

    about: Json
    plan: Plan
    wire_dtype: str | None
    is_measured: bool

    def events(self, steps: Sequence[tuple[int, StepRecord]]) -> Iterator[Json]:
        if not steps:
            return
        name = "predicted step"
        sent: list[tuple[int, BucketRecord]] = []  # with the step
        for at, record in steps:
            if self.is_measured:
                name = f"ProfilerStep#{record.step}"
            block = (at, at + _ns(record.step_us), name, record.step)
            correlation = _CORRELATED + record.step
            yield self._span(_STEPS, block, is_kernel=False, plan=record.generation, correlation=correlation)
            for row in (*record.gathers, *record.buckets):
                sent.append((record.step, _placed(row, at)))
        sent.sort(key=lambda pair: pair[1].waited)
        waits = _waits(sent)
        for block in _computed(steps, waits):
            is_kernel = self.is_measured and not block[2].startswith("wait")
            yield self._span(_COMPUTE, block, is_kernel=is_kernel)
        names = {_STEPS: "steps", _COMPUTE: "compute"}  # of threads
        free_ns: dict[int, float] = {}  # by thread: the end of its last collective
        launched = sorted(zip(sent, waits, strict=True), key=lambda pair: pair[0][1].launched_us)
        for number, ((step, row), wait) in enumerate(launched):
            thread = _COMMUNICATION
            while free_ns.get(thread, row.launched_us) > row.launched_us:
                thread += 1
            free_ns[thread] = row.done_us
            names[thread] = f"communication {thread - _COMMUNICATION + 1}"
            yield from self._collective(number, step, row, thread, wait)
        yield self._about(_STEPS, "process_name", name=self._name)
        yield self._about(_STEPS, "process_sort_index", sort_index=self._pid)
        for thread, name in names.items():
            yield self._about(thread, "thread_name", name=name)

    @property
    def _name(self) -> str:
        name = f"rank {self.about['rank']}"
        if self.about["model"]:
            name += f", model {self.about['model'] + 1}"
        return name if self.is_measured else f"{name}, predicted"

    def _about(self, thread: int, kind: str, **args: Any) -> Json:
        return self._event("M", thread, 0, kind, args=args)

    def _collective(self, number: int, step: int, row: BucketRecord, thread: int, wait: Block) -> tuple[Json, ...]:
        numel, dtype = message(row.num_bytes, row.kind, row.bucket, self.plan, self.wire_dtype)
        args = {
            "Collective name": row.kind,
            "In msg nelems": numel,
            "Group size": len(self.about["ranks"]),
            "dtype": _DTYPES.get(dtype, dtype),
            "Process Group Name": "undertow",
            "Rank": self.about["rank"],
        }
        name = f"{row.kind} b{row.bucket}"
        if self.is_measured:
            args["Seq"] = sequence_number(step, row.bucket, row.kind)
            name = f"ncclKernel_{name}"
        flow: Json = {"cat": "bucket", "id": self._pid * FLOWS + number}
        end_ns = min(max(row.done_us, wait[0]), wait[1] - 1)
        return (
            self._span(thread, (int(row.launched_us), int(row.done_us), name, step), is_kernel=self.is_measured, **args),
            self._event("i", _COMPUTE, row.ready_us, f"ready b{row.bucket}", s="t"),
            self._event("s", _COMPUTE, row.ready_us, "bucket", **flow),
            self._event("t", thread, row.launched_us, "bucket", **flow),
            self._event("f", _COMPUTE, end_ns, "bucket", bp="e", **flow),
        )

    @property
    def _pid(self) -> int:
        return 2 * int(self.about["rank"]) + (1 if self.is_measured else 2)

    def _event(self, phase: str, thread: int, at_ns: float, name: str, **more: Any) -> Json:
        return {"ph": phase, "pid": self._pid, "tid": thread, "ts": us_of(at_ns), "name": name, **more}

    def _span(self, thread: int, block: Block, *, is_kernel: bool, **args: Any) -> Json:
        # HTA takes a kernel's step from the event without a stream that has the same correlation.
        args |= {"correlation": _CORRELATED + block[3], "stream": thread} if is_kernel else {}
        cat, dur_us = "kernel" if is_kernel else "user_annotation", us_of(block[1] - block[0])
        return self._event("X", thread, block[0], block[2], dur=dur_us, cat=cat, args=args)


def _waits(sent: Iterable[tuple[int, BucketRecord]]) -> list[Block]:
    """Returns the wait for each collective, of some length, because a flow has to end in each."""
    waits: list[Block] = []
    free_ns = -(2**62)
    for step, row in sent:
        begin = max(int(row.waited[0]), free_ns)
        free_ns = max(int(row.waited[1]), begin + 1)
        waits.append((begin, free_ns, f"wait b{row.bucket}", step))
    return waits


def _placed(row: BucketRecord, start_ns: int) -> BucketRecord:
    """Returns the row with whole nanoseconds since the trace began in its fields, and with no collective that takes no time."""
    launched = start_ns + _ns(row.launched_us)
    return replace(
        row,
        ready_us=min(start_ns + _ns(row.ready_us), launched),
        launched_us=launched,
        done_us=max(start_ns + _ns(row.done_us), launched + 1),
        waited=(start_ns + _ns(row.waited[0]), start_ns + _ns(row.waited[1])),
    )


def _computed(steps: Iterable[tuple[int, StepRecord]], waits: Iterable[Block]) -> Iterator[Block]:
    """Yields the blocks of the compute thread, without gaps within a step: waits, else phases, else the rest of the step."""
    blocks = [(2, wait) for wait in waits]
    free_ns = -(2**62)
    for at, record in steps:
        first = at
        for row in record.gathers:
            first = min(first, at + _ns(min(row.ready_us, row.launched_us, row.waited[0])))
        end = at + _ns(record.step_us)
        blocks.append((0, (max(first, free_ns), end, "optimizer and rest", record.step)))
        free_ns = end
        for name, spans in (("forward", record.forwards), ("backward", record.backwards)):
            for start_us, stop_us in spans:
                block = (at + _ns(start_us), at + _ns(stop_us), name, record.step)
                blocks.append((1, block))
    layers: list[Block | None] = [None, None, None]
    top, since_ns = None, 0
    real = [(layer, block) for layer, block in blocks if block[0] < block[1]]
    changes = [(time, time == block[0], layer, block) for layer, block in real for time in block[:2]]
    for at_ns, begins, layer, block in sorted(changes):
        layers[layer] = block if begins else None
        above = layers[2] or layers[1] or layers[0]
        if above is not top:
            if top is not None and since_ns < at_ns:
                yield since_ns, at_ns, top[2], top[3]
            top, since_ns = above, at_ns


def us_of(time_ns: float) -> float:
    """Returns microseconds that give the same nanoseconds to readers that round and to those that cut off, as Perfetto did."""
    time_us = time_ns / 1e3
    return time_us if int(time_us * 1e3) == time_ns else math.nextafter(time_us, math.inf)


def _ns(time_us: float) -> int:
    return round(time_us * 1e3)
