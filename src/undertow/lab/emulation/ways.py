"""The two ways of an emulated link, in and out: when each is free, and what it has carried."""

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import final

from undertow.lab.cost import Link
from undertow.lab.emulation.works import LinkWork

_LOG_LENGTH = 65_536  # limits the memory of a training run that never takes its log


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A collective, or the receive of one message (kind "send"), as the link saw it.

    In seconds of `time.perf_counter`.
    """

    kind: str
    num_bytes: int  # of the whole tensor; for a receive, of the message
    launched_s: float  # on this rank
    # when the link was free and the last rank had launched or the message had arrived
    started_s: float
    done_s: float


@final
class Way:
    """One direction of a link, which carries one transfer after another.

    `burst_s` of bytes pass at once after a rest: the contents of a full token bucket.
    """

    def __init__(self, burst_s: float) -> None:
        self._burst_s = burst_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        # when the tokens for everything carried so far are there: the bucket as a virtual clock
        self._paid_at_s = 0.0

    def reserve(
        self, *, ready_s: float, bytes_s: float, latency_s: float = 0.0
    ) -> tuple[float, float]:
        """Reserves the next free interval from `ready_s` on, for bytes and then a latency;
        returns its start and end.

        The bucket is the generic cell rate algorithm (ITU-T I.371). Latencies refill it; here they
        all follow the bytes.
        """
        with self._lock:
            started_s = max(self._free_at_s, ready_s)
            self._paid_at_s = max(self._paid_at_s, started_s - self._burst_s) + bytes_s
            self._free_at_s = max(self._paid_at_s, started_s) + latency_s
            return started_s, self._free_at_s


@final
class EmulatedLink:
    """This process's link to the network, of all its groups."""

    def __init__(self, link: Link, *, burst_bytes: int = 0) -> None:
        """`burst_bytes` of payload pass at once after a rest, in each direction."""
        self.link = link
        burst_s = burst_bytes / link.bytes_per_s
        self.way_in, self.way_out = Way(burst_s), Way(burst_s)
        self.log: deque[Carried] = deque(maxlen=_LOG_LENGTH)  # transfers that have ended

    def deliver(
        self,
        work: LinkWork,
        *,
        kind: str,
        num_bytes: int,
        launched_s: float,
        started_s: float,
        due_s: float,
    ) -> None:
        """Waits until `due_s`, logs the transfer, and ends its handle."""
        sleep_until(due_s)
        self.log.append(
            Carried(
                kind=kind,
                num_bytes=num_bytes,
                launched_s=launched_s,
                started_s=started_s,
                done_s=time.perf_counter(),
            )
        )
        work.finish()

    def drain_log(self) -> tuple[Carried, ...]:
        """Returns all transfers that ended since the last call, in the order they ended."""
        return tuple(self.log.popleft() for _ in range(len(self.log)))


def sleep_until(until_s: float) -> None:
    while (now_s := time.perf_counter()) < until_s:
        time.sleep(until_s - now_s)
