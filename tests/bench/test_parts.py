"""What `make bench` runs before the matrix: its entry, and the ranks that its parts start."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from benchmarks import tuning
from benchmarks.__main__ import main
from benchmarks.ranks import run_ranks

from undertow import DistributedDataParallel

pytestmark = pytest.mark.bench


def test_a_part_is_measured_judged_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "planner", "--quick", "--out", str(tmp_path)]) == 0
    machine, *lines = (json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines())
    assert machine["is_quick"]
    measured = {(line["form"], line["num_params"]) for line in lines if line["type"] == "measurement"}
    assert ("data-parallel", 10_000) in measured
    figures = {line["figure"]: line["target"] for line in lines if line["type"] == "figure"}
    assert figures["planning, data-parallel, 10,000 parameters"] == "< 200 ms"
    for told in (capsys.readouterr().out, (tmp_path / "bench.md").read_text()):
        assert "planning, data-parallel, 10,000 parameters" in told


def _tunes(_rank: int) -> list[float]:
    times: list[float] = []
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    with tuning._timed(times):
        for _ in range(3):
            model(torch.ones(1, 8)).sum().backward()
    return times


def test_what_tuning_does_itself_is_timed_at_both_ends_of_a_round() -> None:
    times = run_ranks(_tunes, 2)
    assert len(times) == 2 * 3
    assert all(seconds > 0 for seconds in times)


def _sum_of_ranks(rank: int, more: int) -> list[int]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, rank + more)
    return found


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("not on this rank")
    dist.barrier()


def _waits(rank: int, folder: Path) -> None:
    (folder / str(rank)).touch()
    time.sleep(600)


def test_ranks_bring_back_what_the_first_one_has_found() -> None:
    assert run_ranks(_sum_of_ranks, 2, 10) == [10, 11]


def test_a_rank_that_raises_ends_the_others() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1:\n(.|\n)*ValueError: not on this rank"):
        run_ranks(_one_raises, 2)
    assert _ranks() == []


def test_ranks_do_not_outlive_an_interruption(tmp_path: Path) -> None:
    is_over = threading.Event()

    def interrupt() -> None:
        while not is_over.wait(0.05):
            if all((tmp_path / str(rank)).exists() for rank in range(2)):
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(_waits, 2, tmp_path)
    finally:
        is_over.set()
        thread.join()
    assert _ranks() == []


def _ranks() -> list[int]:
    processes = [it.info for it in psutil.process_iter(["pid", "ppid", "cmdline"])]
    return [it["pid"] for it in processes if it["ppid"] == os.getpid() and "spawn_main" in " ".join(it["cmdline"] or ())]
