"""A torch.distributed backend that puts an emulated link around gloo.

Every user of the group is delayed in the same way: this library, torch's C++ reducer, or a plain
loop:

    caller         launch ──────────────────────────────── wait
    group thread     └ last rank's launch · gloo · sleep until due ┘
    link                                [ started ── cost ── done )   one at a time, of any group

A collective ends no earlier than the link allows: `max(link free, launch of the last rank) + cost`,
with the cost of a ring (`cost.collective_seconds`).

The link is full duplex. A message occupies its sender's way out and then its receiver's way in, for
`bytes / bandwidth` each. It arrives while it is sent: gloo sends all of it when the way out is
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

The link leaves out the processor time of a real one: the kernel's copies and interrupts, and
threads of gloo that compete with computation while bytes flow. Here they sleep. So it shows how a
step overlaps, but not how long it takes on a real network: figures are measured over links that tc
shapes (`python -m benchmarks.shaped`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any, final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from undertow.lab.cost import Link, collective_seconds
from undertow.lab.emulation.messages import Receives, Sends, num_bytes_of
from undertow.lab.emulation.ways import Carried, EmulatedLink
from undertow.lab.emulation.works import LinkWork, TaskThread
from undertow.ranks import patience

__all__ = ["BACKEND", "Carried", "EmulatedLink", "emulated_backend"]

BACKEND = "emulated"


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
        num_bytes = 0 if payload is None else num_parts * num_bytes_of(args[payload])
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
