"""The time on an emulated link: what occupies it, what it has carried, and the handles of what it carries."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from undertow.cost import Link

__all__ = ["LinkWork", "Transfer", "Wire", "sleep_until"]

_LOG_LENGTH = 65_536  # a training run that never asks for its log must not grow without end


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective, or the receive of one message (kind "send"), as the link saw it; seconds of `time.perf_counter`."""

    kind: str
    num_bytes: int  # the whole payload, as the full tensor has it; of a receive, the message
    launched_s: float  # on this rank
    started_s: float  # the link was free, and the last rank had launched or the message had come
    done_s: float


@final
class Wire:
    """The link of this process to the network, full duplex: it carries one thing after another."""

    def __init__(self, link: Link, *, burst_bytes: int = 0) -> None:
        """Of what is carried after a rest `burst_bytes` of payload pass at once: what a token bucket holds that has filled up."""
        self.link = link
        self._burst_s = burst_bytes / link.bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._paid_at_s = 0.0  # when the tokens for all that has been carried are there: the bucket as a virtual clock
        self._log: deque[Transfer] = deque(maxlen=_LOG_LENGTH)

    def reserve(self, *, ready_s: float, bytes_s: float, latency_s: float = 0.0) -> tuple[float, float]:
        """Start and end of the link's next free stretch that does not begin before `ready_s`, for bytes and then a latency.

        The bucket is the generic cell rate algorithm's (ITU-T I.371). It fills in latencies, here all behind the bytes.
        """
        with self._lock:
            started_s = max(self._free_at_s, ready_s)
            self._paid_at_s = max(self._paid_at_s, started_s - self._burst_s) + bytes_s
            self._free_at_s = max(self._paid_at_s, started_s) + latency_s
            return started_s, self._free_at_s

    def record(self, transfer: Transfer) -> None:
        with self._lock:
            self._log.append(transfer)

    def take_log(self) -> tuple[Transfer, ...]:
        """All transfers that are done and were not taken before, in the order in which they were done."""
        with self._lock:
            taken = tuple(self._log)
            self._log.clear()
        return taken


@final
class LinkWork(dist.Work):
    """Handle of something that the link carries; a thread of ours says when it is done.

    Written out because torch's own handle of a future cannot wait with a timeout, and that of a receive has no future.
    """

    def __init__(self, result: Any, *, source_rank: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._result = result
        self._ask_source = source_rank  # of a receive
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._is_finished = threading.Event()

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)
        # Last, so that whoever has waited sees a future that is done as well.
        self._is_finished.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until it is done; a timeout of zero means none (as in torch)."""
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
        """Who has sent it: torch.distributed.recv asks where the caller has named nobody."""
        if self._ask_source is None:
            raise RuntimeError("Only a receive has a source.")
        return self._ask_source()


def sleep_until(due_s: float) -> float:
    """Sleeps until that time of `time.perf_counter`, or not at all; returns the time it is then."""
    while (now_s := time.perf_counter()) < due_s:
        time.sleep(due_s - now_s)
    return now_s
