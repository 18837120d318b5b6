"""A torch.distributed backend that puts an emulated link around gloo.

Every user of the group is delayed in the same way: this library, torch's C++ reducer, or a plain loop:

    caller         launch ──────────────────────────────── wait
    group thread     └ last rank's launch · gloo · sleep until due ┘
    link                                [ started ── cost ── done )   one collective at a time, whatever its group

A collective ends no earlier than the link allows: `max(link free, launch of the last rank) + cost`, with the cost of a ring
(`cost.collective_seconds`). A receive ends no earlier than `max(link free, message here) + bytes / bandwidth + latency`; the
latency does not occupy the link. Sends are not delayed, because each message is delayed at its receiver, and the link is full
duplex. A link shaped by a token bucket lets some bytes pass at once after a rest (`Wire`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from undertow.cost import Link, collective_seconds
from undertow.emulation.receives import Receives
from undertow.emulation.wire import LinkWork, Transfer, Wire, sleep_until
from undertow.errors import PhaseError
from undertow.runtime.peers import patience

__all__ = ["BACKEND", "EmulatedLink", "Transfer", "emulated_backend"]

BACKEND = "emulated"
_log = logging.getLogger("undertow")


@final
class EmulatedLink:
    """The link of this process, shared by all groups that are created while it is registered."""

    def __init__(self, link: Link, *, burst_bytes: int = 0) -> None:
        self.wire = Wire(link, burst_bytes=burst_bytes)
        self._groups: WeakSet[_EmulatedGroup] = WeakSet()  # weak, so that a group that torch destroys can be freed at once
        self._is_closed = False

    def register(self) -> None:
        """Registers `backend="emulated"` with torch.distributed; new groups use the link registered last."""
        dist.Backend.register_backend(BACKEND, self._make_group, devices=["cpu"])

    def take_log(self) -> tuple[Transfer, ...]:
        """Returns all transfers that ended since the last call, in the order in which they ended.

        On a free link, receives are missing: gloo's own handles do not tell when they end.
        """
        return self.wire.take_log()

    def close(self) -> None:
        """Ends the threads of all groups. Destroy the process groups first."""
        self._is_closed = True
        for group in tuple(self._groups):
            group.shutdown()

    def _make_group(self, store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        if self._is_closed:
            raise PhaseError(
                f"the emulated link {self.wire.link.name!r} is closed.",
                where='init_process_group or new_group with backend="emulated"',
                remedy="Make process groups inside `with emulated_backend(link):`.",
            )
        group = _EmulatedGroup(self.wire, store, rank, size, timeout)
        self._groups.add(group)
        return group


@contextmanager
def emulated_backend(link: Link, *, burst_bytes: int = 0) -> Iterator[EmulatedLink]:
    """Context in which `dist.init_process_group("emulated", ...)` and `dist.new_group(..., backend="emulated")` use `link`.

    `burst_bytes` of payload pass at once after a rest if a token bucket (`tc tbf`) shapes the link; a cable has no burst.
    """
    emulated = EmulatedLink(link, burst_bytes=burst_bytes)
    emulated.register()
    try:
        yield emulated
    finally:
        emulated.close()


def _num_bytes(payload: Any) -> int:
    """Returns the bytes of a tensor, or of all tensors in (nested) lists."""
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    return sum(_num_bytes(part) for part in payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """The arguments of one collective for a group's thread."""

    kind: str
    num_bytes: int
    launched_s: float
    start: Callable[[], dist.Work]
    work: LinkWork


def _identity(work: dist.Work) -> dist.Work:
    return work


def _collective(kind: str, name: str, *, payload: int | None, is_per_rank: bool = False) -> Callable[..., dist.Work]:
    """Returns the group method `name`. Argument number `payload` has the bytes, times the ranks if it holds one rank's part."""

    def method(self: _EmulatedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        num_bytes = 0 if payload is None else _num_bytes(args[payload]) * (self.size() if is_per_rank else 1)
        return self.launch(kind, num_bytes, name, args, kwargs)

    method.__name__ = method.__qualname__ = name
    return method


def _pass_through(name: str) -> Callable[..., dist.Work]:
    def method(self: _EmulatedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        work: dist.Work = getattr(self.inner, name)(*args, **kwargs)
        return work

    method.__name__ = method.__qualname__ = name
    return method


@final
class _EmulatedGroup(dist.ProcessGroup):
    """A process group whose collectives and receives run on an inner gloo group and take as long as the link needs.

    One thread per group keeps the order of collectives within the group, which is the same on every rank. Groups must not wait
    for each other: ranks may use two groups in different orders, and a shared thread would deadlock.
    """

    def __init__(self, wire: Wire, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # Python subclasses have only this constructor, which the stub does not know.
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout)
        self.inner: dist.ProcessGroup = dist.ProcessGroup(store, rank, size)
        for group in (self.inner, self):  # torch asks a group for its devices and for methods that are not overridden here
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._wire = wire
        self._receives = Receives(wire, rank=rank)
        self._launches: SimpleQueue[_Launch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    allreduce = _collective("all_reduce", "allreduce", payload=0)
    allreduce_coalesced = _collective("all_reduce", "allreduce_coalesced", payload=0)
    broadcast = _collective("broadcast", "broadcast", payload=0)
    reduce = _collective("reduce", "reduce", payload=0)
    allgather = _collective("all_gather", "allgather", payload=0)
    allgather_coalesced = _collective("all_gather", "allgather_coalesced", payload=0)
    all_gather_single = _collective("all_gather", "all_gather_single", payload=0)
    all_gather_single_coalesced = _collective("all_gather", "all_gather_single_coalesced", payload=0)
    reduce_scatter = _collective("reduce_scatter", "reduce_scatter", payload=1)
    reduce_scatter_single = _collective("reduce_scatter", "reduce_scatter_single", payload=1)
    reduce_scatter_single_coalesced = _collective("reduce_scatter", "reduce_scatter_single_coalesced", payload=1)
    alltoall = _collective("all_to_all", "alltoall", payload=1)
    all_to_all_single = _collective("all_to_all", "all_to_all_single", payload=1)
    gather = _collective("gather", "gather", payload=1, is_per_rank=True)
    scatter = _collective("scatter", "scatter", payload=0, is_per_rank=True)
    barrier = _collective("barrier", "barrier", payload=None)
    # The same methods under their names in torch < 2.13.
    _allgather_base = _collective("all_gather", "_allgather_base", payload=0)
    allgather_into_tensor_coalesced = _collective("all_gather", "allgather_into_tensor_coalesced", payload=0)
    _reduce_scatter_base = _collective("reduce_scatter", "_reduce_scatter_base", payload=1)
    reduce_scatter_tensor_coalesced = _collective("reduce_scatter", "reduce_scatter_tensor_coalesced", payload=1)
    alltoall_base = _collective("all_to_all", "alltoall_base", payload=1)
    send = _pass_through("send")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        return self._receive(partial(self.inner.recv, tensors, source, tag), tensors, source=source)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self._receive(partial(self.inner.recv_anysource, tensors, tag), tensors, source=None)

    def launch(self, kind: str, num_bytes: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        """Passes a collective to the group's thread, or directly to gloo if the link is free."""
        launched_s = time.perf_counter()
        start: Callable[[], dist.Work] = partial(getattr(self.inner, name), *args, **kwargs)
        if self._wire.link.is_free:
            running = start()
            if self._record_when_done(running, kind, num_bytes, launched_s):
                return running
            start = partial(_identity, running)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"undertow-link-{self.rank()}", daemon=True)
            thread.start()
            # Set after the start, because `shutdown` joins it and cannot join a thread that has not started.
            self._thread = thread
        work = LinkWork(args[0] if args else None)
        self._launches.put(_Launch(kind=kind, num_bytes=num_bytes, launched_s=launched_s, start=start, work=work))
        return work

    def shutdown(self) -> None:
        """Ends the group's threads after everything in flight; torch calls it when the group is destroyed."""
        self._receives.close(patience.LINK_S)
        if self._thread is None:
            return
        self._launches.put(None)
        self._thread.join(patience.LINK_S)
        if self._thread.is_alive():
            # The thread keeps the inner group alive: gloo's destructor would block on the same collective.
            _log.warning("an emulated group of rank %d was closed with a collective in flight.", self.rank())
        self._thread = None

    def abort(self) -> None:
        self.shutdown()

    def _receive(self, start: Callable[[], dist.Work], tensors: list[Tensor], *, source: int | None) -> dist.Work:
        # Not on the collectives' thread: ranks may order receives and collectives differently.
        return start() if self._wire.link.is_free else self._receives.post(start, tensors, source=source)

    def _run(self) -> None:
        while (launch := self._launches.get()) is not None:
            try:
                self._carry(launch)
            except Exception as error:
                launch.work.finish(error)
            else:
                launch.work.finish()
            # Otherwise the tensors of this collective would stay alive until the next one.
            del launch

    def _carry(self, launch: _Launch) -> None:
        """Runs one collective on gloo and returns when the link would have carried it."""
        link = self._wire.link
        ready_s = launch.launched_s if link.is_free else self._last_launch_s(launch.launched_s)
        launch.start().wait()
        cost_s, latency_s = (
            collective_seconds(link, launch.kind, num_bytes=it, num_ranks=self.size()) for it in (launch.num_bytes, 0)
        )
        started_s, due_s = self._wire.reserve(ready_s=ready_s, bytes_s=cost_s - latency_s, latency_s=latency_s)
        done_s = sleep_until(due_s)
        self._wire.record(
            Transfer(
                kind=launch.kind,
                num_bytes=launch.num_bytes,
                launched_s=launch.launched_s,
                started_s=started_s,
                done_s=done_s,
            )
        )

    def _last_launch_s(self, launched_s: float) -> float:
        """Returns the time of the last rank's launch; ranks run on one machine and share its monotonic clock."""
        latest = torch.tensor([launched_s], dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # the stub lacks the implicit conversion
        self.inner.allreduce([latest], options).wait()
        return latest.item()

    def _record_when_done(self, work: dist.Work, kind: str, num_bytes: int, launched_s: float) -> bool:
        """Records the transfer when gloo's work ends; returns False if the work cannot tell (2.13: reduce_scatter)."""
        try:
            future = work.get_future()
        except RuntimeError:
            return False
        wire = self._wire  # not self, because the callback would keep the group alive

        def record(_: object) -> None:
            done_s = time.perf_counter()
            wire.record(Transfer(kind=kind, num_bytes=num_bytes, launched_s=launched_s, started_s=launched_s, done_s=done_s))

        future.add_done_callback(record)
        return True
