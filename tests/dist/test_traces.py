"""Traces of real runs: what they say beside the report, and the variable that asks for them."""

import contextlib
import gzip
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.emulated import run_over_link
from support.errors import text_of
from support.inside import EmulatedLink
from support.naive import wrapped
from support.processes import Rank, run_ranks, script
from support.ranks import in_ranks
from undertow import PhaseError, ShardedOptimizer, attach
from undertow.lab.traces import merge

SLEEP_S = 0.01


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * SLEEP_S)
        return gradient


class Layer(nn.Module):
    """It takes its time without a processor, which other tests may need."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(200, 200)

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(self.linear(x))


def _traced(folder: str, _link: EmulatedLink) -> float:
    """Returns the overlap that the report tells."""
    torch.manual_seed(0)
    config: Any = {"bucket_cap_mb": 0.15, "strategy": "zero1"}
    with wrapped(nn.Sequential(*(Layer() for _ in range(4))), **config) as ddp:
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.01)
        for _ in range(24):
            optimizer.zero_grad()
            ddp(torch.ones(2, 200)).sum().backward()
            optimizer.step()
        path = ddp.save_trace(f"{folder}/trace.json.gz", steps=17)
        report = ddp.report()
    assert path.exists()
    return report.overlap or 0.0


@pytest.mark.slow
def test_the_steps_of_all_ranks_are_side_by_side_in_a_merged_trace(tmp_path: Path) -> None:
    found = run_over_link(partial(_traced, str(tmp_path)), "100mbit")
    for reported in found:
        assert 0.1 < reported < 0.95  # neither everything nor nothing
    assert merge(tmp_path, tmp_path / "all.json.gz") == "2 traces of 2 ranks"
    merged = json.loads(gzip.decompress((tmp_path / "all.json.gz").read_bytes()))
    pids = {it["args"]["name"]: it["pid"] for it in merged["traceEvents"] if it["name"] == "process_name"}
    ends = [
        {
            it["name"]: it["ts"] + it["dur"]
            for it in merged["traceEvents"]
            if it["ph"] == "X" and it["pid"] == pids[f"rank {rank}"] and it["name"].startswith("step ")
        }
        for rank in range(2)
    ]
    assert ends[0].keys() == ends[1].keys()
    # Steps begin together. The scheduler may hold a rank up in any of them, but not in most.
    assert statistics.median(abs(ends[0][step] - ends[1][step]) for step in ends[0]) < 2e4  # microseconds


@in_ranks(2)
def test_ops_have_ranges_under_torchs_profiler_and_under_emit_nvtx() -> None:
    with wrapped(nn.Linear(2, 2)) as ddp:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            ddp(torch.ones(1, 2)).sum().backward()
        assert {"undertow.pack b0", "undertow.all_reduce b0"} <= {event.name for event in profiler.events()}
        named: list[str] = []

        def ranged(name: str) -> contextlib.AbstractContextManager[None]:
            named.append(name)
            return contextlib.nullcontext()

        with contextlib.ExitStack() as patches:
            for name in ("autograd.profiler._enable_profiler", "autograd.profiler._disable_profiler", "cuda.synchronize"):
                patches.enter_context(mock.patch(f"torch.{name}"))  # there may be no device
            patches.enter_context(mock.patch("torch.profiler.record_function", ranged))
            patches.enter_context(torch.autograd.profiler.emit_nvtx())
            ddp(torch.ones(1, 2)).sum().backward()
        assert "undertow.all_reduce b0" in named


@in_ranks(2)
def test_a_trace_asks_for_a_step_and_a_number() -> None:
    with wrapped(nn.Linear(2, 2)) as ddp:
        assert text_of(PhaseError, lambda: ddp.save_trace("trace.json")) == (
            f"no step is recorded.\n  save_trace, rank {dist.get_rank()}\n  Run a training step before, and leave record on."
        )


@in_ranks(2)
def test_a_short_run_has_a_trace(tmp_path: Path) -> None:
    sync = attach(model := nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    path = sync.save_trace(tmp_path / "trace.json")
    sync.close()
    assert path.name == f"trace.rank{dist.get_rank()}.json"
    assert json.loads(path.read_text())["undertow_trace"]["rank"] == dist.get_rank()


# How the script's model ends: left to the end of the process, closed, or dropped; or in processes of multiprocessing.
ENDINGS = {"left": "", "closed": "model.close()", "dropped": "del model, optimizer"}
SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from undertow import DistributedDataParallel as DDP
rank.meet()
for size in (2, 3):
    model = DDP(nn.Linear(size, size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, size)).sum().backward()
        optimizer.step()
    {ending}
dist.destroy_process_group()
"""


def _runs(source: str, folder: Path, rank: Rank) -> None:
    os.chdir(folder)
    os.environ["UNDERTOW_TRACE"] = "traces"
    script(source, rank)


@pytest.mark.deep
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_variable_alone_brings_the_trace_of_every_rank(ending: str, tmp_path: Path) -> None:
    for ended in run_ranks(partial(_runs, SCRIPT.format(ending=ENDINGS[ending]), tmp_path), 2, is_script=True):
        assert ended.exit_code == 0, ended.log
    found = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert found == [f"trace.rank{rank}{model}.json.gz" for rank in (0, 1) for model in ("-2", "")]
    assert merge(tmp_path / "traces", tmp_path / "all.json.gz") == "4 traces of 2 ranks"
