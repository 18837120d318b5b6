"""A torch.distributed backend that puts an emulated link around gloo.

Every user of the group is delayed in the same way: this library, torch's C++ reducer, or a plain loop:

    caller         launch ──────────────────────────────── wait
    group thread     └ last rank's launch · gloo · sleep until due ┘
    link                                [ started ── cost ── done )   one collective at a time, whatever its group

A collective ends no earlier than the link allows: `max(link free, launch of the last rank) + cost`, with the cost of a ring
(`cost.collective_seconds`). A receive ends no earlier than `max(link free, message here) + bytes / bandwidth + latency`; the
latency does not occupy the link. Sends are not delayed, because each message is delayed at its receiver, and the link is full
duplex. A link shaped by a token bucket lets some bytes pass at once after a rest (`EmulatedLink`).
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from undertow.cost import Link, collective_seconds
from undertow.emulation.wire import EmulatedLink, LinkWork, Receives, TaskThread, Transfer, sleep_until
from undertow.errors import PhaseError
from undertow.runtime.peers import patience

__all__ = ["BACKEND", "EmulatedLink", "Transfer", "emulated_backend"]

BACKEND = "emulated"
_log = logging.getLogger("undertow")


@contextmanager
def emulated_backend(link: Link, *, burst_bytes: int = 0) -> Iterator[EmulatedLink]:
    """Context in which `dist.init_process_group("emulated", ...)` and `dist.new_group(..., backend="emulated")` use `link`.

    `burst_bytes` of payload pass at once after a rest if a token bucket (`tc tbf`) shapes the link; a cable has no burst. Destroy
    the process groups inside: at its end the threads of all groups end.
    """
    emulated = EmulatedLink(link, burst_bytes=burst_bytes)
    groups: WeakSet[_EmulatedGroup] | None = WeakSet()  # weak, so that a group that torch destroys can be freed at once

    def make_group(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        if groups is None:
            raise PhaseError(
                f"the emulated link {link.name!r} is closed.",
                where='init_process_group or new_group with backend="emulated"',
                remedy="Make process groups inside `with emulated_backend(link):`.",
            )
        group = _EmulatedGroup(emulated, store, rank, size, timeout)
        groups.add(group)
        return group

    dist.Backend.register_backend(BACKEND, make_group, devices=["cpu"])
    try:
        yield emulated
    finally:
        left, groups = tuple(groups or ()), None
        for group in left:
            group.shutdown()


def _num_bytes(payload: Any) -> int:
    """Returns the bytes of a tensor, or of all tensors in (nested) lists."""
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    return sum(_num_bytes(part) for part in payload)


@final
class _EmulatedGroup(dist.ProcessGroup):
    """A process group whose collectives and receives run on an inner gloo group and take as long as the link needs.

    One thread per group keeps the order of collectives within the group, which is the same on every rank. Groups must not wait
    for each other: ranks may use two groups in different orders, and a shared thread would deadlock.
    """

    def __init__(self, link: EmulatedLink, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # Python subclasses have only this constructor, which the stub does not know.
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout)
        self.inner: dist.ProcessGroup = dist.ProcessGroup(store, rank, size)
        for group in (self.inner, self):  # torch asks a group for its devices and for methods that are not overridden here
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._link = link
        self._receives = Receives(link, rank=rank)
        self._collectives = TaskThread(f"undertow-link-{rank}")

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work:
        return self.inner.send(tensors, target, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        return self._receive(partial(self.inner.recv, tensors, source, tag), tensors, source=source)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self._receive(partial(self.inner.recv_anysource, tensors, tag), tensors, source=None)

    def launch(self, kind: str, num_bytes: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        """Passes a collective to the group's thread, or directly to gloo if the link is free."""
        launched_s = time.perf_counter()
        start: Callable[[], dist.Work] = partial(getattr(self.inner, name), *args, **kwargs)
        if self._link.link.is_free:
            running = start()
            if self._record_when_done(running, kind, num_bytes, launched_s):
                return running
            start = partial(_identity, running)
        work = LinkWork(args[0] if args else None)
        self._collectives.submit(partial(self._carry, work, start, kind, num_bytes, launched_s))
        return work

    def shutdown(self) -> None:
        """Ends the group's threads after everything in flight; torch calls it when the group is destroyed."""
        until_s = time.perf_counter() + patience.LINK_S
        self._receives.close(until_s)
        if not self._collectives.close(until_s):
            # The thread keeps the inner group alive: gloo's destructor would block on the same collective.
            _log.warning("an emulated group of rank %d was closed with a collective in flight.", self.rank())

    def abort(self) -> None:
        self.shutdown()

    def _receive(self, start: Callable[[], dist.Work], tensors: list[Tensor], *, source: int | None) -> dist.Work:
        # Not on the collectives' thread: ranks may order receives and collectives differently.
        return start() if self._link.link.is_free else self._receives.post(start, tensors, source=source)

    def _carry(self, work: LinkWork, start: Callable[[], dist.Work], kind: str, num_bytes: int, launched_s: float) -> None:
        """Runs one collective on gloo and ends its handle when the link would have carried it."""
        link = self._link.link
        try:
            ready_s = launched_s if link.is_free else self._last_launch_s(launched_s)
            start().wait()
            cost_s, latency_s = (collective_seconds(link, kind, num_bytes=it, num_ranks=self.size()) for it in (num_bytes, 0))
            started_s, due_s = self._link.reserve(ready_s=ready_s, bytes_s=cost_s - latency_s, latency_s=latency_s)
            done_s = sleep_until(due_s)
            self._link.record(kind, num_bytes, launched_s=launched_s, started_s=started_s, done_s=done_s)
        except Exception as error:
            work.finish(error)
        else:
            work.finish()

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
        link = self._link  # not self, because the callback would keep the group alive

        def record(_: object) -> None:
            link.record(kind, num_bytes, launched_s=launched_s, started_s=launched_s, done_s=time.perf_counter())

        future.add_done_callback(record)
        return True


def _identity(work: dist.Work) -> dist.Work:
    return work


def _collective(kind: str, name: str, *, payload: int | None, is_per_rank: bool) -> Callable[..., dist.Work]:
    """Returns the group method `name`. Argument number `payload` has the bytes, times the ranks if it holds one rank's part."""

    def method(self: _EmulatedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        num_bytes = 0 if payload is None else _num_bytes(args[payload]) * (self.size() if is_per_rank else 1)
        return self.launch(kind, num_bytes, name, args, kwargs)

    return method


# The argument that has the bytes of each kind of collective, and the methods, the last ones under their names in torch < 2.13.
_METHODS: dict[str, tuple[int | None, tuple[str, ...]]] = {
    "all_reduce": (0, ("allreduce", "allreduce_coalesced")),
    "broadcast": (0, ("broadcast",)),
    "reduce": (0, ("reduce",)),
    "all_gather": (
        0,
        (
            *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
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
        _method = _collective(_kind, _name, payload=_payload, is_per_rank=_kind in ("gather", "scatter"))
        setattr(_EmulatedGroup, _name, _method)
