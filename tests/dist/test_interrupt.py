"""What we rely on of gloo where a rank fails: torch's waits end, and a connection tells whether its peer is there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from support.ranks import Ranks
from undertow.runtime import private
from undertow.runtime.group import GroupRef


def receive(group: dist.ProcessGroup) -> dist.Work:
    return dist.irecv(torch.zeros(4), group=group, group_src=1)


def reduce(group: dist.ProcessGroup) -> dist.Work:
    return dist.all_reduce(torch.zeros(4), group=group, async_op=True)


def interrupted(start: Callable[[dist.ProcessGroup], dist.Work], barrier: bool) -> str:
    """Rank 0 waits for what rank 1 never sends, and is woken on this rank alone."""
    group = GroupRef.of(dist.group.WORLD).clone()
    dist.barrier()  # it is made on both
    said = ""
    if dist.get_rank() == 0:
        work = start(group)
        waker = threading.Timer(0.2, private.interrupt, [group])
        waker.start()
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        waker.join()
        said = str(caught.value)
        del work, caught
    if barrier:
        dist.barrier()  # of another group, which goes on
    dist.destroy_process_group(group)
    return said


@pytest.mark.parametrize("start", [receive, reduce])
def test_what_waits_wakes_up_and_other_groups_go_on(fresh_pair: Ranks, start: Callable[[dist.ProcessGroup], dist.Work]) -> None:
    assert fresh_pair.run(interrupted, start, True)[0] == "Application timeout caused pair closure"


def looks() -> list[bool]:
    other = 1 - dist.get_rank()
    dist.barrier()
    found = [private.is_gone(other) for _ in range(3)]
    dist.barrier()
    dist.all_reduce(torch.ones(3))  # the looks have left nothing behind
    return found


def test_a_rank_that_is_there_is_not_gone(two_ranks: Ranks) -> None:
    assert two_ranks.run(looks) == [[False] * 3] * 2
