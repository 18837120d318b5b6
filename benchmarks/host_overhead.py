"""Host overhead: CPU time of the training thread for 3,000 parameters of 64 elements, above that of the bare model.

Every system runs in separate processes, step by step in turn with the same bare model, because two models in one
process disturb each other's caches; systems alternate over several repetitions, because the machine's speed drifts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.part import Part, Row, Run, Table
from benchmarks.ranks import run_ranks
from benchmarks.shaped.workloads.small import ManySmall, batch_of
from undertow import DistributedDataParallel, SyncConfig

NAME = "host-overhead"
NUM_STEPS, NUM_WARMUP = 60, 10

TorchDDP = nn.parallel.DistributedDataParallel
TORCH = "torch DDP, default"
SYSTEMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    TORCH: lambda model: TorchDDP(model),
    "torch DDP, batched_grad_copy": lambda model: TorchDDP(model, batched_grad_copy=True),
    "Undertow": lambda model: DistributedDataParallel(model),
    "Undertow, record off": lambda model: DistributedDataParallel(model, config=SyncConfig(record="off")),
}


def step_ms(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> float:
    """Returns the CPU time of this thread for zero_grad, forward and backward, in milliseconds.

    All three, because a system chooses where old gradients are freed.
    """
    dist.barrier()
    start = time.thread_time()
    model.zero_grad()
    model(*batch).backward()
    return (time.thread_time() - start) * 1e3


def measure_rank(rank: int, name: str) -> tuple[float, float]:
    """Returns the median CPU time of the bare model and of the system, in milliseconds per step."""
    bare, wrapped, batch = ManySmall(), SYSTEMS[name](ManySmall()), batch_of(rank)
    times = [(step_ms(bare, batch), step_ms(wrapped, batch)) for _ in range(NUM_STEPS)][NUM_WARMUP:]
    return median(row[0] for row in times), median(row[1] for row in times)


def measure(how: Run) -> list[Row]:
    """Returns a row for each system: milliseconds above the bare model, median and spread over the repetitions."""
    num_repetitions = 1 if how.is_quick else 5
    how.tell(f"{len(SYSTEMS)} systems, {num_repetitions} repetitions")
    above: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(num_repetitions):
        for name in SYSTEMS:
            bare_ms, wrapped_ms = run_ranks(measure_rank, 2, name)
            above[name].append(wrapped_ms - bare_ms)
    return [
        {
            "system": name,
            "above_bare_ms": round(median(times), 2),
            "min_ms": round(min(times), 2),
            "max_ms": round(max(times), 2),
        }
        for name, times in above.items()
    ]


def table(rows: Sequence[Row]) -> Table:
    """Returns a line for each system."""
    above_ms = {row["system"]: row["above_bare_ms"] for row in rows}
    lines = [["system", "above the bare model, ms", "range", "over torch DDP's"]]
    for row in rows:
        ms = row["above_bare_ms"]
        spread = f"{row['min_ms']:.1f} to {row['max_ms']:.1f}"
        lines.append([row["system"], f"{ms:.1f}", spread, f"{ms / above_ms[TORCH]:.2f}"])
    return lines


PART = Part(
    name=NAME,
    title="Host overhead: 3,000 parameters of 64 elements, CPU time per step above the bare model",
    measure=measure,
    table=table,
)
