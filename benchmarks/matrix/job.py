"""What a rank is told to do, as a JSON file; what it brings back is JSON as well (see `turns`)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemJob:
    """One system of a run, as the catalog describes it."""

    name: str
    module: str  # with build(setting)
    options: dict[str, Any] = field(default_factory=dict)
    num_settling: int = 0
    is_averaged: bool = True
    rounding: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The same for every rank of a run."""

    num_ranks: int
    workload: str
    scale: float
    systems: tuple[SystemJob, ...]
    num_turns: int
    turn_budget_s: float  # a slow system has fewer turns, at least MIN_TURNS
    counted_interface: str | None  # whose bytes are counted; None where ranks share it
    device: str  # "cpu" or "cuda"
    backend: str  # of torch.distributed
    folder: str  # store, results and logs
    runner_pid: int = field(default_factory=os.getpid)

    def write(self) -> Path:
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    def result_path(self, rank: int) -> Path:
        return Path(self.folder) / f"rank-{rank}.json"

    def alive_path(self, rank: int) -> Path:
        """Touched whenever the rank has come further."""
        return Path(self.folder) / f"rank-{rank}.alive"

    def log_path(self, rank: int) -> Path:
        return Path(self.folder) / f"rank-{rank}.log"


def job_from_file(path: Path) -> Job:
    """Inverse of `Job.write`."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    return Job(**{**fields, "systems": tuple(SystemJob(**system) for system in fields["systems"])})
