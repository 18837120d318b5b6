"""How many times faster a step is than with one blocking reduction per parameter, for GPTs of several sizes over 1 Gb/s.

All systems take a step each in turn, in the same two processes and over the same shaped link. A step is zero_grad, forward,
backward, whatever is needed until every gradient is the mean over ranks, and SGD.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.figure import Figure, Row, Tell
from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel
from undertow.lab.demo.model import CONTEXT, Gpt

LINK = "1gbit"
SIZES = (
    {"num_layers": 12, "width": 64},
    {"num_layers": 5, "width": 96},
    {"num_layers": 6, "width": 160},
    {"num_layers": 6, "width": 256},
    {"num_layers": 6, "width": 376},
)
PER_PARAMETER, TORCH, OURS = "a reduction per parameter", "torch DDP, default", "Undertow"
_NUM_WARMUP, _NUM_RANKS, _BATCH = 12, 2, 6  # the plan is found in the first steps


def measure(is_quick: bool, tell: Tell) -> list[Row]:
    """Measures; a row for each size and system."""
    rows: list[Row] = []
    for size in SIZES:
        tell(f"{size['num_layers']} layers of width {size['width']}")
        rows += run_ranks(_measure_rank, _NUM_RANKS, size, 3 if is_quick else 8, link=LINK)
    return rows


def judge(rows: Sequence[Row]) -> list[Figure]:
    return [
        Figure(
            name=f"{row['num_params'] / 1e6:.1f} M parameters, {row['tensors']} tensors: times faster",
            measured=row["times_faster"],
            unit="x",
        )
        for row in rows
        if row["system"] == OURS
    ]


def _measure_rank(rank: int, size: dict[str, int], num_steps: int) -> list[Row]:
    torch.manual_seed(0)
    bare = Gpt(**size)
    num_params, num_tensors = sum(param.numel() for param in bare.parameters()), len(list(bare.parameters()))
    group = dist.group.WORLD
    assert group is not None
    by_hand, torchs, ours = (copy.deepcopy(bare) for _ in range(3))
    called = {
        "compute alone": bare,
        PER_PARAMETER: by_hand,
        TORCH: nn.parallel.DistributedDataParallel(torchs, process_group=group),
        OURS: DistributedDataParallel(ours, process_group=group),
    }
    steps = {name: _step_of(model, group if name == PER_PARAMETER else None) for name, model in called.items()}
    times: dict[str, list[float]] = {name: [] for name in called}
    text = torch.Generator().manual_seed(rank)
    for _ in range(_NUM_WARMUP + num_steps):
        batch = torch.randint(256, (_BATCH, CONTEXT + 1), generator=text)
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step(batch)
            times[name].append(time.perf_counter() - began)
    called[OURS].close()  # type: ignore[operator]
    steps_ms = {name: round(median(of_system[_NUM_WARMUP:]) * 1e3, 1) for name, of_system in times.items()}
    return [
        {
            "num_params": num_params,
            "tensors": num_tensors,
            "system": name,
            "step_ms": step_ms,
            "times_faster": round(steps_ms[PER_PARAMETER] / step_ms, 2),
        }
        for name, step_ms in steps_ms.items()
    ]


def _step_of(model: nn.Module, group: dist.ProcessGroup | None) -> Callable[[Tensor], None]:
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> None:
        sgd.zero_grad()
        model(batch).backward()
        if group is not None:
            for param in model.parameters():
                assert param.grad is not None  # every layer has run
                dist.all_reduce(param.grad, group=group)
                param.grad /= group.size()
        sgd.step()

    return step
