"""Receives over an emulated link: a receive ends when the link would have carried its message.

    caller             post ──────────────────────────────────────── wait
    thread of a sender   └ gloo has it · time reserved · next one
    link                                 [ started ── bytes ── due )       one message or collective at a time
    delivering thread                                            └ latency · done

Messages occupy the link one after another, in the order of their arrival; the latency of one does not delay the next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import final

import torch.distributed as dist
from torch import Tensor

from undertow.emulation.wire import LinkWork, Transfer, Wire, sleep_until

__all__ = ["Receives"]

_log = logging.getLogger("undertow")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Receive:
    """One receive that gloo has begun."""

    num_bytes: int
    posted_s: float
    running: dist.Work  # gloo's handle
    work: LinkWork


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrived:
    """A message that gloo has received, and its time on the link."""

    receive: _Receive
    started_s: float
    due_s: float


@final
class Receives:
    """The receives of one group.

    Receives from one sender end in the order in which they were posted, whatever their tags. Senders do not wait for each other,
    because one may be late, or send only after it has heard from another.
    """

    def __init__(self, wire: Wire, *, rank: int) -> None:
        self._wire = wire
        self._rank = rank
        self._lock = threading.Lock()
        self._posted: dict[int | None, SimpleQueue[_Receive | None]] = {}  # by sender; None: any
        self._arrived: SimpleQueue[_Arrived | None] = SimpleQueue()
        self._waiting: list[threading.Thread] = []
        self._delivering: threading.Thread | None = None

    def post(self, start: Callable[[], dist.Work], tensors: list[Tensor], *, source: int | None) -> LinkWork:
        """Starts a receive on gloo; the returned handle ends when the link has carried the message."""
        posted_s = time.perf_counter()
        running = start()
        work = LinkWork(tensors, source_rank=running._source_rank)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        receive = _Receive(num_bytes=num_bytes, posted_s=posted_s, running=running, work=work)
        self._queue_of(source).put(receive)
        return work

    def close(self, grace_s: float) -> None:
        """Ends the threads after every message has arrived, or after `grace_s`."""
        until_s = time.perf_counter() + grace_s
        with self._lock:
            posted, waiting, delivering = list(self._posted.values()), list(self._waiting), self._delivering
            self._posted.clear()
            self._waiting.clear()
            self._delivering = None
        for queue in posted:
            queue.put(None)
        for thread in waiting:
            thread.join(max(0.0, until_s - time.perf_counter()))
        if delivering is None:
            return
        self._arrived.put(None)
        delivering.join(max(0.0, until_s - time.perf_counter()))
        if any(thread.is_alive() for thread in (*waiting, delivering)):
            _log.warning("an emulated group of rank %d was closed with a receive in flight.", self._rank)

    def _queue_of(self, source: int | None) -> SimpleQueue[_Receive | None]:
        """Returns the queue of receives from `source`; the first call starts the threads."""
        with self._lock:
            if source not in self._posted:
                queue = self._posted[source] = SimpleQueue()
                self._waiting.append(self._thread(lambda: self._wait_for_messages(queue)))
            if self._delivering is None:
                self._delivering = self._thread(self._deliver)
            return self._posted[source]

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"undertow-receive-{self._rank}", daemon=True)
        thread.start()
        return thread

    def _wait_for_messages(self, posted: SimpleQueue[_Receive | None]) -> None:
        while (receive := posted.get()) is not None:
            try:
                receive.running.wait()
            except Exception as error:
                receive.work.finish(error)
            else:
                self._arrive(receive)
            # Otherwise the tensors of this receive would stay alive until the next one.
            del receive

    def _arrive(self, receive: _Receive) -> None:
        # Under the lock, so that messages are delivered in the order of their times on the link.
        with self._lock:
            bytes_s = receive.num_bytes / self._wire.link.bytes_per_s
            started_s, due_s = self._wire.reserve(ready_s=time.perf_counter(), bytes_s=bytes_s)
            self._arrived.put(_Arrived(receive=receive, started_s=started_s, due_s=due_s))

    def _deliver(self) -> None:
        while (arrived := self._arrived.get()) is not None:
            done_s = sleep_until(arrived.due_s + self._wire.link.hop_s)
            receive = arrived.receive
            transfer = Transfer(
                kind="send",
                num_bytes=receive.num_bytes,
                launched_s=receive.posted_s,
                started_s=arrived.started_s,
                done_s=done_s,
            )
            self._wire.record(transfer)
            receive.work.finish()
            del arrived, receive
