"""The ranks of `make bench`: one that raises ends the others."""

import os

import psutil
import pytest
import torch.distributed as dist
from benchmarks.ranks import run_ranks

pytestmark = pytest.mark.bench


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("not on this rank")
    dist.barrier()


def test_a_rank_that_raises_ends_the_others() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1:\n(.|\n)*ValueError: not on this rank"):
        run_ranks(_one_raises, 2)
    assert _ranks() == []


def _ranks() -> list[int]:
    processes = [it.info for it in psutil.process_iter(["pid", "ppid", "cmdline"])]
    return [it["pid"] for it in processes if it["ppid"] == os.getpid() and "spawn_main" in " ".join(it["cmdline"] or ())]
