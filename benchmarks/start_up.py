"""Start-up: importing, `undertow run`, wrapping, and the first step, beside torch; for information only.

The middle model is wrapped in fresh processes. Models of 1,000 parameters are wrapped by both in turn in one process, a fresh
model each time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.figure import Figure, Row, Tell, row_where
from benchmarks.middle import batch_of, middle_model
from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel

_TORCH, _OURS = "torch DDP, default", "Undertow"
SYSTEMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    _TORCH: lambda model: nn.parallel.DistributedDataParallel(model),
    _OURS: lambda model: DistributedDataParallel(model),
}
MANY = {
    "1,000 tensors": lambda: nn.ParameterList([nn.Parameter(torch.randn(64)) for _ in range(1000)]),
    "500 layers": lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(500)]),
}
_IMPORTS = {
    _TORCH: "import torch.distributed; from torch.nn.parallel import DistributedDataParallel",
    _OURS: "from undertow import DistributedDataParallel",
}
_PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
"""
_RUNNERS = {_TORCH: (), _OURS: (sys.executable, "-m", "undertow", "run")}
_TIME_IMPORT = "import time; start = time.perf_counter(); {}; print((time.perf_counter() - start) * 1e3)"


def measure_rank(rank: int, name: str) -> Row:
    """Milliseconds for wrapping, the first and the fifth step of the middle model."""
    model, x = middle_model(), batch_of(rank)
    dist.barrier()
    start = time.perf_counter()
    wrapped = SYSTEMS[name](model)
    times = {"wrap_ms": (time.perf_counter() - start) * 1e3}
    for step in range(1, 6):
        dist.barrier()
        start = time.perf_counter()
        wrapped.zero_grad()
        wrapped(x).sum().backward()
        times[f"step_{step}_ms"] = (time.perf_counter() - start) * 1e3
    return times


def measure_many(_rank: int, model: str, num_times: int) -> dict[str, Row]:
    """By system, milliseconds for wrapping a fresh model the first time in the process, and the median of the others."""
    found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(1 + num_times):
        for name, system in SYSTEMS.items():
            module = MANY[model]()
            dist.barrier()
            start = time.perf_counter()
            wrapped = system(module)
            found[name].append((time.perf_counter() - start) * 1e3)
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.close()
    return {
        name: {f"{model}, first_ms": round(first, 1), f"{model}, wrap_ms": round(median(rest), 1)}
        for name, (first, *rest) in found.items()
    }


def measure(is_quick: bool, tell: Tell) -> list[Row]:
    """A row per system: medians over repetitions."""
    num_repetitions = 2 if is_quick else 7
    found: dict[str, list[Row]] = {name: [] for name in SYSTEMS}
    for repetition in range(num_repetitions):
        for name in SYSTEMS:
            tell(f"{name}, repetition {repetition + 1} of {num_repetitions}")
            processes = {"import_ms": _import_ms(_IMPORTS[name]), "program_ms": _program_ms(*_RUNNERS[name])}
            found[name].append({**processes, **run_ranks(measure_rank, 2, name)})
    many = [run_ranks(measure_many, 2, model, 4 if is_quick else 20) for model in MANY]
    return [
        {"system": name, **{key: round(median(row[key] for row in rows), 1) for key in rows[0]}, **many[0][name], **many[1][name]}
        for name, rows in found.items()
    ]


def judge(rows: Sequence[Row]) -> list[Figure]:
    ours, torchs = row_where(rows, system=_OURS), row_where(rows, system=_TORCH)
    return [
        Figure(
            name=f"{what} (torch DDP: {torchs[key]:.0f} ms)",
            measured=ours[key],
            unit="ms",
            num_decimals=0,
        )
        for what, key in (
            ("import, with torch", "import_ms"),
            ("a program that only wraps a layer, by `undertow run`", "program_ms"),
            ("wrap", "wrap_ms"),
            ("first step", "step_1_ms"),
            *((f"wrap {model}", f"{model}, wrap_ms") for model in MANY),
        )
    ]


def _program_ms(*runner: str) -> float:
    start = time.perf_counter()
    subprocess.run([*runner, sys.executable, "-c", _PROGRAM], capture_output=True, check=True)
    return (time.perf_counter() - start) * 1e3


def _import_ms(statement: str) -> float:
    done = subprocess.run([sys.executable, "-c", _TIME_IMPORT.format(statement)], capture_output=True, check=True, text=True)
    return float(done.stdout)
