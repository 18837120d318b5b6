"""Handles of exchanges between ranks: work of the backend, and exchanges that threads of the host complete."""

import asyncio
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from undertow.runtime.peers.guard import over_users
from undertow.runtime.peers.threads import Worker

Work: TypeAlias = Any  # a dist.Work, to which torch's signatures add None
_wait = methodcaller("wait")


class WorkHandle:
    """Work of the backend in flight, and the function that follows it. Wait for it, poll it, or await it from asyncio.

    `complete` waits for one work and raises if it failed. `finish` is called once, by the first wait, and holds the inputs of the
    works. A backend releases them as soon as any stream, such as a clock's, waits for a work; a stream that has not waited could
    then overwrite the memory.
    """

    def __init__(
        self, *works: Work, complete: Callable[[Work], object] = _wait, finish: Callable[[], object] | None = None
    ) -> None:
        self.works = works
        self.is_found_complete = False  # set after the first wait or successful poll
        self._is_waited = False
        self._complete = complete
        self._finish = finish

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the work is complete (on CUDA: makes the current stream wait).

        Raises the backend's error if it failed or timed out.
        """
        if self._is_waited:
            return
        for work in self.works:
            if timeout_s is None:
                self._complete(work)
            else:
                work.wait(timedelta(seconds=timeout_s))
        finish = self._finish
        if finish is not None:
            with torch.no_grad():
                finish()
        self._finish = None  # only now, because another thread or a signal handler may wait too
        self._is_waited = self.is_found_complete = True

    def block_stream(self) -> None:
        """Makes the current CUDA stream wait for the work without blocking the host; `wait` must still be called."""
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        self.is_found_complete = self._is_waited or all(work.is_completed() for work in self.works)
        return self.is_found_complete

    def on_done(self, callback: Callable[[object], object]) -> None:
        """Calls `callback` with the last work's future when it is complete, from a backend thread or right away."""
        self.works[-1].get_future().add_done_callback(callback)

    def __await__(self) -> Generator[Any, None, None]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self.on_done(lambda _: loop.call_soon_threadsafe(arrived.set))
        yield from arrived.wait().__await__()
        self.wait()


def all_reduce_async(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> WorkHandle:
    """Starts an all-reduce of `tensor` in place over a group of the user's, by default the default group."""
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    return WorkHandle(work, complete=partial(_complete_over_users, group))


def _complete_over_users(group: dist.ProcessGroup | None, work: Work) -> None:
    with over_users(dist.group.WORLD if group is None else group, "a reduction over the process group"):
        work.wait()


@dataclass(frozen=True, slots=True)
class Posted:
    """Sends and receives in flight, and the function to call after them."""

    works: Sequence[Work]
    finish: Callable[[], object]
    is_last: bool = True  # True if the exchange is complete after that
    held: object = None  # kept alive until then


class ThreadHandle:
    """A handle that threads of the host complete, which wait for other ranks. `result_of` waits for its result."""

    def __init__(self, result_of: Callable[[Future[Any]], Any]) -> None:
        self._result_of = result_of
        self._done: Future[Any] = Future()

    def wait(self) -> Any:
        """Waits until it is complete, and returns the result; raises if it failed or a rank is gone."""
        return self._result_of(self._done)

    block_stream = wait  # the host has no streams

    def on_done(self, callback: Callable[[object], object]) -> None:
        """Calls `callback` when it is complete: from another thread, or now if it already is."""
        self._done.add_done_callback(callback)

    def is_completed(self) -> bool:
        return self._done.done()

    def begin(self, post: Callable[[], Posted], thread: Worker) -> None:
        """Posts, and lets `thread` complete the handle; an error is passed to its waiters."""
        try:
            thread.submit(self.complete, post())
        except BaseException as error:
            self.fail(error)

    def run(self, work: Callable[[], object]) -> None:
        """Completes the handle with the result of `work`; an error is passed to its waiters."""
        self.complete(Posted((), work))

    def complete(self, posted: Posted) -> None:
        """Waits for the posted messages; completes the handle after the last of them, and passes an error to its waiters."""
        try:
            for work in posted.works:
                work.wait()
            with torch.no_grad():
                result = posted.finish()
        except BaseException as error:
            self.fail(error)
        else:
            if posted.is_last:
                self._done.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Passes `error` to the waiters."""
        self._done.set_exception(error)


Handle: TypeAlias = WorkHandle | ThreadHandle
