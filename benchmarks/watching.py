"""What watching over the other ranks costs where nothing happens: CPU time of the threads that wait for bad news.

Their own clocks are read before and after some hundred steps, beside that of the whole process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from benchmarks.figure import Figure, Relation, Row, Target, Tell
from benchmarks.middle import batch_of, middle_model
from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel

_WATCHING = "undertow-guard"  # name of the thread
NUM_WARMUP = 5


def measure_rank(rank: int, num_steps: int) -> Row:
    """CPU times in milliseconds of the steps, and of the threads in them."""
    model = DistributedDataParallel(middle_model())
    x = batch_of(rank)
    for _ in range(NUM_WARMUP):
        model(x).sum().backward()
    dist.barrier()
    watching = [thread for thread in threading.enumerate() if thread.name.startswith(_WATCHING)]
    began_s, before_s, watched_s = time.perf_counter(), time.process_time(), _cpu_s(watching)
    for _ in range(num_steps):
        model.zero_grad()
        model(x).sum().backward()
    row = {
        "threads": len(watching),
        "steps": num_steps,
        "wall_ms": round((time.perf_counter() - began_s) * 1e3),
        "process_cpu_ms": round((time.process_time() - before_s) * 1e3),
        "watching_cpu_ms": round((_cpu_s(watching) - watched_s) * 1e3, 3),
    }
    model.close()
    return row


def _cpu_s(threads: Sequence[threading.Thread]) -> float:
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads if thread.ident is not None)


def measure(is_quick: bool, tell: Tell) -> list[Row]:
    """One row: rank 0 of two."""
    num_steps = 100 if is_quick else 400
    tell(f"{num_steps} steps on 2 ranks")
    return [run_ranks(measure_rank, 2, num_steps)]


def judge(rows: Sequence[Row]) -> list[Figure]:
    (row,) = rows
    return [
        Figure(
            name="CPU time of the process that watching takes",
            measured=100 * row["watching_cpu_ms"] / row["process_cpu_ms"],
            unit="%",
            target=Target(relation=Relation.BELOW, bound=0.5),
        ),
        Figure(name="threads that watch", measured=row["threads"], unit=""),
    ]
