"""Which rank of a run is blamed, and what it says."""

import copy
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from benchmarks.matrix import processes, worker
from benchmarks.matrix.errors import RankFailed
from benchmarks.matrix.job import Job
from benchmarks.matrix.processes import _wait


# A process that says this whenever it is asked how it ended, and the last of it from then on.
class Rank:
    def __init__(self, *codes: int | None) -> None:
        self.codes = list(codes)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        return self.returncode


@pytest.fixture
def job(tmp_path: Path) -> Job:
    given: dict[str, Any] = {"workload": "replay", "scale": 1.0, "gradient_bytes": 1, "systems": (), "turn_budget_s": 1.0}
    given |= {"num_turns": 1, "counted_interface": None, "emulated": None, "burst_bytes": 0, "device": "cpu", "backend": "gloo"}
    made = Job(**given, num_ranks=2, folder=str(tmp_path))
    for rank in range(2):
        made.log_path(rank).write_text(f"the last line of rank {rank}\n")
    return made


def test_what_ranks_have_agreed_on_stays(job: Job) -> None:
    # Or a rank that is early for the next system might have spoken into a file that the last one to leave then deletes.
    for system in ("ours", "torch-ddp"):
        with ThreadPoolExecutor() as pool:
            reports: list[dict[str, Any]] = [{}, {"error": "trains wrongly"}]
            list(pool.map(partial(worker._agree, job, system), range(2), reports))
        assert reports == [{"error": "on rank 1: trains wrongly"}, {"error": "trains wrongly"}]
        assert dist.FileStore(f"{job.folder}/seats").check([f"{system}/0", f"{system}/1"])


def wait(job: Job, *ranks: Rank) -> None:
    _wait(job, [cast("subprocess.Popen[bytes]", rank) for rank in ranks], silence_s=60.0)


# How two ranks end, those that have results, and what the error says; None for none.
ENDS: dict[str, tuple[tuple[Rank, Rank], tuple[int, ...], str | None]] = {
    "one because the first was gone": (
        (Rank(None, None, 1), Rank(None, None, None, None, -6)),
        (),
        "rank 0 ended with exit code 1. The end of rank 0's log:\nthe last line of rank 0",
    ),
    "at once: the one that was killed is blamed": ((Rank(1), Rank(-9)), (), "rank 1 was killed by SIGKILL"),
    "at once: the one that aborts is not blamed": ((Rank(-6), Rank(1)), (), "rank 1 ended with exit code 1"),
    "one fails after all others have ended": ((Rank(None, None, None, 3), Rank(0)), (1,), "rank 0 ended with exit code 3"),
    "as if all were well, without a result": ((Rank(None), Rank(None, 0)), (), "rank 1 ended with exit code 0"),
    "one aborts behind its results": ((Rank(None, None, -6), Rank(0)), (0, 1), None),
}


@pytest.mark.parametrize(("ranks", "with_results", "text"), ENDS.values(), ids=ENDS)
def test_the_rank_that_is_blamed(ranks: tuple[Rank, Rank], with_results: tuple[int, ...], text: str | None, job: Job) -> None:
    for rank in with_results:
        job.result_path(rank).touch()
    with nullcontext() if text is None else pytest.raises(RankFailed, match=rf"^{re.escape(text)}"):
        wait(job, *copy.deepcopy(ranks))


def test_last_words_have_no_path_of_this_machine(job: Job) -> None:
    job.log_path(0).write_text(f'  File "{processes.ROOT}/benchmarks/matrix/worker.py", line 1\nRuntimeError: gone\n')
    with pytest.raises(RankFailed, match=r'log:\n  File "benchmarks/matrix/worker\.py", line 1\nRuntimeError: gone$'):
        wait(job, Rank(1), Rank(0))


@pytest.mark.parametrize(
    ("report", "told"),
    [({"error": "ValueError: not on this rank"}, "ours: ValueError: not on this rank"), ({}, "ours: another rank stays away")],
)
def test_a_rank_whose_others_wait_inside_a_system_says_its_own_error_last(
    report: dict[str, Any], told: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_AGREE", timedelta(seconds=0.01))
    with pytest.raises(RuntimeError) as caught:
        worker._agree(job, "ours", 1, report)
    assert str(caught.value) == told
    assert caught.value.__suppress_context__
