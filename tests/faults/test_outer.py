"""Outer synchronization while a rank is killed, raises, stops or starts again, with a fragment on its way."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from support.faults import Fault, outcomes
from support.levels import some
from support.processes import Rank, run_ranks
from support.training import loss_of, net
from undertow import DistributedDataParallel, Outer, SyncConfig, has_checkpoint, load_checkpoint, save_checkpoint

WITHIN_S = 10.0
OUTER = Outer(every=4, fragments=2, delay=2)
NUM_STEPS, SAVED, KILLED = 12, 5, 7  # a fragment is on its way after the save, and when the rank is killed


@pytest.mark.parametrize("point", some(["data", "backward", "optimizer", "post"], most=1))
def test_a_killed_rank_is_named(point: str) -> None:
    survivor, faulty = outcomes(Fault(kind="killed", point=point, way="outer"))
    assert (survivor.kind, faulty.exit_code, survivor.seconds < WITHIN_S) == ("RankLost", -9, True), survivor.log
    assert survivor.text.startswith("rank 1 is gone: its process exited or was killed ")


@pytest.mark.deep
def test_an_error_of_one_rank_is_told_on_the_others() -> None:
    survivor, _ = outcomes(Fault(kind="raises", point="backward", way="outer"))
    assert survivor.kind == "PeerFailed"
    assert survivor.text.startswith("rank 1 has failed: support.faults.BadBatch: row 7 has no label\n  synchronization ")


@pytest.mark.waits
def test_a_rank_that_stands_still_is_named_in_the_step_in_which_a_fragment_is_due() -> None:
    settings = {"stall_warning_s": 0.2, "stall_timeout_s": 1.0}
    survivor, _ = outcomes(Fault(kind="stopped", point="backward", way="outer", settings=settings))
    assert survivor.kind == "StallTimeout"
    assert ": rank 1 has not arrived.\n  synchronization " in survivor.text
    assert " of the replicas' differences: " in survivor.text


@pytest.mark.waits
def test_a_late_rank_is_reported_and_waited_for() -> None:
    fault = Fault(kind="late until reported", point="backward", way="outer", settings={"stall_warning_s": 0.2})
    ended = outcomes(fault)
    assert [rank.exit_code for rank in ended] == [0, 0], ended[0].log


def train(folder: Path, number_of_kill: int | None, rank: Rank) -> list[list[float]]:
    """Trains from the checkpoint on, if there is one, and returns the parameters."""
    rank.meet()
    model = DistributedDataParallel(net(), config=SyncConfig(outer=OUTER))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    path = folder / "saved"
    first = load_checkpoint(path, model, optimizer) if has_checkpoint(path) else 0
    for number in range(first, NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, number, rank.number).backward()
        optimizer.step()
        if number + 1 == SAVED:
            save_checkpoint(path, model, optimizer, extra=SAVED)
        if (number, rank.number) == (number_of_kill, 1):
            os.kill(os.getpid(), signal.SIGKILL)
    model.close()
    return [param.flatten().tolist() for param in model.parameters()]


@pytest.mark.deep
def test_a_job_whose_rank_is_killed_starts_again_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    wanted = run_ranks(partial(train, undisturbed, None), 2)
    survivor, killed = run_ranks(partial(train, disturbed, KILLED), 2)
    assert (survivor.kind, killed.exit_code) == ("RankLost", -9), survivor.log
    again = run_ranks(partial(train, disturbed, None), 2)
    for rank, ended in enumerate(again):
        assert ended.words["value"] == wanted[rank].words["value"], ended.log
