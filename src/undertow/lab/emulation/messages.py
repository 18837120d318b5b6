"""Messages between two ranks over an emulated link: when each leaves, and when it has arrived."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.lab.emulation.ways import EmulatedLink, sleep_until
from undertow.lab.emulation.works import LinkWork, SentWork, TaskThread

_SLICE_S = 2e-3  # of the way in, at most, for each sender in turn: of 240 kB at 1 Gb/s


@final
class Sends:
    """The sends of one group: gloo has each one when the link would begin to carry it."""

    def __init__(self, link: EmulatedLink, *, rank: int) -> None:
        self._link = link
        self._thread = TaskThread(f"undertow-send-{rank}")

    def post(self, start: Callable[[], dist.Work], tensors: list[Tensor]) -> SentWork:
        """Starts to send on gloo when the way out is free."""
        work = SentWork()
        send = partial(self._send, work, start, num_bytes_of(tensors), time.perf_counter())
        self._thread.submit(work, send)
        return work

    def close(self, until_s: float) -> None:
        """Ends the thread after every message has left, or at `until_s`."""
        self._thread.close(until_s)

    def _send(
        self, work: SentWork, start: Callable[[], dist.Work], num_bytes: int, posted_s: float
    ) -> None:
        bytes_s = num_bytes / self._link.link.bytes_per_s
        started_s, _ = self._link.way_out.reserve(ready_s=posted_s, bytes_s=bytes_s)
        sleep_until(started_s)
        work.start(start())


@final
class Receives:
    """The receives of one group: each ends when the link would have carried its message.

    Receives from one sender end in the order they were posted, with any tags. Senders do not wait
    for each other, because one may be late, or send only after it has heard from another.
    """

    def __init__(self, link: EmulatedLink, *, rank: int) -> None:
        self._link = link
        self._rank = rank
        self._lock = threading.Lock()
        new_thread = partial(TaskThread, f"undertow-receive-{rank}")
        self._senders: defaultdict[int, TaskThread] = defaultdict(new_thread)
        self._delivery = new_thread()

    def post(
        self, start: Callable[[], dist.Work], tensors: list[Tensor], *, source: int
    ) -> LinkWork:
        """Starts a receive on gloo; the returned handle ends when the link has carried the
        message."""
        posted_s = time.perf_counter()
        running = start()
        work = LinkWork(tensors)
        with self._lock:
            self._senders[source].submit(
                work, partial(self._receive, work, running, num_bytes_of(tensors), posted_s)
            )
        return work

    def close(self, until_s: float) -> None:
        """Ends the threads after every message has arrived, or at `until_s`."""
        with self._lock:
            senders = list(self._senders.values())
            self._senders.clear()
        for thread in (*senders, self._delivery):
            thread.close(until_s)

    def _receive(self, work: LinkWork, running: dist.Work, num_bytes: int, posted_s: float) -> None:
        running.wait()
        due_s = time.perf_counter()
        bytes_s = num_bytes / self._link.link.bytes_per_s
        num_slices = max(1, math.ceil(bytes_s / _SLICE_S))
        starts_s = []
        for _ in range(num_slices):
            start_s, due_s = self._link.way_in.reserve(ready_s=due_s, bytes_s=bytes_s / num_slices)
            starts_s.append(start_s)
            sleep_until(due_s)  # other senders reserve at that time
        deliver = partial(
            self._link.deliver, work, kind="send", num_bytes=num_bytes, launched_s=posted_s
        )
        due_s += self._link.link.hop_s
        self._delivery.submit(work, partial(deliver, started_s=starts_s[0], due_s=due_s))


def num_bytes_of(payload: Any) -> int:
    """Returns the bytes of a tensor, or of all tensors in (nested) lists."""
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    return sum(num_bytes_of(part) for part in payload)
