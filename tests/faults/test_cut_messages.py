"""A message of which a part has come when a rank is gone: gloo never ends such a one, and whoever waits learns of the rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from faults.conftest import Record
from faults.test_lost_ranks import WITHIN_S
from support.faults import Outcome
from support.processes import run_ranks, stop_here, wait_until_stopped
from undertow import DistributedDataParallel
from undertow.errors import RankLost
from undertow.runtime.exchange import PostedExchanges
from undertow.runtime.group import GroupRef, OwnGroup

_NUMEL = 1 << 26  # bytes; more than sockets take


def gathers(stops: Callable[[], None] | None) -> None:
    """The survivor gets all that it waits for, and cannot send all of its own part."""
    group = OwnGroup(GroupRef.of(dist.group.WORLD), device=torch.device("cpu"))
    group.open()
    if stops is not None:
        part, tag = torch.zeros(_NUMEL, dtype=torch.uint8), (1 << 24) + 1
        dist.isend(part, group=group.process_group, group_dst=0, tag=tag).wait()
        dist.irecv(part, group=group.process_group, group_src=0, tag=tag)
        stops()
    exchanges = PostedExchanges(group)
    with group.waiting("the other part"):
        exchanges.all_gather(torch.zeros(2 * _NUMEL, dtype=torch.uint8), number=1, then=int).wait()


def wraps_a_model(stops: Callable[[], None] | None) -> None:
    """The survivor sends its parameters."""
    model = nn.Linear(_NUMEL // 4 // 64, 64, bias=False)
    if stops is not None:
        _begin_and_stop(stops)
    DistributedDataParallel(model)


def sends_buffers(stops: Callable[[], None] | None) -> None:
    """The survivor sends its buffers, before a forward."""
    model = DistributedDataParallel(_WithBuffer())
    model(torch.ones(1))
    if stops is not None:
        _begin_and_stop(stops)
    model(torch.ones(1))


class _WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("statistics", torch.zeros(_NUMEL // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


def _begin_and_stop(stops: Callable[[], None]) -> None:
    """Has the next broadcast of this rank be its last."""
    broadcast = dist.broadcast

    def begins(tensor: torch.Tensor, *args: object, **kwargs: object) -> None:
        broadcast(tensor, *args, **kwargs)
        if tensor.nbytes >= _NUMEL:
            stops()

    dist.broadcast = begins


def _rank(scene: str, is_destroyed: bool, rank: int, directory: Path, connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "meeting-point"), 2), rank=rank, world_size=2)
    if rank == 1:
        globals()[scene](partial(stop_here, directory / "process"))
    threading.Thread(target=_kills_when_stopped, args=(directory / "process", connection), daemon=True).start()
    with pytest.raises(RankLost) as caught:
        globals()[scene](None)
    connection.send({"kind": "RankLost", "text": str(caught.value), "at": time.monotonic()})
    if is_destroyed:
        dist.destroy_process_group()


def _kills_when_stopped(process: Path, connection: Connection) -> None:
    number = wait_until_stopped(process)
    connection.send({"fault": time.monotonic()})
    os.kill(number, signal.SIGKILL)


@pytest.mark.parametrize("is_destroyed", [False, True], ids=["", "destroyed"])
@pytest.mark.parametrize("scene", ["gathers", "wraps_a_model", "sends_buffers"])
def test_a_rank_that_is_killed_with_half_a_message_is_named_all_the_same(scene: str, is_destroyed: bool, record: Record) -> None:
    survivor, killed = run_ranks(partial(_rank, scene, is_destroyed), 2, patience_s=60.0)
    assert killed.exit_code == -signal.SIGKILL
    assert "rank 1 is gone" in survivor.words["text"]
    assert (survivor.exit_code, survivor.was_killed) == (0, False)
    seconds = survivor.words["at"] - survivor.words["fault"]
    assert seconds < WITHIN_S
    record("killed, with half a message", [Outcome(kind="RankLost", text=survivor.words["text"], seconds=seconds)])
