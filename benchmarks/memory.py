"""python -m benchmarks.memory: resident memory that training takes on a rank, in bytes for each parameter.

Parameters, gradients, the state of AdamW, buckets and messages: all that the process has since before the model was made. Each
system has processes of its own, whose allocator returns what is free (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel, Outer, ShardedOptimizer, SyncConfig

WIDTH, NUM_LAYERS, NUM_STEPS = 1024, 40, 8  # 42 M parameters in fp32, 168 MB
NUM_COUNTED = 4  # steps at the end


def _alone(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters())


def _torch(model: nn.Module, *, is_view: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=is_view)
    return wrapped, torch.optim.AdamW(wrapped.parameters())


def _undertow(model: nn.Module, **settings: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model, config=SyncConfig(**settings))
    if "strategy" in settings:
        return wrapped, ShardedOptimizer(torch.optim.AdamW, wrapped)
    return wrapped, torch.optim.AdamW(wrapped.parameters())


SYSTEMS: dict[str, Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "compute alone": _alone,
    "torch DDP, defaults": _torch,
    "torch DDP, gradient_as_bucket_view": partial(_torch, is_view=True),
    "Undertow": _undertow,
    'Undertow, wire="int8"': partial(_undertow, wire="int8"),
    "Undertow, Outer(every=2)": partial(_undertow, outer=Outer(every=2)),
    "Undertow, zero1": partial(_undertow, strategy="zero1"),
    "Undertow, zero1, gradients and parameters in int8": partial(_undertow, strategy="zero1", wire="int8", param_wire="int8"),
    "Undertow, zero2": partial(_undertow, strategy="zero2"),
}


def measure(_rank: int, name: str) -> tuple[float, float]:
    """Returns the bytes for each parameter on rank 0, between two steps and at the peak of a step."""
    before = _memory_bytes("VmRSS")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    num_params = sum(param.numel() for param in model.parameters())
    wrapped, optimizer = SYSTEMS[name](model)
    inputs = torch.randn(8, WIDTH)
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - NUM_COUNTED:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that of now
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    now, peak = ((_memory_bytes(kind) - before) / num_params for kind in ("VmRSS", "VmHWM"))
    return now, peak


def _memory_bytes(kind: str) -> int:
    """Returns the resident memory of this process: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{kind}:"))
    return int(kib) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # of the ranks
    table = Table("setting", "between steps", "at the peak", title=f"bytes for each parameter, {asked.ranks} ranks")
    for name in SYSTEMS:
        now, peak = run_ranks(measure, asked.ranks, name)
        table.add_row(name, f"{now:.1f}", f"{peak:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
