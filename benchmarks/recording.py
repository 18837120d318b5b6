"""What recording costs: CPU time of the training thread per step, `record="summary"` beside `record="off"`.

Three wrapped copies of one model take a step each in turn, in the same two processes: recording, not recording, and
not recording again. The third is the control: what it differs from the second by is the error of the method. The order of
the three changes from step to step, which copy is made first from repetition to repetition, because where a
model lies in memory is worth more than a percent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.figure import Figure, Relation, Row, Target, Tell, row_where
from benchmarks.middle import batch_of, middle_model
from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel, SyncConfig

NUM_WARMUP = 5
_RECORDING, _OFF, _CONTROL = "record=summary", "record=off", "record=off, again"
LEVELS = {_RECORDING: "summary", _OFF: "off", _CONTROL: "off"}


def measure_rank(rank: int, repetition: int, num_steps: int) -> Row:
    """CPU times in milliseconds, by copy, step by step."""
    names = _turned(list(LEVELS), repetition)
    copies = {name: DistributedDataParallel(middle_model(), config=SyncConfig(record=LEVELS[name])) for name in names}
    x = batch_of(rank)
    times: dict[str, list[float]] = {name: [] for name in names}
    for step in range(NUM_WARMUP + num_steps):
        for name in _turned(names, step):
            times[name].append(_step_ms(copies[name], x))
    num_buckets = len(copies[_OFF].plan.buckets)
    return {"num_buckets": num_buckets, **{name: listed[NUM_WARMUP:] for name, listed in times.items()}}


def _step_ms(model: nn.Module, x: Tensor) -> float:
    """CPU time of this thread for zero_grad, forward and backward, in milliseconds."""
    dist.barrier()
    start = time.thread_time()
    model.zero_grad()
    model(x).sum().backward()
    return (time.thread_time() - start) * 1e3


def _turned(names: Sequence[str], by: int) -> list[str]:
    return [*names[by % len(names) :], *names[: by % len(names)]]


def measure(is_quick: bool, tell: Tell) -> list[Row]:
    """A row per copy: its median, and how far above `record=off` it lies, as the median of the differences in a step."""
    num_repetitions, num_steps = (3, 15) if is_quick else (6, 60)
    found: list[Row] = []
    for repetition in range(num_repetitions):
        tell(f"repetition {repetition + 1} of {num_repetitions}, {num_steps} steps of {len(LEVELS)} copies")
        found.append(run_ranks(measure_rank, 2, repetition, num_steps))
    off_ms = median(time_ms for row in found for time_ms in row[_OFF])
    return [_row(found, name, off_ms) for name in LEVELS]


def _row(found: Sequence[Row], name: str, off_ms: float) -> Row:
    # Median by repetition first: where the copies lie in memory differs between repetitions, not within one.
    above = [median(mine - off for mine, off in zip(row[name], row[_OFF], strict=True)) for row in found]
    return {
        "copy": name,
        "buckets": found[0]["num_buckets"],
        "cpu_ms": round(median(time_ms for row in found for time_ms in row[name]), 2),
        "above_off_ms": round(median(above), 3),
        "above_off_percent": round(100 * median(above) / off_ms, 3),
        "min_percent": round(100 * min(above) / off_ms, 2),
        "max_percent": round(100 * max(above) / off_ms, 2),
    }


def judge(rows: Sequence[Row]) -> list[Figure]:
    recording, control = row_where(rows, copy=_RECORDING), row_where(rows, copy=_CONTROL)
    return [
        Figure(
            name="CPU time of the step that recording adds",
            measured=recording["above_off_percent"],
            unit="%",
            target=Target(relation=Relation.BELOW, bound=1.0),
        ),
        Figure(name="the same of a copy that does not record (control)", measured=control["above_off_percent"], unit="%"),
    ]
