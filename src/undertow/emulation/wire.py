"""The schedule of an emulated link: the transfers that occupy it, their log, and their handles."""

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

_LOG_LENGTH = 65_536  # limits the memory of a training run that never takes its log


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective, or the receive of one message (kind "send"), as the link saw it; in seconds of `time.perf_counter`."""

    kind: str
    num_bytes: int  # of the whole tensor; for a receive, of the message
    launched_s: float  # on this rank
    started_s: float  # when the link was free and the last rank had launched or the message had arrived
    done_s: float


@final
class Wire:
    """This process's link to the network, full duplex; it carries one transfer after another."""

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

    def record(self, transfer: Transfer) -> None:
        with self._lock:
            self._log.append(transfer)

    def take_log(self) -> tuple[Transfer, ...]:
        """Returns all transfers that ended since the last call, in the order in which they ended."""
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
        if self._ask_source is None:
            raise RuntimeError("Only a receive has a source.")
        return self._ask_source()


def sleep_until(due_s: float) -> float:
    """Sleeps until that time of `time.perf_counter` if it is in the future; returns the time afterwards."""
    while (now_s := time.perf_counter()) < due_s:
        time.sleep(due_s - now_s)
    return now_s
