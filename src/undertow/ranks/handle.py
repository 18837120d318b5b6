"""A message in flight, to wait for.

Handle      wait for it, poll it, or await it
Waiter      waits for its works, until a rank is gone
ThreadWork  work that a thread of the host does, as a backend's work
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor

from undertow.ranks import patience
from undertow.ranks.threads import Worker
from undertow.ranks.watch import NullWatch

# A dist.Work (torch's signatures add None), or an object like it: `ThreadWork`, or the work of
# `users_groups.py`.
Work: TypeAlias = Any
Task = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Waiter:
    """Waits for works over the connections of a group, until a rank of it is gone."""

    watch: NullWatch
    is_host: bool  # else the works are on a device

    def complete(self, work: Work) -> None:
        """Waits for `work`; on a device, makes the current stream wait.

        Over gloo, the wait ends in one of four ways:

        - Gloo's thread completes the work.
        - Gloo's thread fails it, because a connection has ended: a rank has died, another rank has
          given up (`Watch.give_up`), or the group's timeout is over.
        - The guard's thread interrupts the group (`Watch.judge`), and gloo's thread fails the work.
        - This thread ends it at the second look that finds a rank gone, if gloo does not fail it.

        Raises the transport's error, or RuntimeError in the last case. A context of `Watch.waiting`
        around the call replaces these by the reason.
        """
        is_broken = False
        while self.is_host and not work.is_completed():
            until_s = time.monotonic() + patience.LOOK_S
            try:
                work.wait(timedelta(seconds=patience.LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    break
            # Gloo fails operations when it closes a connection, except a partly sent message.
            if is_broken:
                raise RuntimeError(
                    "the connection to another rank was closed in the middle of a message."
                )
            is_broken = self.watch.fault is not None
            # the work may not support a time limit
            time.sleep(max(0.0, until_s - time.monotonic()))
        work.wait()  # returns at once, or raises the work's error


class Handle:
    """A message in flight, and the function that follows it. Wait for it, poll it, or await it.

    `waiter` waits for each work; without one, its own `wait` is called. Reports call the wait by
    its `name`, if it has one. `finish` is called once, by the first wait. Until then it keeps the
    inputs of the works alive: a backend releases them as soon as any stream, such as a clock's,
    waits for a work, and a stream that has not waited could then overwrite the memory.

    Later waits do nothing, so a message has arrived only for the stream of the first wait. With
    `record`, of a device, every stream that waits follows it, as a handle of user code may need.
    """

    def __init__(
        self,
        *works: Work,
        waiter: Waiter | None = None,
        name: str = "",
        finish: Callable[[], object] | None = None,
        result: Tensor | None = None,
        record: Callable[[], torch.Event] | None = None,
    ) -> None:
        self.works = works
        self.is_found_complete = False  # set after the first wait or successful poll
        self._is_waited = False
        self._waiter = waiter
        self._name = name
        self._finish = finish
        self._result = result
        self._record = record
        self._arrived: torch.Event | None = None  # the end of the first wait

    @classmethod
    def in_thread(cls, call: Task, thread: Worker, *, waiter: Waiter | None) -> Handle:
        """Calls `call` in a thread."""
        work = ThreadWork()
        thread.submit(work.run, call)
        return cls(work, waiter=waiter)

    @classmethod
    def failed(cls, error: BaseException) -> Handle:
        """Returns a handle whose waits raise `error`."""
        work = ThreadWork()
        work.set_exception(error)
        return cls(work)

    def wait(self) -> None:
        """Waits until the work is complete (on a device: makes the current stream wait).

        Raises the backend's error if it failed or timed out.
        """
        if self._is_waited:
            if self._arrived is not None:
                self._arrived.wait()
            return
        waiter = self._waiter
        for work in self.works:
            if waiter is None:
                work.wait()
            elif self._name:
                with waiter.watch.waiting(self._name):
                    waiter.complete(work)
            else:
                waiter.complete(work)
        finish = self._finish
        if finish is not None:
            with torch.no_grad():
                finish()
        if self._record is not None:
            self._arrived = self._record()
        self._finish = None  # only now, because another thread or a signal handler may wait too
        self._is_waited = True
        self.is_found_complete = True

    def result(self) -> Tensor:
        """Waits for the tensor that the message brings, and returns it."""
        self.wait()
        assert self._result is not None  # OwnGroup's messages with a name bring one
        return self._result

    def block_stream(self) -> None:
        """Makes the current stream wait for the work, not the host; `wait` is still needed."""
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
    """Work that threads of the host do, with the methods of a dist.Work."""

    is_completed = Future.done

    def run(self, call: Task) -> None:
        """Calls `call`; its result, or its error, is the work's."""
        try:
            with torch.no_grad():
                result = call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)

    def wait(self, limit: timedelta | None = None) -> None:
        """Waits for the end; raises the error of a stage, or RuntimeError after `limit`."""
        if limit is not None:
            # A quarter of the time of concurrent.futures.wait. It returns the error of a stage.
            with contextlib.suppress(TimeoutError):
                self.exception(limit.total_seconds())
            if not self.done():
                raise RuntimeError("the work has not ended within the time limit.")
        self.result()

    def get_future(self) -> Future[Any]:
        return self
