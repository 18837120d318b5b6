"""The limit of open files."""

import os
import time
from typing import Any

import pytest
from torch import nn

from support.processes import Ended, Rank, run_ranks
from undertow import DistributedDataParallel
from undertow.ranks import descriptors
from undertow.ranks.descriptors import num_open_descriptors, why_too_few

TELLS = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="the system does not tell")


def limited(monkeypatch: pytest.MonkeyPatch, limit: int | None, num_open: int) -> None:
    monkeypatch.setattr(descriptors, "limit_of_descriptors", lambda: limit)
    monkeypatch.setattr(descriptors, "num_open_descriptors", lambda: num_open)
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)


def test_too_many_ranks_for_the_limit_are_told_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1024, 12)
    assert why_too_few(1024, rank=3) == (
        "rank 3 may open 1024 files, of which 12 are open, and a process group of 1024 ranks needs 1023 connections in each "
        "process.\n"
        "Raise the limit in the shell that starts the ranks, on every node: `ulimit -n 8192`."
    )


@pytest.mark.parametrize(("limit", "num_open"), [(1024, 512), (16_384, 12), (None, 10**6)])
def test_a_limit_that_is_high_enough_is_no_reason(limit: Any, num_open: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, limit, num_open)
    assert why_too_few(497, rank=0) == ""


def test_connections_that_are_open_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1024, 512)
    assert why_too_few(498, rank=0)


@pytest.mark.parametrize(("setting", "is_told"), [("1", False), ("True", False), ("0", True), ("no", True)])
def test_groups_that_connect_late_need_no_limit(setting: str, is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1024, 512)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", setting)
    assert bool(why_too_few(498, rank=0)) is is_told


def wraps_a_model(rank: Rank) -> None:
    """On rank 1 few files may be open: enough for the ring, and not for a group."""
    import resource  # Windows lacks it

    rank.meet()
    if rank.number == 1:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open_descriptors() + 14, hard))
    rank.say(began=time.monotonic())
    DistributedDataParallel(nn.Linear(2, 2))


@TELLS
def test_all_ranks_raise_at_once_if_one_may_open_few_files() -> None:
    ends: list[Ended] = run_ranks(wraps_a_model, 2, patience_s=30.0)
    began_s = max(end.words["began"] for end in ends)
    for number, end in enumerate(ends):
        assert end.kind == "ConfigError", end.log
        first, where, remedy = end.text.split("\n  ")
        assert first.startswith("rank 1 may open ")
        assert first.endswith(" and a process group of 2 ranks needs 1 connection in each process.")
        assert where == f"the making of a process group, rank {number}"
        assert remedy.startswith("Raise the limit in the shell that starts the ranks, on every node: `ulimit -n ")
        assert end.words["at"] - began_s < 5.0  # and not stall_timeout_s
