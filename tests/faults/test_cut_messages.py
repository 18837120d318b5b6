"""A message of which a part has come when a rank is gone: gloo never ends such a one, and whoever waits learns of the rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from faults.conftest import Record
from faults.test_lost_ranks import WITHIN_S
from support.faults import Outcome
from support.processes import run_ranks
from undertow.errors import RankLost
from undertow.runtime.exchange import PostedExchanges
from undertow.runtime.group import GroupRef, OwnGroup

_NUMEL = 1 << 26  # bytes; more than sockets take


def _gathers(group: OwnGroup) -> None:
    """This rank gets all that it waits for, and cannot send all of its own part."""
    exchanges = PostedExchanges(group)
    with group.waiting("the other part"):
        exchanges.all_gather(torch.zeros(2 * _NUMEL, dtype=torch.uint8), number=1, then=int).wait()


def _has_sent_all_and_taken_a_part(group: OwnGroup) -> None:
    part, tag = torch.zeros(_NUMEL, dtype=torch.uint8), (1 << 24) + 1
    dist.isend(part, group=group.process_group, group_dst=0, tag=tag).wait()
    dist.irecv(part, group=group.process_group, group_src=0, tag=tag)


def _rank(rank: int, directory: Path, connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "meeting-point"), 2), rank=rank, world_size=2)
    group = OwnGroup(GroupRef.of(dist.group.WORLD), device=torch.device("cpu"))
    group.open()
    if rank == 1:
        _has_sent_all_and_taken_a_part(group)
        (directory / "process").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)  # nothing more is read
    threading.Thread(target=_kills_when_stopped, args=(directory / "process", connection), daemon=True).start()
    with pytest.raises(RankLost) as caught:
        _gathers(group)
    connection.send({"kind": "RankLost", "text": str(caught.value), "at": time.monotonic()})


def _kills_when_stopped(process: Path, connection: Connection) -> None:
    while not (process.exists() and process.read_text() and _is_stopped(int(process.read_text()))):
        time.sleep(0.005)
    connection.send({"fault": time.monotonic()})
    os.kill(int(process.read_text()), signal.SIGKILL)


def _is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_rank_that_is_killed_with_half_a_message_is_named_all_the_same(record: Record) -> None:
    survivor, killed = run_ranks(_rank, 2, patience_s=60.0)
    assert killed.exit_code == -signal.SIGKILL
    assert "rank 1 is gone" in survivor.words["text"]
    assert (survivor.exit_code, survivor.was_killed) == (0, False)
    seconds = survivor.words["at"] - survivor.words["fault"]
    assert seconds < WITHIN_S
    record("killed, with half a message", [Outcome(kind="RankLost", text=survivor.words["text"], seconds=seconds)])
