"""python -m benchmarks.many_ranks: processor time of a step on many ranks of this machine, compared with torch DDP's.

All threads of a process count: over gloo other threads send, receive, encode and add. With --collectives, shards also travel by
gloo's own reduce-scatter and all-gather, instead of direct messages. With --coding it measures only how long a rank of so many
encodes, adds up and decodes a bucket in int8, in one process and without messages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel, SyncConfig, shard_optimizer
from undertow.plan.layout import equal_parts, round_up
from undertow.ranks.dither import Rounding, Turn
from undertow.ranks.group import BACKENDS, Abilities
from undertow.ranks.parcels import ALIGN_BYTES, Encoded
from undertow.wire import WIRES

WIDTH, NUM_LAYERS, CAP_MB = 256, 6, 1.0  # 0.4 M parameters in two buckets
NUM_ROUNDS, NUM_STEPS, NUM_FIRST_STEPS = 7, 8, 8
BUCKET_NUMEL, NUM_CODINGS = 25 * 2**20 // 4, 15
TORCH = "torch DDP"
SYSTEMS = (TORCH, "plain", "zero1", "int8")
COLLECTIVES = "zero1, collectives"


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
        if name in ("zero1", COLLECTIVES):
            self.optimizer = shard_optimizer(self.optimizer, self.model)

    def step(self) -> None:
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_ms(self) -> tuple[float, float]:
        """Returns the processor time of a step, of all threads, and its whole time."""
        dist.barrier()
        self.step()
        start_s, began_s = time.process_time(), time.perf_counter()
        for _ in range(NUM_STEPS):
            self.step()
        return (time.process_time() - start_s) / NUM_STEPS * 1e3, (time.perf_counter() - began_s) / NUM_STEPS * 1e3


def measure(_rank: int, systems: Sequence[str]) -> dict[str, list[float]]:
    """Returns the milliseconds of each system, processor time and whole time, means over ranks; systems take turns."""
    contenders: dict[str, Contender] = {}
    for name in systems:
        # What gloo can do is asked when a model is made, and at its first steps.
        as_others = mock.patch.dict(BACKENDS, gloo=Abilities(average=True)) if name == COLLECTIVES else nullcontext()
        with as_others:
            contenders[name] = Contender(name)
            for _ in range(NUM_FIRST_STEPS):
                contenders[name].step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for _ in range(NUM_ROUNDS):
        for name, contender in contenders.items():
            times[name].append(contender.step_ms())
    medians = torch.tensor([list(map(median, zip(*times[name], strict=True))) for name in systems])
    dist.all_reduce(medians, dist.ReduceOp.SUM)
    return dict(zip(systems, (medians / dist.get_world_size()).tolist(), strict=True))


def coding_ms(num_ranks: int) -> float:
    """Returns the milliseconds in which a rank encodes a bucket, adds up its part of all ranks, and decodes all means."""

    @cache  # memory for messages is kept from step to step
    def room(numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    wire, numel = WIRES["int8"], BUCKET_NUMEL
    parts = equal_parts(num_ranks, round_up(-(-numel // num_ranks), wire.block), stop=numel)
    parcel = Encoded(wire, torch.float32, numel, parts)
    parcel = parcel.dithered(Turn(1), Rounding.OWN, rank=0, device=torch.device("cpu"))
    values, mean = torch.randn(numel), torch.empty(len(parts[0]))
    messages = parcel.messages(values, room)
    size = messages[0].numel()
    arrived = torch.zeros(num_ranks, round_up(size, ALIGN_BYTES), dtype=torch.uint8)[:, :size]
    received = list(arrived.copy_(messages[0].expand_as(arrived)).unbind())
    times_ms = []
    for _ in range(NUM_CODINGS):
        start_s = time.process_time()
        messages = parcel.messages(values, room)
        parcel.add_up(received, 0, into=mean)
        parcel.write(mean.div_(num_ranks), 0, messages[0])
        parcel.open(messages, values)
        times_ms.append((time.process_time() - start_s) * 1e3)
    return median(times_ms)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_ranks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=16, help="processes of this machine, 150 MB each (default: 16)")
    parser.add_argument("--collectives", action="store_true", help="also measure shards by gloo's own collectives")
    parser.add_argument("--coding", type=int, nargs="+", metavar="RANKS", help="the coding of a bucket, of so many ranks")
    given = parser.parse_args()
    if given.coding:
        torch.set_num_threads(1)
        for num_ranks in given.coding:
            Console().print(f"{num_ranks} ranks: {coding_ms(num_ranks):.1f} ms for a bucket of 25 MiB in int8")
        return
    systems = (*SYSTEMS, COLLECTIVES) if given.collectives else SYSTEMS
    found: dict[str, list[float]] = run_ranks(measure, given.ranks, systems)
    table = Table(title=f"processor time of a step, mean of {given.ranks} ranks")
    for heading in ("system", "ms", f"over {TORCH}", "whole step, ms"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    of_torch, _ = found[TORCH]
    for name, (ms, whole_ms) in found.items():
        table.add_row(name, f"{ms:.2f}", f"{ms / of_torch:.2f}", f"{whole_ms:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
