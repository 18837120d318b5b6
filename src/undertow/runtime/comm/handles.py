"""Handles of collectives that can be waited for, polled, awaited, and timed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from undertow.runtime.peers.waiting import over_users


class Handle(Protocol):
    """An exchange between ranks in flight."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool: ...

    def block_stream(self) -> None: ...

    def on_done(self, callback: Callable[[object], None]) -> None: ...


class ReductionHandle:
    """A reduction in flight. Wait for it, poll it, or await it from asyncio."""

    def __init__(self, work: dist.Work, complete: Callable[[dist.Work], object] = dist.Work.wait) -> None:
        """`complete` waits for the work and raises if it failed."""
        self._work = work
        self._complete = complete
        self._is_waited = False
        self.is_found_complete = False  # set after the first wait or successful poll

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the reduction is complete (on CUDA: makes the current stream wait).

        Raises the backend's error if it failed or timed out.
        """
        if self._is_waited:
            return
        if timeout_s is None:
            self._complete(self._work)
        else:
            self._work.wait(timedelta(seconds=timeout_s))
        self._is_waited = self.is_found_complete = True

    def block_stream(self) -> None:
        """Makes the current CUDA stream wait for the reduction without blocking the host; `wait` must still be called."""
        self._work.wait()

    def is_completed(self) -> bool:
        self.is_found_complete = self._is_waited or bool(self._work.is_completed())
        return self.is_found_complete

    def on_done(self, callback: Callable[[object], None]) -> None:
        """Calls `callback` with the backend's future when the reduction is complete, from a backend thread or right away."""
        self._work.get_future().add_done_callback(callback)

    def __await__(self) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()

        def wake() -> None:
            if not arrived.done():  # the task that awaits may have been cancelled
                arrived.set_result(None)

        def done(_future: object) -> None:
            loop.call_soon_threadsafe(wake)

        self.on_done(done)
        yield from arrived
        self.wait()


class Waits(Protocol):
    """A group that knows when a wait is in vain."""

    def result(self, future: Future[Any]) -> Any: ...


class FutureHandle:
    """A handle that another host thread completes, by messages of other ranks of `group`."""

    def __init__(self, group: Waits) -> None:
        self._group = group
        self._done: Future[None] = Future()

    def wait(self) -> None:
        """Waits until it is complete; raises if it failed or a rank is gone."""
        self._group.result(self._done)

    def is_completed(self) -> bool:
        return self._done.done()

    def block_stream(self) -> None:
        """Same as `wait`: the host has no streams."""
        self.wait()

    def on_done(self, callback: Callable[[object], None]) -> None:
        """Calls `callback` when it is complete: from another thread, or now if it already is."""
        self._done.add_done_callback(callback)


def started(work: dist.Work | None) -> dist.Work:
    """Returns the work, which torch gives if this rank is in the group and `async_op` is set."""
    assert work is not None
    return work


def all_reduce_async(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    *,
    complete: Callable[[dist.Work], object] | None = None,
) -> ReductionHandle:
    """Starts an all-reduce of `tensor` in place.

    `complete` waits for the work; None waits as for a group of the user's.
    """
    work = started(dist.all_reduce(tensor, op=op, group=group, async_op=True))
    return ReductionHandle(work, partial(_complete_over_users, group) if complete is None else complete)


def _complete_over_users(group: dist.ProcessGroup | None, work: dist.Work) -> None:
    with over_users(dist.group.WORLD if group is None else group, "a reduction over the process group"):
        work.wait()
