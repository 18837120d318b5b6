"""One link of this process: the transfers that occupy it, their log and handles, and the receives that it delays.

    caller             post ──────────────────────────────────────── wait
    thread of a sender   └ gloo has it · time reserved · next one
    link                                 [ started ── bytes ── due )       one message or collective at a time
    delivering thread                                            └ latency · done

Messages occupy the link one after another, in the order of their arrival; the latency of one does not delay the next.
"""

import logging
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.cost import Link

_LOG_LENGTH = 65_536  # limits the memory of a training run that never takes its log
_log = logging.getLogger("undertow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective, or the receive of one message (kind "send"), as the link saw it; in seconds of `time.perf_counter`."""

    kind: str
    num_bytes: int  # of the whole tensor; for a receive, of the message
    launched_s: float  # on this rank
    started_s: float  # when the link was free and the last rank had launched or the message had arrived
    done_s: float


@final
class EmulatedLink:
    """This process's link to the network, full duplex; it carries one transfer after another, of all its groups."""

    def __init__(self, link: Link, *, burst_bytes: int = 0) -> None:
        """`burst_bytes` of payload pass at once after a rest: the contents of a full token bucket."""
        self.link = link
        self._burst_s = burst_bytes / link.bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._paid_at_s = 0.0  # when the tokens for everything carried so far are there: the bucket as a virtual clock
        self._log: deque[Transfer] = deque(maxlen=_LOG_LENGTH)

    def reserve(self, *, ready_s: float, bytes_s: float, latency_s: float = 0.0) -> tuple[float, float]:
        """Reserves the link's next free interval from `ready_s` on, for bytes and then a latency; returns its start and end.

        The bucket is the generic cell rate algorithm (ITU-T I.371). Latencies refill it; here they all follow the bytes.
        """
        with self._lock:
            started_s = max(self._free_at_s, ready_s)
            self._paid_at_s = max(self._paid_at_s, started_s - self._burst_s) + bytes_s
            self._free_at_s = max(self._paid_at_s, started_s) + latency_s
            return started_s, self._free_at_s

    def record(self, kind: str, num_bytes: int, *, launched_s: float, started_s: float, done_s: float) -> None:
        """Adds a transfer that has ended to the log."""
        transfer = Transfer(kind=kind, num_bytes=num_bytes, launched_s=launched_s, started_s=started_s, done_s=done_s)
        with self._lock:
            self._log.append(transfer)

    def take_log(self) -> tuple[Transfer, ...]:
        """Returns all transfers that ended since the last call, in the order in which they ended.

        On a free link, receives are missing: gloo's own handles do not tell when they end.
        """
        with self._lock:
            taken = tuple(self._log)
            self._log.clear()
        return taken


@final
class LinkWork(dist.Work):
    """Handle of a transfer on the link; a thread of the emulation completes it.

    It is a separate class because torch's handle of a future cannot wait with a timeout, and its handle of a receive has no
    future.
    """

    def __init__(self, result: Any, *, source_rank: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._result = result
        self._ask_source = source_rank  # for receives
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._is_finished = threading.Event()

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)
        # Last, so that a caller that has waited finds the future complete too.
        self._is_finished.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until it is done; a timeout of zero means no limit, as in torch."""
        if not self._is_finished.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"Operation timed out! The link has not carried it after {timeout.total_seconds()} s.")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._is_finished.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._result

    def _source_rank(self) -> int:
        """Returns the sender; torch.distributed.recv asks if the caller named none."""
        return super()._source_rank() if self._ask_source is None else self._ask_source()


@final
class TaskThread:
    """A daemon thread that runs tasks one after another. It starts with the first task, and after `close` with the next one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: Callable[[], None]) -> None:
        """Runs the task, which must not raise, after all earlier ones."""
        if self._thread is None:
            thread = threading.Thread(target=_run_tasks, args=(self._tasks,), name=self._name, daemon=True)
            thread.start()
            self._thread = thread  # after the start: a thread that has not started cannot be joined
        self._tasks.put(task)

    def close(self, until_s: float) -> bool:
        """Ends the thread after its tasks; returns False if it still runs at that time of `time.perf_counter`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._tasks.put(None)
        thread.join(max(0.0, until_s - time.perf_counter()))
        return not thread.is_alive()


def _run_tasks(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # otherwise its tensors would stay alive until the next one


@final
class Receives:
    """The receives of one group: each ends when the link would have carried its message.

    Receives from one sender end in the order in which they were posted, whatever their tags. Senders do not wait for each other,
    because one may be late, or send only after it has heard from another.
    """

    def __init__(self, link: EmulatedLink, *, rank: int) -> None:
        self._link = link
        self._rank = rank
        self._lock = threading.Lock()
        new_thread = partial(TaskThread, f"undertow-receive-{rank}")
        self._senders: defaultdict[int | None, TaskThread] = defaultdict(new_thread)  # None: any
        self._delivery = new_thread()

    def post(self, start: Callable[[], dist.Work], tensors: list[Tensor], *, source: int | None) -> LinkWork:
        """Starts a receive on gloo; the returned handle ends when the link has carried the message."""
        posted_s, running = time.perf_counter(), start()
        work = LinkWork(tensors, source_rank=running._source_rank)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        with self._lock:
            self._senders[source].submit(partial(self._receive, work, running, num_bytes, posted_s))
        return work

    def close(self, until_s: float) -> None:
        """Ends the threads after every message has arrived, or at `until_s`."""
        with self._lock:
            senders = [*self._senders.values()]
            self._senders.clear()
        are_over = [thread.close(until_s) for thread in (*senders, self._delivery)]
        if not all(are_over):
            _log.warning("an emulated group of rank %d was closed with a receive in flight.", self._rank)

    def _receive(self, work: LinkWork, running: dist.Work, num_bytes: int, posted_s: float) -> None:
        try:
            running.wait()
        except Exception as error:
            work.finish(error)
            return
        # Under the lock, so that messages are delivered in the order of their times on the link.
        with self._lock:
            bytes_s = num_bytes / self._link.link.bytes_per_s
            started_s, due_s = self._link.reserve(ready_s=time.perf_counter(), bytes_s=bytes_s)
            self._delivery.submit(partial(self._deliver, work, num_bytes, posted_s, started_s, due_s))

    def _deliver(self, work: LinkWork, num_bytes: int, posted_s: float, started_s: float, due_s: float) -> None:
        done_s = sleep_until(due_s + self._link.link.hop_s)
        self._link.record("send", num_bytes, launched_s=posted_s, started_s=started_s, done_s=done_s)
        work.finish()


def sleep_until(due_s: float) -> float:
    """Sleeps until that time of `time.perf_counter` if it is in the future; returns the time afterwards."""
    while (now_s := time.perf_counter()) < due_s:
        time.sleep(due_s - now_s)
    return now_s
