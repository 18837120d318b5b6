"""A rank that is killed, wherever it is, is named by all others within seconds."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from faults.conftest import Record
from support.faults import FAULTY_STEP, Fault, Outcome, outcomes

WITHIN_S = 10.0
GONE = """rank {faulty} is gone: its process has ended without a word, or was killed.
  {where}
  The step is incomplete on every rank. Look for what has ended it (memory, the scheduler), and start from a checkpoint."""
WHERE = {  # what the others wait for has a number: after a step they are in the next one
    "in_data": "synchronisation {step}, rank {rank}",
    "in_forward": "synchronisation {step}, rank {rank}",
    "in_backward": "synchronisation {step}, rank {rank}",
    "in_sharded_backward": "synchronisation {step}, rank {rank}",
    "in_hybrid_backward": "synchronisation {step}, rank {rank}",
    "in_expert_backward": "synchronisation {step}, rank {rank}",
    "in_launch": "synchronisation {step}, rank {rank}",
    "in_comm_hook": "synchronisation {step}, rank {rank}",
    "in_buffers": "synchronisation {step}, rank {rank}",
    "in_weights": "synchronisation {step}, rank {rank}",
    "in_join": "synchronisation {step}, rank {rank}",
    "in_optimizer": "synchronisation {next_step}, rank {rank}",
    "in_gathers": "synchronisation {next_step}, rank {rank}",
    "in_checkpoint": "synchronisation {next_step}, rank {rank}",
    "before_checkpoint": "synchronisation {next_step}, rank {rank}",
    "in_construction": "synchronisation 0, rank {rank}",
    "connecting_in_construction": "synchronisation 0, rank {rank}",
    "before_construction": "the making of a process group, rank {rank}",
}
OF_THEIR_OWN = ("in_hybrid_backward", "in_expert_backward", "in_launch")  # tests


def require_gone(fault: Fault, found: list[Outcome]) -> list[Outcome]:
    """All ranks but the killed one say so, in time."""
    assert found[fault.rank].exit_code == -9
    for rank, outcome in enumerate(found):
        if rank != fault.rank:
            where = WHERE[fault.point].format(step=FAULTY_STEP, next_step=FAULTY_STEP + 1, rank=rank)
            assert (outcome.kind, outcome.text) == ("RankLost", GONE.format(faulty=fault.rank, where=where))
            assert outcome.seconds < WITHIN_S
    return [outcome for rank, outcome in enumerate(found) if rank != fault.rank]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("point", [point for point in WHERE if point not in OF_THEIR_OWN])
def test_a_killed_rank_is_named_on_all_others(point: str, num_ranks: int, record: Record) -> None:
    fault = Fault("killed", point, rank=num_ranks - 1, num_ranks=num_ranks)
    record(f"killed {point.replace('_', ' ')}", require_gone(fault, outcomes(fault)))


@pytest.mark.parametrize("point", ["in_forward", "in_gathers"])
def test_a_rank_that_served_the_store_is_named_too(point: str, record: Record) -> None:
    fault = Fault("killed", point, rank=0, num_ranks=3, is_env=True)
    record("killed, and it served the store", require_gone(fault, outcomes(fault)))


@pytest.mark.parametrize("point", ["in_backward", "in_checkpoint"])
def test_a_rank_far_away_from_the_killed_one_learns_of_it(point: str, record: Record) -> None:
    """Of four, rank 3 has no connection of the ring to rank 1."""
    fault = Fault("killed", point, rank=1, num_ranks=4)
    record("killed, not a neighbour", require_gone(fault, outcomes(fault)))


@pytest.mark.parametrize("kind", ["killed", "raises"])
@pytest.mark.parametrize("point", ["in_backward", "in_sharded_backward", "in_gathers", "in_comm_hook", "in_construction"])
def test_process_groups_may_be_destroyed_right_after_the_error(point: str, kind: str) -> None:
    """What is under way over them is not waited for, and the process ends as the script does."""
    survivor, faulty = outcomes(Fault(kind, point, rank=1, is_destroyed=True))
    stacks = f"rank 0:\n{survivor.stacks}\nrank 1 (exit code {faulty.exit_code}):\n{faulty.stacks}"
    assert (survivor.kind, survivor.exit_code) == ("RankLost" if kind == "killed" else "PeerFailed", 1), stacks


@pytest.mark.parametrize("point", ["in_comm_hook_of_a_stopped_rank", "in_trailers_of_a_stopped_rank"])
@pytest.mark.parametrize("is_destroyed", [True, False])
def test_a_collective_that_gloo_never_ends_keeps_nobody(point: str, is_destroyed: bool) -> None:
    """Not the backward, nor `destroy_process_group()`, nor the end of the process."""
    survivor = outcomes(Fault("killed", point, rank=1, is_destroyed=is_destroyed))[0]
    assert (survivor.kind, survivor.exit_code) == ("RankLost", 1), survivor.stacks


@pytest.mark.parametrize("is_destroyed", [True, False])
def test_nor_does_it_keep_a_script_from_its_end(is_destroyed: bool, tmp_path: Path) -> None:
    fault = f"faults.Fault('killed', 'in_comm_hook_of_a_stopped_rank', is_destroyed={is_destroyed})"
    script = f"import sys; from support import faults; faults.be_rank({fault}, int(sys.argv[1]), sys.argv[2])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with contextlib.ExitStack() as ends:
        ranks = []
        for rank in ("0", "1"):
            command = [sys.executable, "-c", script, rank, str(tmp_path)]
            ranks.append(ends.enter_context(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)))
            ends.callback(ranks[-1].kill)
        _, complaints = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 1
    assert "undertow.errors.RankLost: rank 1 is gone" in complaints


@pytest.mark.parametrize("point", ["in_hybrid_backward", "in_expert_backward"])
@pytest.mark.parametrize("faulty", [0, 3])
def test_a_rank_is_named_in_other_rows_and_columns_and_with_other_experts_too(point: str, faulty: int, record: Record) -> None:
    fault = Fault("killed", point, rank=faulty, num_ranks=4)
    record(f"killed {point.replace('_', ' ')}", require_gone(fault, outcomes(fault)))


SURVIVES = """
    import contextlib, os, signal, sys, torch, torch.distributed as dist
    import undertow

    rank, port = int(sys.argv[1]), sys.argv[2]
    at = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=2)
    model = undertow.DistributedDataParallel(torch.nn.Linear(4, 4))
    with contextlib.suppress(undertow.RankLost):
        for step in range(9):
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=at, rank=0, world_size=1)
    if sys.argv[3] == "closes":
        model.close()
    again = undertow.DistributedDataParallel(torch.nn.Linear(4, 4))
    again(torch.ones(2, 4)).sum().backward()
    print("trained again")
"""


@pytest.mark.parametrize("ending", ["closes", "leaves it"])
def test_a_survivor_may_begin_anew_in_the_same_process(ending: str) -> None:
    """And has nothing to say when it ends."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", textwrap.dedent(SURVIVES)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port, ending], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    (said, complaints), _ = [rank.communicate(timeout=120) for rank in ranks]
    assert said.splitlines() == ["trained again"]
    assert "Traceback" not in complaints
    assert ranks[0].returncode == 0
