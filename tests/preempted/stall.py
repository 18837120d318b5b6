"""What a save in the background costs: the step in which it begins, and the steps while it is written."""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.inside import own_tensors
from support.processes import Rank, run_ranks
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig, save_checkpoint

_WIDTH, _NUM_LAYERS = 2048, 4  # 67 MB of parameters: with AdamW's state 201 MB
_NUM_SAVES, _NUM_STEPS = 5, 6


def rank_measures(folder: Path, rank: Rank) -> dict[str, Any]:
    """Returns the seconds of the copies, of the calls, of whole saves, and of steps without and with a save under way."""
    rank.meet()
    torch.set_num_threads(1)
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), config=SyncConfig(strategy="zero1", auto_tune=False))
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=1e-4)

    def step() -> float:
        start_s = time.perf_counter()
        optimizer.zero_grad()
        model(torch.ones(8, _WIDTH)).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - start_s

    for _ in range(5):
        step()
    found: dict[str, list[float]] = {"copy": [], "call": [], "save": [], "without": [], "with": []}
    for number in range(_NUM_SAVES):
        for _ in range(_NUM_STEPS):
            found["without"].append(step())
            _is_done_everywhere(is_done=False)  # as below: gathers continue meanwhile
        model.wait()
        tensors = [*own_tensors(optimizer), *(model.parameters() if rank.number == 0 else ())]
        start_s = time.perf_counter()
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        found["copy"].append(time.perf_counter() - start_s)
        del copies
        dist.barrier()  # else the rank with less to copy waits for the other one
        start_s = time.perf_counter()
        save = save_checkpoint(folder / f"save-{number % 2}", model, optimizer, background=True)
        found["call"].append(time.perf_counter() - start_s)
        assert save is not None
        while not _is_done_everywhere(save.is_done):
            found["with"].append(step())
        found["save"].append(time.perf_counter() - start_s)
        save.wait()
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    return {"mb": num_bytes / 1e6, **{name: statistics.median(values) for name, values in found.items()}}


def _is_done_everywhere(is_done: bool) -> bool:
    """Ranks see the end at different moments, and must run as many steps."""
    flag = torch.tensor(float(is_done))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def measure() -> str:
    """Runs it with two ranks; returns a table."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(partial(rank_measures, Path(folder)), 2, patience_s=600)
    lines = ["rank  copied MB  copy ms  call ms  call / slowest copy  save ms  step ms  step while writing ms  longer %"]
    failed = [each.log for each in ended if "value" not in each.words]
    if failed:
        return "\n".join(failed)
    slowest = max(each.words["value"]["copy"] for each in ended)
    for rank, each in enumerate(ended):
        of = each.words["value"]
        lines.append(
            f"{rank:4}  {of['mb']:9.1f}  {1e3 * of['copy']:7.1f}  {1e3 * of['call']:7.1f}  {of['call'] / slowest:19.2f}  "
            f"{1e3 * of['save']:7.1f}  {1e3 * of['without']:7.1f}  {1e3 * of['with']:21.1f}  "
            f"{100 * (of['with'] / of['without'] - 1):8.1f}"
        )
    return "\n".join(lines)
