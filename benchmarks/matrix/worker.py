"""One rank of a run: python -m benchmarks.matrix.worker JOB RANK. Runs in any virtual environment that has torch.

Imports Undertow only if it is one of the systems. What it measured goes to the job's folder.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.matrix import truth, turns
from benchmarks.matrix.clock import clock_of
from benchmarks.matrix.job import Job, SystemJob, job_from_file
from benchmarks.matrix.systems import Setting, System
from benchmarks.matrix.workloads import make_workload

_PR_SET_PDEATHSIG = 1
_AGREE = timedelta(seconds=60)  # for the slowest rank to build a system after the first has


def main(job_path: str, rank: int) -> None:
    """Runs the job as `rank` and writes the result."""
    job = job_from_file(Path(job_path))
    die_with(job.runner_pid)
    torch.set_num_threads(1)
    with _process_group(job, rank) as group:
        result = _run(job, rank, group, _device_of(job, rank))
    whole = job.result_path(rank)
    partial = whole.with_suffix(".part")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(whole)


def die_with(runner_pid: int) -> None:
    """A runner that is killed leaves no ranks behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != runner_pid:  # killed before we had asked for it
            sys.exit("the runner is gone")


def _device_of(job: Job, rank: int) -> torch.device:
    """A CUDA device of its own, or one that ranks share."""
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def _process_group(job: Job, rank: int) -> Iterator[dist.ProcessGroup]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.num_ranks)}
    store = dist.FileStore(f"{job.folder}/meeting-point", job.num_ranks)
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.num_ranks)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    # Barrier, drop every holder, destroy: else gloo may abort at exit.
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def _run(job: Job, rank: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    workload = make_workload(job.workload, job.scale, device)
    batch, beat = workload.make_batch(rank), job.alive_path(rank).touch
    reference = truth.reference_of(workload.make_model, batch, group, beat=beat)
    result: dict[str, Any] = {"systems": {}, "num_params": sum(param.numel() for param in reference.right.values())}
    players = []
    for system in job.systems:
        seat = _Seat(system, workload.make_model(), batch, group, beat=beat)
        result["systems"][system.name] = seat.report
        _agree(job, system.name, rank, seat.report)
        if "error" not in seat.report and system.is_averaged:
            seat.compare(reference, rounding=system.rounding)
            _agree(job, f"{system.name}, compared", rank, seat.report)
        if seat.player is None or "error" in seat.report:
            continue
        seat.settle(system.num_settling, batch, beat=beat)
        players.append(seat.player)
    del reference
    gc.collect()
    gc.freeze()  # what the systems are made of is not looked through again while they are timed
    if players:
        count_sent = turns.sent_bytes_of(job.counted_interface) if job.counted_interface else None
        table = turns.Table(batch=batch, count_sent=count_sent, group=group, clock=clock_of(device), beat=beat)
        turns.play(players, table, num_turns=job.num_turns, turn_budget_s=job.turn_budget_s)
        for player in players:
            result["systems"][player.name] |= player.to_dict()
    for player in players:
        player.system.close()
    gc.unfreeze()
    return result


def _agree(job: Job, system: str, rank: int, report: dict[str, Any]) -> None:
    """A system with an error on one rank is out on all. Raises, with ours, if a rank stays away: it waits inside the system."""
    # Told how many ranks there are, the store deletes its file when as many have dropped it as had opened it, even if the first
    # of them has just opened it for the next system: what it has said is lost, and both wait for one another.
    store = dist.FileStore(f"{job.folder}/seats")
    keys = [f"{system}/{other}" for other in range(job.num_ranks)]
    store.set(keys[rank], report.get("error", ""))
    try:
        store.wait(keys, _AGREE)
    except RuntimeError:
        # The last line of our log is what the row has room for.
        raise RuntimeError(f"{system}: {report.get('error', 'another rank stays away')}") from None
    for other, key in enumerate(keys):
        error = store.get(key).decode()
        if error and "error" not in report:
            report["error"] = f"on rank {other}: {error}"


class _Seat:
    """A system that is built and has made its first steps, or the reason why not."""

    def __init__(self, job: SystemJob, model: Any, batch: Any, group: dist.ProcessGroup, *, beat: Callable[[], object]) -> None:
        self.report: dict[str, Any] = {}
        self.player: turns.Player | None = None
        try:
            self.player = self._first_step(job, model, batch, group)
            self._later_steps(self.player.system, batch, beat)
        except Exception as error:
            traceback.print_exc()
            self.report["error"] = f"{type(error).__name__}: {error}".splitlines()[0]

    def _first_step(self, job: SystemJob, model: Any, batch: Any, group: dist.ProcessGroup) -> turns.Player:
        module = importlib.import_module(job.module)
        system = module.build(Setting(model=model, group=group, options=job.options))
        system.backward(batch)
        system.update()
        system.finish()
        return turns.Player(name=job.name, system=system)

    def compare(self, reference: truth.Reference, *, rounding: float) -> None:
        """A system that trains wrongly has no figures."""
        if self.player is not None and (wrong := reference.wrong_parameters(self.player.system, rounding=rounding)):
            self.report["error"] = f"trains wrongly: {', '.join(wrong[:3])} and {len(wrong)} in all are not the reference's"

    def settle(self, num_steps: int, batch: Any, *, beat: Callable[[], object]) -> None:
        """Steps in which a system finds out how it should be run; not before its first steps have shown to train rightly."""
        if self.player is not None and num_steps:
            self._steps(self.player.system, num_steps, batch, beat)

    def _later_steps(self, system: System, batch: Any, beat: Callable[[], object]) -> None:
        """One after the other, as training does: what a step leaves in flight lies under the next one's forward."""
        self._steps(system, truth.NUM_STEPS - 1, batch, beat)

    def _steps(self, system: System, num_steps: int, batch: Any, beat: Callable[[], object]) -> None:
        for _ in range(num_steps):
            beat()
            system.backward(batch)
            system.update()
        system.finish()
        beat()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
