"""One cell of the matrix: a workload on a number of ranks over one link, with all systems side by side.

Systems of one virtual environment share the processes of a run and take turns of some steps, the bare model always with
them; another environment has a separate run.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch

from benchmarks.matrix.catalog import BARE, SYSTEMS, SystemSpec, WorkloadSpec
from benchmarks.matrix.environments import python_of, why_absent
from benchmarks.matrix.errors import RankFailed
from benchmarks.matrix.finished import PLACE, title_of
from benchmarks.matrix.job import Job, SystemJob
from benchmarks.matrix.links import LOCAL, Network, local_network, shaped_network
from benchmarks.matrix.processes import run_job

Tell = Callable[[str], None]
_SILENCE_S = 180.0  # without a step: to import and build, or for one step that sends thousands of messages
_COPIES = 3.0  # of its parameters that a system holds: gradients, and buckets beside them
_SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured."""

    num_turns: int  # of each system; see `turns`
    max_settling: int = 1_000  # steps, of a system that has any
    turn_budget_s: float = 30.0  # for the turns of one system in one run


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    workload: WorkloadSpec
    num_ranks: int
    link: str
    kind: str  # see `kind_of`
    systems: tuple[SystemSpec, ...]
    effort: Effort
    device: str = "cpu"

    @property
    def place(self) -> tuple[str, int, str, str, str]:
        """What tells it from every other one, see `finished.place_of`."""
        return self.workload.label, self.num_ranks, self.link, self.kind, self.device

    @property
    def title(self) -> str:
        return title_of(dict(zip(PLACE, self.place, strict=True)))

    @property
    def uses_nccl(self) -> bool:
        """It finds a way of its own between devices of one machine, which no token bucket shapes."""
        return self.kind == LOCAL and _has_device_each(self.device, self.num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Systems that share processes in one virtual environment."""

    environment: str
    systems: tuple[SystemJob, ...]


@dataclass(slots=True)
class CellResult:
    """Everything that the runs of a cell brought back: by run, what each rank wrote."""

    timed: list[list[dict[str, Any]]]
    errors: dict[str, str]  # by system
    divided: list[str] = field(default_factory=list)  # of runs whose systems were measured one by one, for they failed together


def kind_of(link: str, num_ranks: int, device: str, *, has_namespaces: bool) -> str:
    """Returns "shaped" if `link` can be made between the ranks, or else LOCAL.

    Ranks that talk over NCCL do not find one another across network namespaces.
    """
    is_over_nccl = link == "none" and _has_device_each(device, num_ranks)
    return "shaped" if has_namespaces and not is_over_nccl else LOCAL


def _has_device_each(device: str, num_ranks: int) -> bool:
    """NCCL wants a CUDA device for each rank."""
    return device == "cuda" and torch.cuda.device_count() >= num_ranks


def runs_of(specs: Sequence[SystemSpec], *, max_systems: int) -> list[Run]:
    """Per environment as many as its systems need with `max_systems`, and the bare model in each."""
    (bare,) = SYSTEMS[BARE].jobs()
    by_environment: dict[str, list[SystemJob]] = defaultdict(list)
    for spec in specs:
        by_environment[spec.environment] += [job for job in spec.jobs() if job.name != BARE]
    size = max(1, max_systems - 1)
    return [
        Run(environment=environment, systems=(bare, *jobs[first : first + size]))
        for environment, jobs in by_environment.items()
        for first in range(0, max(1, len(jobs)), size)
    ]


def max_systems(num_bytes: int, num_ranks: int, available_bytes: int) -> int:
    """How many systems with parameters of `num_bytes` may share the processes of a run, by memory."""
    return max(2, int(_SHARE_OF_MEMORY * available_bytes / (_COPIES * num_bytes * num_ranks)))


def why_not_here(spec: SystemSpec, device: str) -> str | None:
    """Why a system cannot be measured on `device` of this machine, however often it is tried; None if it can."""
    if device not in spec.devices:
        return f"set up for {' and '.join(spec.devices)} alone, not for {device}: see Peers in docs/benchmarks.md"
    return why_absent(spec.environment) if python_of(spec.environment) is None else None


def measure_cell(cell: Cell, tell: Tell) -> CellResult:
    """Runs everything; a system that cannot be measured has its error in the result."""
    reasons = {spec.name: why_not_here(spec, cell.device) for spec in cell.systems}
    result = CellResult(timed=[], errors={name: why for name, why in reasons.items() if why is not None})
    specs = [spec for spec in cell.systems if spec.name not in result.errors]
    available = psutil.virtual_memory().available if cell.device == "cpu" else torch.cuda.mem_get_info()[0]
    num_bytes = cell.workload.gradient_bytes(cell.device)
    runs = runs_of(specs, max_systems=max_systems(num_bytes, cell.num_ranks, available))
    with _network(cell) as network:
        for run in runs:
            tell(f"{cell.title}: {_names(run)}")
            _measure_run(cell, run, network, result, tell)
    return result


@contextmanager
def _network(cell: Cell) -> Iterator[Network]:
    if cell.kind == LOCAL:
        yield local_network()
        return
    with shaped_network(cell.link, cell.num_ranks) as network:
        yield network


def _names(run: Run) -> str:
    return ", ".join(job.name for job in run.systems)


def _measure_run(cell: Cell, run: Run, network: Network, result: CellResult, tell: Tell) -> None:
    jobs = [job for job in run.systems if job.name not in result.errors]
    try:
        result.timed.append(_run(cell, run.environment, jobs, network))
        return
    except RankFailed as error:
        if len(jobs) <= 2:
            result.errors[jobs[-1].name] = str(error)
            return
        names = ", ".join(job.name for job in jobs)
        result.divided.append(f"{names}: {error}")
        tell(f"{cell.title}: what shared a run failed, and is measured one by one: {error}")
    # One of them took the others down: each alone with the bare model, so that only that one is lost.
    bare, *others = jobs
    for job in others:
        _measure_run(cell, Run(environment=run.environment, systems=(bare, job)), network, result, tell)


def _run(cell: Cell, environment: str, jobs: Sequence[SystemJob], network: Network) -> list[dict[str, Any]]:
    effort = cell.effort
    python = python_of(environment)
    if python is None:
        raise RankFailed(f"the virtual environment {environment!r} has gone")
    with tempfile.TemporaryDirectory(prefix="undertow-bench-") as folder:
        job = Job(
            num_ranks=cell.num_ranks,
            workload=cell.workload.name,
            scale=cell.workload.scale,
            systems=tuple(replace(job, num_settling=min(job.num_settling, effort.max_settling)) for job in jobs),
            num_turns=effort.num_turns,
            turn_budget_s=effort.turn_budget_s,
            counted_interface=network.interface if network.namespaces else None,
            device=cell.device,
            backend="cpu:gloo,cuda:nccl" if cell.uses_nccl else "gloo",
            folder=folder,
        )
        return run_job(job, network, python=str(python), silence_s=_SILENCE_S)
