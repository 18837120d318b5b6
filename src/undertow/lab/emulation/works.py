"""The handles of transfers on an emulated link, and the threads that end them."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, final

import torch
import torch.distributed as dist


@final
class LinkWork(dist.Work):
    """Handle of a transfer on the link; a thread of the emulation completes it.

    It is a separate class because torch's handle of a receive has no future.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def finish(self, error: Exception | None = None) -> None:
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until it is done. gloo limits the time: when it gives up, so does the handle."""
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()


@final
class SentWork(dist.Work):
    """Handle of a message that gloo sends as soon as the way out is free."""

    def __init__(self) -> None:
        super().__init__()
        self._started: torch.futures.Future[Any] = torch.futures.Future()
        self._running: dist.Work | None = None

    def start(self, running: dist.Work) -> None:
        self._running = running
        self._started.set_result(running)

    def finish(self, error: Exception) -> None:
        """Ends it without a message."""
        self._started.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until gloo has sent it."""
        return bool(self._started.wait().wait())

    def is_completed(self) -> bool:
        return self._started.done() and (self._running is None or self._running.is_completed())


_Ending = LinkWork | SentWork


@final
class TaskThread(threading.Thread):
    """A daemon thread that runs tasks one after another, each for a handle.

    An error of the task ends the handle.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._tasks: SimpleQueue[tuple[_Ending, Callable[[], None]] | None] = SimpleQueue()
        self.start()

    def submit(self, work: _Ending, task: Callable[[], None]) -> None:
        self._tasks.put((work, task))

    def run(self) -> None:
        while (item := self._tasks.get()) is not None:
            work, task = item
            try:
                task()
            except Exception as error:
                work.finish(error)
            del item, work, task  # otherwise its tensors would stay alive until the next one

    def close(self, until_s: float) -> None:
        """Ends the thread after its tasks.

        Stops waiting for it at that time of `time.perf_counter`.
        """
        self._tasks.put(None)
        self.join(max(0.0, until_s - time.perf_counter()))
