"""examples/elastic_train.py under torchrun, and what it has trained on.

Run as a script it is the example, whose ranks do not hear torchrun end them: it may do so before they can say which rank they
miss. elastic.py RANK NUMBER OPTION... has a rank killed when it brings a file to the disk for that time, in the first attempt.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.project import ROOT

EXAMPLE = ROOT / "examples" / "elastic_train.py"
DEAF_EXAMPLE = Path(__file__)
_PATIENCE_S = 240


@dataclass(frozen=True)
class Step:
    """What one attempt has done for one step, over its ranks."""

    number: int
    attempt: int
    num_ranks: int
    samples: tuple[int, ...]  # in the order of the global batch


def run(
    folder: Path, *options: str, num_ranks: int, max_restarts: int = 0, script: Path = EXAMPLE
) -> subprocess.CompletedProcess:
    """Runs it in `folder`, where its checkpoint is; it logs to `folder/<num_ranks>`."""
    how = launch(folder, *options, num_ranks=num_ranks, max_restarts=max_restarts, script=script)
    return subprocess.run(**how, check=False, capture_output=True, timeout=_PATIENCE_S)


def launch(folder: Path, *options: str, num_ranks: int, max_restarts: int = 0, script: Path = EXAMPLE) -> dict[str, Any]:
    """The same, as what a process is started with."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*torchrun, f"--max-restarts={max_restarts}", str(script), *options, "--sample-log", str(num_ranks)]
    paths = os.pathsep.join(str(path) for path in (ROOT / "src", ROOT / "tests"))
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": paths,
    }
    return {"args": command, "env": environment, "cwd": folder, "text": True}


def steps_of(folder: Path) -> list[Step]:
    """What the ranks of one call of torchrun have logged, step by step and attempt by attempt."""
    lines = [json.loads(line) for path in sorted(folder.glob("rank*.jsonl")) for line in path.read_text().splitlines()]
    found = []
    for attempt, number in sorted({(line["attempt"], line["step"]) for line in lines}):
        shares = {line["rank"]: line["samples"] for line in lines if (line["attempt"], line["step"]) == (attempt, number)}
        num_ranks = lines[0]["num_ranks"]
        if shares.keys() == set(range(num_ranks)):  # the last step of an attempt may have begun on some ranks only
            turns = itertools.zip_longest(*(shares[rank] for rank in range(num_ranks)))
            samples = tuple(sample for turn in turns for sample in turn if sample is not None)
            found.append(Step(number, attempt, num_ranks, samples))
    return found


def order_of(num_epochs: int) -> list[int]:
    return runpy.run_path(str(EXAMPLE))["sample_order"](num_epochs)


def trained_alone(*, num_epochs: int, batch: int) -> dict[str, Any]:
    """The parameters that a plain loop in one process comes to."""
    inputs = torch.randn(480, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    order = order_of(num_epochs)
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(batches))
    for samples in batches:
        optimizer.zero_grad()
        x = inputs[samples]
        (model(x) - x[:, :4].sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model.state_dict()


def _has_killed_in_checkpoint(rank: str, number: str) -> None:
    calls, fsync = itertools.count(1), os.fsync

    def killed(descriptor: int) -> None:
        if next(calls) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (rank, "0"):
        os.fsync = killed


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        _has_killed_in_checkpoint(sys.argv.pop(1), sys.argv.pop(1))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
