"""A rank that ends with an exception tells the others, wherever it was raised."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from faults.conftest import Record
from faults.test_lost_ranks import WHERE, WITHIN_S
from support.faults import FAULTY_STEP, Fault, outcomes

FAILED = """rank {faulty} has failed: support.faults.BadBatch: row 7 has no label
  {where}
  The step is incomplete on every rank. The traceback is in the log of rank {faulty}."""
POINTS = [
    "in_data",
    "in_forward",
    "in_backward",
    "in_launch",
    "in_comm_hook",
    "in_weights",
    "in_join",
    "in_optimizer",
    "in_gathers",
    "before_checkpoint",
    "in_construction",
]
FINISHED = """rank {faulty} has left: it has finished after {num_steps} synchronisations, and others wait for it.
  synchronisation 3, rank {rank}
  Give every rank as many batches, train inside join() of the wrapper, or have a rank without data call finish()."""


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_an_exception_is_told_to_all_others(point: str, num_ranks: int, record: Record) -> None:
    fault = Fault("raises", point, rank=num_ranks - 1, num_ranks=num_ranks)
    found = outcomes(fault)
    assert (found[fault.rank].kind, found[fault.rank].text) == ("BadBatch", "row 7 has no label")
    for rank, outcome in enumerate(found[: fault.rank]):
        where = WHERE[point].format(step=FAULTY_STEP, next_step=FAULTY_STEP + 1, rank=rank)
        assert (outcome.kind, outcome.text) == ("PeerFailed", FAILED.format(faulty=fault.rank, where=where))
        assert outcome.seconds < WITHIN_S
    record(f"exception {point.replace('_', ' ')}", found[: fault.rank])


@pytest.mark.parametrize("kind", ["closes", "exits"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_has_finished_early_is_named_with_its_steps(num_ranks: int, kind: str, record: Record) -> None:
    fault = Fault(kind, "in_data", rank=num_ranks - 1, num_ranks=num_ranks)
    found = outcomes(fault)
    for rank, outcome in enumerate(found[: fault.rank]):
        text = FINISHED.format(faulty=fault.rank, num_steps=FAULTY_STEP, rank=rank)
        assert (outcome.kind, outcome.text) == ("RankLost", text)
        assert outcome.seconds < WITHIN_S
    record(f"{kind} early, without join", found[: fault.rank])


SCRIPT = """
    import contextlib, sys, torch, torch.distributed as dist
    import undertow

    rank, meeting_point = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting_point, 2), rank=rank, world_size=2)
    model = undertow.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        if (rank, step) == (1, 2):
            {fault}
        model(torch.ones(2, 4)).sum().backward()
"""


def started(fault: str, directory: Path, *, script: str = SCRIPT) -> list[subprocess.Popen[str]]:
    """Two processes that train; the second one does what `fault` says."""
    command = [sys.executable, "-c", textwrap.dedent(script).replace("{fault}", fault)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen([*command, str(rank), str(directory / "here")], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ('raise ValueError("row 7 has no label")', "PeerFailed: rank 1 has failed: ValueError: row 7 has no label"),
        ("sys.exit(0)", "RankLost: rank 1 has left: it has finished after 2 synchronisations, and others wait for it."),
        (
            "with contextlib.closing(model): sys.exit(0)",
            "RankLost: rank 1 has left: it has finished after 2 synchronisations, and others wait for it.",
        ),
        ("import os; os._exit(0)", "RankLost: rank 1 is gone: its process has ended without a word, or was killed."),
    ],
    ids=["exception", "exit", "exit that closes", "without a word"],
)
def test_the_way_a_script_ends_is_told(fault: str, told: str, tmp_path: Path) -> None:
    ranks = started(fault, tmp_path)
    try:
        first, second = (rank.communicate(timeout=60)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 1
    first = first.replace("[rank0]: ", "")  # torch's hook puts it before each line
    assert re.search(rf"^undertow\.errors\.{re.escape(told)}$", first, re.MULTILINE), first
    assert ("ValueError: row 7 has no label" in second) == ("ValueError" in told)


# A thread of the script's own trains, and the main thread of the failing process goes on.
THREADED = """
    import sys, threading, time, torch, torch.distributed as dist
    import undertow

    rank, meeting_point = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting_point, 2), rank=rank, world_size=2)

    def wrapped():
        return undertow.DistributedDataParallel(torch.nn.Linear(4, 4))

    def train(model=None):
        model = model or wrapped()
        for step in range(3):
            if (rank, step) == (1, 2):
                {fault}
            model(torch.ones(2, 4)).sum().backward()

    if rank == 1:
        threading.Thread(target=train, args=({arguments}), daemon=True).start()
        time.sleep(60)
    train()
"""


@pytest.mark.parametrize("arguments", ["", "wrapped(),"], ids=["wrapped there", "wrapped in another thread"])
def test_an_exception_that_ends_a_training_thread_is_told(arguments: str, tmp_path: Path) -> None:
    """Its process stays, and so do its connections."""
    script = THREADED.replace("{arguments}", arguments)
    ranks = started('raise ValueError("row 7 has no label")', tmp_path, script=script)
    try:
        said = ranks[0].communicate(timeout=60)[1]
        assert ranks[1].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "PeerFailed: rank 1 has failed: ValueError: row 7 has no label" in said
    assert ranks[0].returncode == 1


ALONE = (
    'import atexit, time; atexit.register(time.sleep, 600); raise undertow.PhaseError("no batch.", where="here", remedy="None.")'
)


def test_an_error_of_ours_that_one_rank_alone_raises_is_told_though_its_process_is_long_in_ending(tmp_path: Path) -> None:
    """Errors that all ranks raise they raise at once: who still waits two seconds later waits for a rank that will not come."""
    ranks = started(ALONE, tmp_path)
    try:
        said = ranks[0].communicate(timeout=60)[1]
        assert ranks[1].poll() is None  # its connections were still there
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "PeerFailed: rank 1 has failed: undertow.errors.PhaseError: no batch." in said
