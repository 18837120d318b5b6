"""Broken groups are freed in a thread of their own; what is not broken is nobody's business."""

from __future__ import annotations

import threading
import weakref
from unittest import mock

import torch
import torch.distributed as dist

from support.ranks import in_ranks
from undertow import DistributedDataParallel
from undertow.runtime import comm_hook, private
from undertow.runtime.freeing import FREEING, Freeing


class Lost:
    """A group, one of whose ranks is gone."""

    is_broken = True


@in_ranks(2)
def test_a_group_is_freed_once_torch_has_let_go() -> None:
    group, freeing = dist.new_group([0, 1]), Freeing()
    freeing.take(group)
    freeing.take(group)  # is interrupted again
    (thread,) = freeing._threads
    backend = weakref.ref(group._get_backend(torch.device("cpu")))
    freeing.finish()
    assert thread.is_alive()
    assert backend() is not None
    dist.destroy_process_group(group)
    del group
    thread.join(10.0)
    assert not thread.is_alive()
    assert backend() is None


@in_ranks(2)
def test_a_group_is_kept_where_no_thread_can_start() -> None:
    group, freeing, held = dist.new_group([0, 1]), Freeing(), []
    cannot_start = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with cannot_start, mock.patch.object(private, "keep_for_ever", held.append):
        freeing.take(group)
    assert held == [group._get_backend(torch.device("cpu"))]
    freeing.finish()
    dist.destroy_process_group(group)


@in_ranks(2)
def test_nothing_is_taken_in_a_healthy_run() -> None:
    def all_reduce(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return done.then(lambda it: it.value()[0])

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, all_reduce)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    model.close()
    assert FREEING._threads == []


def test_hooks_are_not_called_behind_one_that_may_be_stuck() -> None:
    first, lost = comm_hook._thread_beside_this_one(), Lost()
    assert comm_hook._thread_beside_this_one() is first
    first.groups.add(lost)
    assert comm_hook._thread_beside_this_one() is not first
