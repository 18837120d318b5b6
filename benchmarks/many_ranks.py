"""python -m benchmarks.many_ranks: processor time of a step on many ranks of this machine, compared with torch DDP's.

All threads of a process count: over gloo other threads send, receive, encode and add.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel, SyncConfig, shard_optimizer

WIDTH, NUM_LAYERS, CAP_MB = 256, 6, 1.0  # 0.4 M parameters in two buckets
NUM_ROUNDS, NUM_STEPS, NUM_FIRST_STEPS = 7, 8, 8
TORCH = "torch DDP"
SYSTEMS = (TORCH, "plain", "zero1", "int8")


class Contender:
    """A model, its optimizer, and how they are synchronized."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model = nn.Sequential(*layers)
        if name == TORCH:
            self.model: nn.Module = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
        else:
            wire = "int8" if name == "int8" else None
            self.model = DistributedDataParallel(model, config=SyncConfig(auto_tune=False, bucket_cap_mb=CAP_MB, wire=wire))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        if name == "zero1":
            self.optimizer = shard_optimizer(self.optimizer, self.model)

    def step(self) -> None:
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_ms(self) -> float:
        """Processor time of a step, of all threads."""
        dist.barrier()
        self.step()
        start_s = time.process_time()
        for _ in range(NUM_STEPS):
            self.step()
        return (time.process_time() - start_s) / NUM_STEPS * 1e3


def measure(_rank: int) -> dict[str, float]:
    """Returns the milliseconds of each system, a mean over ranks; systems take turns."""
    contenders = {name: Contender(name) for name in SYSTEMS}
    for contender in contenders.values():
        for _ in range(NUM_FIRST_STEPS):
            contender.step()
    times: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(NUM_ROUNDS):
        for name, contender in contenders.items():
            times[name].append(contender.step_ms())
    medians = torch.tensor([median(times[name]) for name in SYSTEMS])
    dist.all_reduce(medians, dist.ReduceOp.SUM)
    return dict(zip(SYSTEMS, (medians / dist.get_world_size()).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_ranks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=16, help="processes of this machine, 150 MB each (default: 16)")
    num_ranks = parser.parse_args().ranks
    found: dict[str, float] = run_ranks(measure, num_ranks)
    table = Table(title=f"processor time of a step, mean of {num_ranks} ranks")
    for heading in ("system", "ms", f"over {TORCH}"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for name, ms in found.items():
        table.add_row(name, f"{ms:.2f}", f"{ms / found[TORCH]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
