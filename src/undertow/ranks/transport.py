"""Undertow's process groups, each a clone of a group of the user's, and the messages over them.

No other file makes groups or calls collectives of torch.distributed, except `users_groups`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.config import SyncConfig
from undertow.device import device_of
from undertow.errors import PhaseError, UndertowError
from undertow.ranks import faults, patience
from undertow.ranks.activity import Activity
from undertow.ranks.descriptors import why_too_few
from undertow.ranks.faults import raised
from undertow.ranks.group import Abilities, GroupRef, family_of, tell_of_unknown
from undertow.ranks.guard import watch_over
from undertow.ranks.handle import Handle, ThreadWork, Waiter, Work
from undertow.ranks.meeting import meet
from undertow.ranks.threads import Worker
from undertow.ranks.torch_group import TorchGroup
from undertow.ranks.watch import NullWatch, Watch
from undertow.torch_private import process_groups

_CLOSED = NullWatch()  # of groups that are closed
# The backend's own collectives on one tensor; torch < 2.13 has the second names.
_reduce_scatter: Callable[..., Work] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_gather: Callable[..., Work] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class OwnGroup:
    """A clone of the user's process group, so that Undertow's collectives never interleave with the
    user's own.

    `open` creates it. A group may be `within` another one that has all its ranks; then the two
    share faults, and a fault interrupts waits over either. With `is_axis` that one has all ranks of
    a mesh, and this one is the data axis at one place of the other axes.
    """

    def __init__(
        self,
        user: GroupRef,
        *,
        device: torch.device,
        limits: SyncConfig,
        within: OwnGroup | None = None,
        is_axis: bool = False,
    ) -> None:
        self.user = user
        self.rank = user.rank
        self.num_ranks = len(user.ranks)
        self.backend = user.backend_for(device)
        self.hardware = device_of(device)
        # over the other ranks, from `open` on
        self.watch: Watch | NullWatch = NullWatch()
        self.waiter = Waiter(self.watch, self.hardware.is_host)
        # the ranks that must agree on the model
        self.everyone: OwnGroup = within if within is not None and is_axis else self
        self.here: Activity = Activity() if self.everyone is self else self.everyone.here
        # the ranks that choose plans together: of a mesh all, if places have parts of equal sizes
        self.deciding: OwnGroup = self
        self.torch_group = TorchGroup(clone_of=user)  # the clone, from `open` on
        self.borrowers = self.torch_group.borrowers
        self._within = within
        self.limits = limits
        self.is_open = False

    @cached_property
    def names(self) -> Sequence[int]:
        """Its ranks as errors number them: by their places in the group that it is within."""
        if self._within is None:
            return range(self.num_ranks)
        places, names = self._within.user.places, self._within.names
        return [names[places[rank]] for rank in self.user.ranks]

    @property
    def is_on_mesh(self) -> bool:
        """True if the ranks of other axes of a mesh must agree on the model too."""
        return self.everyone is not self

    @property
    def name(self) -> int:
        """This rank as errors number it."""
        return self.names[self.rank]

    @cached_property
    def device(self) -> torch.device:
        """The place of small tensors that ranks exchange."""
        return self.hardware.place

    @cached_property
    def can(self) -> Abilities:
        """The abilities of the backend."""
        if self.rank == 0:
            tell_of_unknown(self.backend)
        return self.user.abilities_for(self.device)

    def open(self) -> None:
        """Creates the clone; a collective call before any other over it.

        A group `within` another one opens that one first.
        """
        if self._within is not None and not self._within.is_open:
            self._within.open()
        ranks, timeout = self.user.ranks, self.user.timeout
        within_s = patience.GROUP_S if timeout is None else timeout.total_seconds()
        if self.num_ranks == 1:
            self._follow(self._clone(process_groups.new_name()))
            return
        if self._within is None:
            self.here.thread = threading.get_ident()  # until another thread trains
            self.watch = watch_over(ranks, self.rank, self.limits, self.here, within_s=within_s)
        else:
            self.watch = self._within.watch
        self.waiter = Waiter(self.watch, self.hardware.is_host)
        self.watch.groups.append(weakref.ref(self.torch_group))
        what = "all ranks, to make a process group"
        self.makes_call(what)
        with self.waiting(what):
            name = meet(
                ranks,
                self.rank,
                self.limits,
                self.watch,
                within_s=within_s,
                obstacle=self._obstacle(),
            )
            self._follow(self._made(name))

    def _follow(self, clone: dist.ProcessGroup) -> None:
        self.torch_group.weak = weakref.ref(clone)
        self.is_open = True

    def _obstacle(self) -> str:
        """Returns why this rank cannot make the clone, as `meet` takes it, or an empty text."""
        if family_of(self.backend) != "gloo":  # which connects each rank to every other one
            return ""
        return why_too_few(self.num_ranks, rank=self.name)

    def _made(self, name: str) -> dist.ProcessGroup:
        """Returns the clone, a process group of this name.

        Gloo connects in a separate thread. If a rank is gone, that thread would wait forever, and
        it is abandoned.
        """
        if family_of(self.backend) != "gloo":
            return self._clone(name)
        made = ThreadWork()
        thread = self.worker("undertow-connects")
        thread.submit(made.run, partial(self._clone, name))
        thread.shutdown()
        self.waiter.complete(made)
        return cast(dist.ProcessGroup, made.result())

    def _clone(self, name: str) -> dist.ProcessGroup:
        return process_groups.new_group(self.user.ranks, self.user.backend, self.user.timeout, name)

    @cached_property
    def _callers(self) -> tuple[int, ...]:
        """Its ranks as `makes_call` has them: compact if it has all that watch over each other."""
        return () if self._within is None else tuple(self.names)

    def makes_call(self, name: str) -> None:
        """Counts a collective call of all its ranks, in the order of the program: ranks that wait
        compare these counts."""
        self.watch.makes_call(name, self._callers)

    def tell_places(self, error: UndertowError) -> None:
        """Called before an error that all ranks of this data axis raise: the ranks at other places
        of a mesh wait for these in their next layer, and raise it too."""
        if self.is_on_mesh and not self.is_broken:
            self.everyone.watch.fail(faults.agreed(error))

    def waiting(self, what: str = "") -> contextlib.AbstractContextManager[object]:
        """Context for waiting for other ranks; if one is gone, the error says so."""
        return self.watch.waiting(what)

    def all_reduce(
        self,
        tensor: Tensor,
        name: str,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        finish: Callable[[], object] | None = None,
    ) -> Handle:
        """Starts to reduce `tensor` in place, which the handle brings; reports call the wait for it
        `name`.
        """
        with self.waiting():
            (work,) = self.all_reduce_unnamed(tensor, op).works
        self.makes_call(name)
        return self._handle(work, name, tensor, finish)

    def all_reduce_unnamed(
        self,
        tensor: Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        finish: Callable[[], object] | None = None,
    ) -> Handle:
        """Starts to reduce `tensor` in place, as part of a larger operation that names its waits.

        Waiting for the handle raises if a rank is gone, else calls `finish`.
        """
        # dist.all_reduce would call this after many more lines.
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        work = self.process_group.allreduce([real], _all_reduce_options(op))
        return Handle(work, waiter=self.waiter, finish=finish)

    def all_gather(self, tensor: Tensor, name: str) -> Handle:
        """Starts to gather a tensor of each rank, all of one shape and dtype.

        The handle brings them in one tensor, [number of ranks, *shape]. Reports call the wait for
        it `name`.
        """
        received = tensor.new_empty(self.num_ranks, *tensor.shape)
        with self.waiting():
            work = dist.all_gather(
                list(received.unbind()), tensor, group=self.process_group, async_op=True
            )
        self.makes_call(name)
        return self._handle(work, name, received)

    def broadcast(self, tensor: Tensor, name: str, *, source: int = 0) -> Handle:
        """Starts to write the values of rank `source` into `tensor`, which the handle brings."""
        with self.waiting():
            work = dist.broadcast(tensor, group=self.process_group, group_src=source, async_op=True)
        self.makes_call(name)
        return self._handle(work, name, tensor)

    # Messages of `exchanges`, whose waits have the exchange's name.

    def scatter_sum(self, part: Tensor, values: Tensor) -> Work:
        """Starts to write this rank's part of the sum of all ranks' `values` into `part`."""
        return _reduce_scatter(part, values, group=self.process_group, async_op=True)

    def gather_parts(self, flat: Tensor, part: Tensor) -> Work:
        """Starts to fill `flat` with the parts of all ranks."""
        return _all_gather(flat, part, group=self.process_group, async_op=True)

    def exchange(
        self, received: Tensor, sent: Tensor, sizes: list[int], sent_sizes: list[int]
    ) -> Work:
        """Starts to send each rank its part of `sent`, and to receive a part from each.

        `sizes` and `sent_sizes` are the elements of parts.
        """
        return dist.all_to_all_single(
            received, sent, sizes, sent_sizes, group=self.process_group, async_op=True
        )

    @cached_property
    def peers(self) -> list[int]:
        """The other ranks of the group, from the next one on: if all sent to rank 0 first, its link
        would be full and the others' empty."""
        return [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]

    def send(self, message: Tensor, peer: int, tag: int, over: dist.ProcessGroup) -> Work:
        """Starts to send a message to one rank over the process group."""
        return over.send([message], peer, tag)

    def receive(self, message: Tensor, peer: int, tag: int, over: dist.ProcessGroup) -> Work:
        """Starts to receive a message from one rank over the process group."""
        return over.recv([message], peer, tag)

    def send_each(self, parts: Sequence[Tensor], tag: int, over: dist.ProcessGroup) -> list[Work]:
        """Starts to send `parts[peer]` to each other rank, unless it is empty."""
        return [
            self.send(parts[peer], peer, tag, over) for peer in self.peers if parts[peer].numel()
        ]

    def receive_each(
        self, parts: Sequence[Tensor], tag: int, over: dist.ProcessGroup
    ) -> list[Work]:
        """Starts to receive into `parts[peer]` from each other rank, unless it is empty."""
        return [
            self.receive(parts[peer], peer, tag, over) for peer in self.peers if parts[peer].numel()
        ]

    def _handle(
        self, work: Work, name: str, result: Tensor, finish: Callable[[], object] | None = None
    ) -> Handle:
        return Handle(
            work,
            waiter=self.waiter,
            name=name,
            finish=finish,
            result=result,
            record=self.hardware.record,
        )

    def worker(self, name: str) -> Worker:
        """Returns a worker thread that waits for other ranks.

        The process does not join it at exit if one of them is lost.
        """
        return Worker(name, self)

    @property
    def process_group(self) -> dist.ProcessGroup:
        if not self.is_open:
            self.open()
        # Inline, without `existing()`, because every message asks.
        weak = self.torch_group.weak
        group = weak() if weak is not None and dist.is_initialized() else None
        if group is None:
            raise PhaseError(
                "the process group of this model has been destroyed.",
                where=f"a message to other ranks, rank {self.rank}",
                remedy="Call torch.distributed.destroy_process_group() after the last backward. "
                "With a ShardedOptimizer, call it "
                "after the last step() and state_dict().",
            )
        return group

    def existing(self) -> dist.ProcessGroup | None:
        """Returns the clone if it was created and torch.distributed still has it."""
        return self.torch_group.existing()

    @property
    def is_alive(self) -> bool:
        """True if torch.distributed still has the group and every rank is alive."""
        return not self.is_broken and self.existing() is not None

    @property
    def is_broken(self) -> bool:
        """True if a rank is known to be gone: the connections are closed or about to be."""
        return self.watch.fault is not None

    @property
    def is_left(self) -> bool:
        """True if the group is closed, or a rank is known to be gone."""
        return self.watch is _CLOSED or self.is_broken

    def close(self) -> None:
        """Destroys the clone unless torch.distributed has done so already."""
        watch, self.watch = self.watch, _CLOSED
        if self._within is None:
            watch.leave(raised())
        self.torch_group.destroy(is_broken=watch.fault is not None)


@cache
def _all_reduce_options(op: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, True  # type: ignore[assignment]
    return options
