"""A torch.distributed backend that puts an emulated link around gloo.

Every user of the group is delayed in the same way: this library, torch's C++ reducer, or a plain
loop:

    caller         launch ──────────────────────────────── wait
    group thread     └ last rank's launch · gloo · sleep until due ┘
    link                                [ started ── cost ── done )   one at a time, of any group

A collective ends no earlier than the link allows: `max(link free, launch of the last rank) + cost`,
with the cost of a ring (`cost.collective_seconds`).

The link is full duplex. A message occupies its sender's way out and then its receiver's way in, for
`bytes / bandwidth` each. It comes in while it goes out: gloo sends all of it when the way out is
free. So an early rank does not fill the way in of a late one. Senders share a way in, as with TCP:
a short message does not wait for a long one of another sender. A receive ends no earlier than
`max(way in free, message here) + bytes / bandwidth + latency`; the latency occupies no way. A link
shaped by a token bucket lets some bytes pass at once after a rest (`Way`).

    sender's thread      [ started ── bytes ── )                           one at a time
                           └ gloo sends
    caller             post ──────────────────────────────────────── wait
    thread of a sender       └ gloo has it · a slice reserved · ... · next one
    way in                               [ started ── bytes ── due )       in slices
    delivering thread                                            └ latency · done

Messages of one sender occupy a way in one after another; the latency of one does not delay the
next. Collectives occupy the way in only.

The link leaves out what a real one takes from processors: the kernel's copies and interrupts, and
threads of gloo that compete with computation while bytes flow. Here they sleep. So it shows how a
step overlaps, but not how long it takes on a real network: figures are measured over links that tc
shapes (`python -m benchmarks.shaped`).
"""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, partialmethod
from queue import SimpleQueue
from typing import Any, final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from undertow.cost import Link, collective_seconds
from undertow.ranks import patience

__all__ = ["BACKEND", "Carried", "EmulatedLink", "emulated_backend"]

BACKEND = "emulated"
_SLICE_S = 2e-3  # of the way in, at most, for each sender in turn: of 240 kB at 1 Gb/s
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
        _sleep_until(due_s)
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


@final
class Sends:
    """The sends of one group: gloo has each one when the link would begin to carry it."""

    def __init__(self, link: EmulatedLink, *, rank: int) -> None:
        self._link = link
        self._thread = TaskThread(f"undertow-send-{rank}")

    def post(self, start: Callable[[], dist.Work], tensors: list[Tensor]) -> SentWork:
        """Starts to send on gloo when the way out is free."""
        work = SentWork()
        send = partial(self._send, work, start, _num_bytes(tensors), time.perf_counter())
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
        _sleep_until(started_s)
        work.start(start())


@final
class Receives:
    """The receives of one group: each ends when the link would have carried its message.

    Receives from one sender end in the order they were posted, whatever their tags. Senders do not
    wait for each other, because one may be late, or send only after it has heard from another.
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
                work, partial(self._receive, work, running, _num_bytes(tensors), posted_s)
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
            _sleep_until(due_s)  # meanwhile other senders reserve
        deliver = partial(
            self._link.deliver, work, kind="send", num_bytes=num_bytes, launched_s=posted_s
        )
        due_s += self._link.link.hop_s
        self._delivery.submit(work, partial(deliver, started_s=starts_s[0], due_s=due_s))


def _sleep_until(until_s: float) -> None:
    while (now_s := time.perf_counter()) < until_s:
        time.sleep(until_s - now_s)


def _num_bytes(payload: Any) -> int:
    """Returns the bytes of a tensor, or of all tensors in (nested) lists."""
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    return sum(_num_bytes(part) for part in payload)


@contextmanager
def emulated_backend(link: Link, *, burst_bytes: int = 0) -> Iterator[EmulatedLink]:
    """Context that lets `dist.init_process_group("emulated", ...)` and `dist.new_group(...,
    backend="emulated")` use `link`.

    `burst_bytes` of payload pass at once after a rest if a token bucket (`tc tbf`) shapes the link;
    a cable has no burst. Destroy the process groups inside: at its end the threads of all groups
    end.
    """
    emulated = EmulatedLink(link, burst_bytes=burst_bytes)
    # weak, so that a group that torch destroys can be freed at once
    groups: WeakSet[_EmulatedGroup] = WeakSet()

    def make_group(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        group = _EmulatedGroup(emulated, store, rank, size, timeout)
        groups.add(group)
        return group

    dist.Backend.register_backend(BACKEND, make_group, devices=["cpu"])
    try:
        yield emulated
    finally:
        for group in tuple(groups):
            group.shutdown()


@final
class _EmulatedGroup(dist.ProcessGroup):
    """A process group whose collectives and receives run on an inner gloo group and take as long as
    the link needs.

    One thread per group keeps the order of collectives within the group, which is the same on every
    rank. Groups must not wait for each other: ranks may use two groups in different orders, and a
    shared thread would deadlock.
    """

    def __init__(
        self, link: EmulatedLink, store: Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        # Python subclasses have only this constructor, which the stub does not know.
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout)
        self.inner: dist.ProcessGroup = dist.ProcessGroup(store, rank, size)
        # torch asks a group for its devices and for methods that are not overridden here
        for group in (self.inner, self):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._link = link
        self._sends, self._receives = Sends(link, rank=rank), Receives(link, rank=rank)
        self._collectives = TaskThread(f"undertow-link-{rank}")

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    def send(self, tensors: list[Tensor], dest: int, tag: int) -> dist.Work:
        return self._sends.post(partial(self.inner.send, tensors, dest, tag), tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        return self._receives.post(
            partial(self.inner.recv, tensors, source, tag), tensors, source=source
        )

    def launch(
        self, name: str, kind: str, payload: int | None, *args: Any, **kwargs: Any
    ) -> dist.Work:
        """Passes the collective `name` to the group's thread.

        Argument number `payload` has its bytes.
        """
        num_parts = self.size() if kind in _PART_OF_A_RANK else 1
        num_bytes = 0 if payload is None else num_parts * _num_bytes(args[payload])
        start = partial(getattr(self.inner, name), *args, **kwargs)
        work = LinkWork(args[0] if args else None)
        self._collectives.submit(
            work, partial(self._carry, work, start, kind, num_bytes, time.perf_counter())
        )
        return work

    def shutdown(self) -> None:
        """Ends the group's threads after everything in flight; torch calls it when the group is
        destroyed.

        A thread that still waits for gloo keeps the inner group alive, whose destructor would wait
        too.
        """
        until_s = time.perf_counter() + patience.LINK_S
        self._sends.close(until_s)
        self._receives.close(until_s)
        self._collectives.close(until_s)

    abort = shutdown

    def _carry(
        self,
        work: LinkWork,
        start: Callable[[], dist.Work],
        kind: str,
        num_bytes: int,
        launched_s: float,
    ) -> None:
        """Runs one collective on gloo and ends its handle when the link would have carried it."""
        link = self._link.link
        ready_s = self._last_launch_s(launched_s)
        start().wait()
        latency_s = collective_seconds(link, kind, num_bytes=0, num_ranks=self.size())
        bytes_s = (
            collective_seconds(link, kind, num_bytes=num_bytes, num_ranks=self.size()) - latency_s
        )
        started_s, due_s = self._link.way_in.reserve(
            ready_s=ready_s, bytes_s=bytes_s, latency_s=latency_s
        )
        self._link.deliver(
            work,
            kind=kind,
            num_bytes=num_bytes,
            launched_s=launched_s,
            started_s=started_s,
            due_s=due_s,
        )

    def _last_launch_s(self, launched_s: float) -> float:
        """Returns the time of the last rank's launch.

        Ranks run on one machine and share its monotonic clock.
        """
        latest = torch.tensor([launched_s], dtype=torch.float64)
        self.inner.allreduce([latest], dist.ReduceOp.MAX).wait()
        return latest.item()


_PART_OF_A_RANK = ("gather", "scatter")  # their argument holds the part of one rank
# The argument that has the bytes of each kind of collective, and the methods, the last ones under
# their names in torch < 2.13.
_METHODS: dict[str, tuple[int | None, tuple[str, ...]]] = {
    "all_reduce": (0, ("allreduce", "allreduce_coalesced")),
    "broadcast": (0, ("broadcast",)),
    "reduce": (0, ("reduce",)),
    "all_gather": (
        0,
        (
            *(
                "allgather",
                "allgather_coalesced",
                "all_gather_single",
                "all_gather_single_coalesced",
            ),
            *("_allgather_base", "allgather_into_tensor_coalesced"),
        ),
    ),
    "reduce_scatter": (
        1,
        (
            *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
            *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
        ),
    ),
    "all_to_all": (1, ("alltoall", "all_to_all_single", "alltoall_base")),
    "gather": (1, ("gather",)),
    "scatter": (0, ("scatter",)),
    "barrier": (None, ("barrier",)),
}
for _kind, (_payload, _names) in _METHODS.items():
    for _name in _names:
        setattr(_EmulatedGroup, _name, partialmethod(_EmulatedGroup.launch, _name, _kind, _payload))
