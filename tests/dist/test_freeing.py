"""Broken groups are freed in a thread of their own; what is not broken is nobody's business."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.ranks import Ranks
from undertow import DistributedDataParallel
from undertow.runtime import comm_hook, private
from undertow.runtime.freeing import FREEING, Freeing


class Lost:
    """A group, one of whose ranks is gone."""

    is_broken = True


def is_freed_once_torch_has_let_go() -> None:
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


def is_kept_where_no_thread_can_start() -> None:
    def fail(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    group, freeing, start, kept = dist.new_group([0, 1]), Freeing(), threading.Thread.start, private.keep_for_ever
    held: list[Any] = []
    threading.Thread.start, private.keep_for_ever = fail, held.append
    try:
        freeing.take(group)
    finally:
        threading.Thread.start, private.keep_for_ever = start, kept
    assert held == [group._get_backend(torch.device("cpu"))]
    freeing.finish()
    dist.destroy_process_group(group)


def takes_nothing_in_a_healthy_run() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(_first))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    model.close()
    assert FREEING._threads == []


def _first(done: Any) -> torch.Tensor:
    return done.value()[0]


@pytest.mark.parametrize(
    "work", [is_freed_once_torch_has_let_go, is_kept_where_no_thread_can_start, takes_nothing_in_a_healthy_run]
)
def test_what_gloo_has_of_a_group(work: Any, two_ranks: Ranks) -> None:
    two_ranks.run(work)


def test_hooks_are_not_called_behind_one_that_may_be_stuck() -> None:
    first, lost = comm_hook._thread_beside_this_one(), Lost()
    assert comm_hook._thread_beside_this_one() is first
    first.groups.add(lost)
    assert comm_hook._thread_beside_this_one() is not first
