"""Host overhead: CPU time of the training thread for 3,000 parameters of 64 elements, above that of the bare model.

Every system runs in processes of its own beside the same bare model, step by step in turn, because two models in one
process disturb each other's caches; systems alternate over several repetitions, because the machine's speed drifts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel, SyncConfig

NUM_PARAMS, NUMEL = 3000, 64
NUM_STEPS, NUM_WARMUP = 60, 10

TorchDDP = nn.parallel.DistributedDataParallel
SYSTEMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch DDP, default": lambda model: TorchDDP(model),
    "torch DDP, batched_grad_copy": lambda model: TorchDDP(model, batched_grad_copy=True),
    "Undertow": lambda model: DistributedDataParallel(model),
    "Undertow, record off": lambda model: DistributedDataParallel(model, config=SyncConfig(record="off")),
}


class ManySmall(nn.Module):
    """A sum over thousands of small parameters: nearly nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(torch.randn(NUMEL) for _ in range(NUM_PARAMS))

    def forward(self) -> torch.Tensor:
        total = torch.zeros(NUMEL)
        for param in self.many:
            total = total + param
        return total.sum()


def step_ms(model: nn.Module) -> float:
    """CPU time of this thread for zero_grad, forward and backward, in milliseconds.

    All three, because a system chooses where old gradients are freed.
    """
    dist.barrier()
    start = time.thread_time()
    model.zero_grad()
    model().backward()
    return (time.thread_time() - start) * 1e3


def measure(_rank: int, name: str) -> tuple[float, float]:
    """Median CPU time of the bare model and of the system, in milliseconds per step."""
    bare, wrapped = ManySmall(), SYSTEMS[name](ManySmall())
    times = [(step_ms(bare), step_ms(wrapped)) for _ in range(NUM_STEPS)][NUM_WARMUP:]
    return median(row[0] for row in times), median(row[1] for row in times)


def run(*, num_repetitions: int) -> list[dict[str, Any]]:
    """A row per system: milliseconds above the bare model, median and spread over the repetitions."""
    above: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(num_repetitions):
        for name in SYSTEMS:
            bare_ms, wrapped_ms = run_ranks(measure, 2, name)
            above[name].append(wrapped_ms - bare_ms)
    reference = median(above["torch DDP, default"])
    return [
        {
            "benchmark": "host overhead",
            "system": name,
            "above_bare_ms": round(median(times), 2),
            "min_ms": round(min(times), 2),
            "max_ms": round(max(times), 2),
            "ratio_to_torch": round(median(times) / reference, 3),
        }
        for name, times in above.items()
    ]
