"""Handles of exchanges between ranks, and work that threads of the host complete."""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from undertow.ranks.guard import over_users
from undertow.ranks.threads import Worker

Work: TypeAlias = Any  # a dist.Work, to which torch's signatures add None, or a ThreadWork
_wait = methodcaller("wait")


class Handle:
    """An exchange in flight, and the function that follows it. Wait for it, poll it, or await it.

    `complete` waits for one work and raises if it failed. `finish` is called once, by the first
    wait, and holds the inputs of the works. A backend releases them as soon as any stream, such as
    a clock's, waits for a work; a stream that has not waited could then overwrite the memory.
    """

    def __init__(
        self,
        *works: Work,
        complete: Callable[[Work], object] = _wait,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self.works = works
        self.is_found_complete = False  # set after the first wait or successful poll
        self._is_waited = False
        self._complete = complete
        self._finish = finish

    def wait(self) -> None:
        """Waits until the work is complete (on CUDA: makes the current stream wait).

        Raises the backend's error if it failed or timed out.
        """
        if self._is_waited:
            return
        for work in self.works:
            self._complete(work)
        finish = self._finish
        if finish is not None:
            with torch.no_grad():
                finish()
        self._finish = None  # only now, because another thread or a signal handler may wait too
        self._is_waited = True
        self.is_found_complete = True

    def block_stream(self) -> None:
        """Makes the current CUDA stream wait for the work, not the host; `wait` is still needed."""
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        self.is_found_complete = self._is_waited or all(work.is_completed() for work in self.works)
        return self.is_found_complete

    def on_done(self, callback: Callable[[object], object]) -> None:
        """Calls `callback` when the last work is complete, from another thread or right away."""
        self.works[-1].get_future().add_done_callback(callback)

    def __await__(self) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        self.on_done(lambda _: loop.call_soon_threadsafe(arrived.set))
        yield from arrived.wait().__await__()
        self.wait()


class ThreadWork(Future[Any]):
    """Work in stages that threads of the host run, with the methods of a dist.Work."""

    is_completed = Future.done

    def run(self, stage: Callable[[], Any], *threads: Worker) -> None:
        """Runs `stage`, then in each of `threads` the stage that the one before has returned.

        The result of the last stage is the work's. An error is passed to those who wait.
        """
        try:
            with torch.no_grad():
                result = stage()
            if threads:
                threads[0].submit(self.run, result, *threads[1:])
            else:
                self.set_result(result)
        except BaseException as error:
            self.set_exception(error)

    def wait(self, limit: timedelta | None = None) -> None:
        """Waits for the end; raises the error of a stage, or RuntimeError after `limit`."""
        if limit is not None and not wait([self], timeout=limit.total_seconds()).done:
            raise RuntimeError("the work has not ended within the time limit.")
        self.result()

    def get_future(self) -> Future[Any]:
        return self


def all_reduce_async(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Handle:
    """Starts to reduce `tensor` in place over the user's group, by default the default group."""
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    return Handle(work, complete=partial(_complete_over_users, group))


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gathers a tensor of each rank of the user's group, in rank order, all of one shape."""
    received = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(received, tensor, group=group)
    return received


def _complete_over_users(group: dist.ProcessGroup | None, work: Work) -> None:
    with over_users(
        dist.group.WORLD if group is None else group, "a reduction over the process group"
    ):
        work.wait()
