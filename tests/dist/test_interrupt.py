"""What we rely on of gloo where a rank fails: torch's waits end, and a connection tells whether its peer is there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from support.inside import cloned_group, interrupt, is_gone
from support.ranks import in_ranks


def receive(group: dist.ProcessGroup) -> dist.Work:
    return dist.irecv(torch.zeros(4), group=group, group_src=1)


def reduce(group: dist.ProcessGroup) -> dist.Work:
    return dist.all_reduce(torch.zeros(4), group=group, async_op=True)


@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("start", [receive, reduce])
def test_what_waits_wakes_up_and_other_groups_go_on(start: Callable[[dist.ProcessGroup], dist.Work]) -> None:
    """Rank 0 waits for what rank 1 never sends, and is woken on this rank alone."""
    group = cloned_group()
    dist.barrier()  # it is made on both
    if dist.get_rank() == 0:
        work = start(group)
        waker = threading.Timer(0.2, interrupt, [group])
        waker.start()
        with pytest.raises(RuntimeError, match=r"^Application timeout caused pair closure$"):
            work.wait()
        waker.join()
        del work
    dist.barrier()  # of another group, which goes on
    dist.destroy_process_group(group)


@in_ranks(2)
def test_a_rank_that_is_there_is_not_gone() -> None:
    other = 1 - dist.get_rank()
    dist.barrier()
    assert [is_gone(other) for _ in range(3)] == [False] * 3
    dist.barrier()
    dist.all_reduce(torch.ones(3))  # the looks have left nothing behind
