"""The ranks that a user chooses, and Undertow's process groups, which are clones of the user's."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from undertow.config import SyncConfig
from undertow.errors import ConfigError, PhaseError, WrongType, require
from undertow.ranks import patience
from undertow.ranks.faults import Activity, raised
from undertow.ranks.guard import watch_over
from undertow.ranks.handles import Handle, ThreadWork, Work
from undertow.ranks.threads import Worker
from undertow.ranks.watch import NullWatch
from undertow.schedule import HYBRID
from undertow.torch_private import private

_Value = TypeVar("_Value")
# Backends that divide inside the collective; for others, gradients are divided before a sum.
_BACKENDS_WITH_AVERAGE = ("gloo", "nccl", "xccl", "emulated")
_BACKENDS_OVER_GLOO = ("gloo", "emulated")
_CLOSED = NullWatch()  # of groups that are closed
_WHERE = "the ranks over which gradients are averaged"


@dataclass(frozen=True)
class GroupRef:
    """A description of a process group of the user's, from which a clone can be made; it can be
    pickled.

    The group itself is referenced weakly, because torch.distributed owns it: a process may abort at
    exit if other code holds a group when it is destroyed.
    """

    ranks: tuple[int, ...]  # ranks of the world
    # as torch.distributed takes it: "gloo", or a backend for each device type, "cpu:gloo,cuda:nccl"
    backend: str
    timeout: timedelta | None
    held: weakref.ref[dist.ProcessGroup] | None = field(default=None, compare=False)
    # For a two-dimensional mesh: one row for each replica, with the ranks that share its shards.
    rows: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> GroupRef:
        backend: str = dist.get_backend(group)
        if backend == dist.Backend.UNDEFINED:  # init_process_group() chose the backend
            backend = dist.get_backend_config(group)
        require(
            backend != "fake",
            f'the backend of the process group is "fake": {group.size() - 1} of its ranks do not '
            "exist.",
            where="the group over which gradients are averaged",
            remedy='For a dry run, call init_process_group("gloo", '
            "store=torch.distributed.HashStore(), rank=0, world_size=1); "
            "`undertow simulate` predicts the steps of more ranks.",
        )
        return cls(
            tuple(dist.get_process_group_ranks(group)),
            backend,
            private.timeout_of(group),
            weakref.ref(group),
        )

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Returns the user's group, or None if it is gone or this is an unpickled copy."""
        group = None if self.held is None else self.held()
        if (
            group is None
            and dist.is_initialized()
            and self.ranks == tuple(range(dist.get_world_size()))
        ):
            return dist.group.WORLD
        return group

    @property
    def rank(self) -> int:
        """This process's rank in the group.

        ConfigError if a copy was loaded in a process that is not a member.
        """
        rank = dist.get_rank() if dist.is_initialized() else -1
        require(
            rank in self.ranks,
            f"this process is not among the ranks of the model, {', '.join(map(str, self.ranks))}.",
            where="a copy of a wrapped model",
            remedy="Call torch.distributed.init_process_group() and load it on those ranks only, "
            "or save model.module.",
        )
        return self.ranks.index(rank)

    @cached_property
    def row_places(self) -> tuple[tuple[int, ...], ...]:
        """The rows, with ranks of the group instead of the world."""
        return tuple(tuple(map(self.ranks.index, row)) for row in self.rows)

    def axes(self) -> list[GroupRef]:
        """Returns this process's row of a mesh and its column: the ranks with other shards, and
        with the same shard.

        Without a mesh all ranks are one row.
        """
        if not self.rows:
            return [self]
        lines = chain(self.rows, zip(*self.rows, strict=True))
        own = [tuple(sorted(line)) for line in lines if dist.get_rank() in line]
        return [GroupRef(line, self.backend, self.timeout) for line in own]

    @cached_property  # every bucket of a step asks
    def can_average(self) -> bool:
        """True if a collective can divide."""
        return any(name in self.backend for name in _BACKENDS_WITH_AVERAGE)

    def backend_for(self, device: torch.device) -> str:
        """Returns the backend that transfers tensors of that device."""
        by_type = dict(pair.split(":", 1) for pair in self.backend.split(",") if ":" in pair)
        return by_type.get(device.type, self.backend)

    def clone(self) -> dist.ProcessGroup:
        """Creates a new group of the same ranks; a collective call."""
        return private.new_group(self.ranks, self.backend, self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupRef, (self.ranks, self.backend, self.timeout, None, self.rows)

    def __deepcopy__(self, _memo: object) -> GroupRef:
        return self


class OwnGroup:
    """A clone of the user's process group, so that Undertow's collectives never interleave with the
    user's own.

    `open` creates it. It is referenced weakly, for the reason given in `GroupRef`. A group may be
    `within` another one that has all its ranks; then the two share faults, and a fault interrupts
    waits over either.
    """

    def __init__(
        self,
        user: GroupRef,
        *,
        device: torch.device,
        limits: SyncConfig | None = None,
        within: OwnGroup | None = None,
    ) -> None:
        self.user = user
        self.rank = user.rank
        self.num_ranks = len(user.ranks)
        self.backend = user.backend_for(device)
        self.device = device  # of small tensors that ranks exchange
        self.watch = NullWatch()  # over the other ranks
        self.here = Activity()
        # communication hooks and torch's join, as long as they use the user's group
        self.borrowers: set[str] = set()
        self._within = within
        self._limits = SyncConfig() if limits is None else limits
        # reentrant: collecting a model here may destroy the group being interrupted
        self._destroying = threading.RLock()
        self._group: weakref.ref[dist.ProcessGroup] | None = None

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def open(self, *, all_meet: bool = False) -> None:
        """Creates the clone; a collective call before any other over it.

        A group `within` another one is opened after that one; `all_meet` if all ranks of that one
        open groups at the same time.
        """
        if self.num_ranks == 1:
            self._group = weakref.ref(self.user.clone())
            return
        timeout = self.user.timeout
        within_s = patience.GROUP_S if timeout is None else timeout.total_seconds()
        if self._within is None:
            self.here.thread = threading.get_ident()  # until another thread trains
            self.watch = watch_over(
                self.user.ranks, self.rank, self._limits, self.here, within_s=within_s
            )
        else:
            self.watch = self._within.watch
        self.watch.interrupts.append(weakref.WeakMethod(self.interrupt))
        with self.waiting("all ranks, to make a process group"):
            if all_meet or self._within is None:  # so that no rank waits below for one that is gone
                self.watch.ask("", topic=f"group {len(self.watch.interrupts)}", within_s=within_s)
            self.watch.check()
            self._group = weakref.ref(self._made())

    def _made(self) -> dist.ProcessGroup:
        """Returns the clone.

        Gloo connects in a separate thread. If a rank is gone, that thread would wait forever, and
        it is abandoned.
        """
        if self.backend != "gloo":
            return self.user.clone()
        made = ThreadWork()
        thread = self.worker("undertow-connects")
        thread.submit(made.run, self.user.clone)
        thread.shutdown()
        self.complete(made)
        return cast(dist.ProcessGroup, made.result())

    def waiting(self, what: str = "") -> contextlib.AbstractContextManager[object]:
        """Context for waiting for other ranks; if one is gone, the error says so."""
        return self.watch.waiting(what)

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduces `tensor` over ranks in place and waits for the result."""
        self.all_reduce_async(tensor, op).wait()

    def all_reduce_async(
        self,
        tensor: torch.Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        finish: Callable[[], object] | None = None,
    ) -> Handle:
        """Starts to reduce `tensor` in place.

        Waiting for the handle raises if a rank is gone, else calls `finish`.
        """
        # dist.all_reduce would call this after many more lines.
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        work = self.process_group.allreduce([real], _all_reduce_options(op))
        return Handle(work, complete=self.complete, finish=finish)

    def all_gather(self, tensor: torch.Tensor, what: str) -> Pending[list[torch.Tensor]]:
        """Starts to gather a tensor of each rank, in rank order, all of one shape and dtype."""
        received = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        with self.waiting():
            work = dist.all_gather(received, tensor, group=self.process_group, async_op=True)
        return Pending(self, work, received, what)

    def broadcast(
        self, tensor: torch.Tensor, what: str, *, source: int = 0
    ) -> Pending[torch.Tensor]:
        """Starts to write the values of rank `source` into `tensor`."""
        with self.waiting():
            work = dist.broadcast(tensor, group=self.process_group, group_src=source, async_op=True)
        return Pending(self, work, tensor, what)

    def complete(self, work: Work) -> None:
        """Waits for `work` (on a device: makes the current stream wait); raises its error if it
        failed.

        Raises RuntimeError if the work cannot complete because a rank is gone.
        """
        is_broken = False
        while self.device.type == "cpu" and not work.is_completed():
            until_s = time.monotonic() + patience.LOOK_S
            try:
                work.wait(timedelta(seconds=patience.LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    break
            # Gloo fails operations when it closes a connection, except a partly sent message.
            if is_broken:
                raise RuntimeError(
                    "the connection to another rank was closed in the middle of a message."
                )
            is_broken = self.is_broken
            # the work may not support a time limit
            time.sleep(max(0.0, until_s - time.monotonic()))
        work.wait()  # returns at once, or raises the work's error

    def worker(self, name: str) -> Worker:
        """Returns a worker thread that waits for other ranks.

        The process does not join it at exit if one of them is lost.
        """
        return Worker(name, is_broken=partial(are_left, weakref.WeakSet((self,))))

    @property
    def process_group(self) -> dist.ProcessGroup:
        if self._group is None:
            self.open()
        # Inline, without `existing()`, because every message asks.
        group = self._group() if self._group is not None and dist.is_initialized() else None
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
        return None if self._group is None or not dist.is_initialized() else self._group()

    @property
    def is_over_gloo(self) -> bool:
        """True if gloo transfers these tensors.

        It can send and receive host memory, and it can average.
        """
        return any(name in self.backend for name in _BACKENDS_OVER_GLOO)

    @property
    def is_alive(self) -> bool:
        """True if torch.distributed still has the group and every rank is alive."""
        return not self.is_broken and self.existing() is not None

    @property
    def is_broken(self) -> bool:
        """True if a rank is known to be gone: the connections are closed or about to be."""
        return self.watch.fault is not None

    def close(self) -> None:
        """Destroys the clone unless torch.distributed has done so already."""
        watch, self.watch = self.watch, _CLOSED
        if self._within is None:
            watch.leave(raised())
        with self._destroying:
            group = self.existing()
            if group is not None and watch.fault is not None:
                private.interrupt(group)  # destroying would otherwise wait for operations in flight
            if group is not None:
                # ValueError: torch has forgotten the group, and a gather has held it until now.
                with contextlib.suppress(ValueError):
                    dist.destroy_process_group(group)

    def interrupt(self) -> None:
        """Interrupts the clone and the user's groups over which it waits.

        Called from the thread that listens to other ranks.
        """
        # otherwise this thread might hold the last reference to a group and destroy it too early
        with self._destroying:
            group = self.existing()
            users = self.user.group if self.borrowers else None
            if group is not None:
                for one in filter(None, {group, users}):
                    private.interrupt(one)


@dataclass(frozen=True, slots=True)
class Pending(Generic[_Value]):
    """A collective in flight over `group` that brings a value; reports call the wait for it
    `what`."""

    group: OwnGroup
    work: Work
    value: _Value
    what: str

    def take(self) -> _Value:
        """Waits for the value; raises if a rank is gone."""
        with self.group.waiting(self.what):
            self.group.complete(self.work)
        return self.value


def are_left(groups: weakref.WeakSet[OwnGroup]) -> bool:
    """Returns True if threads waiting for these groups need not be joined at exit.

    A rank may be lost, or no group is left.
    """
    return not groups or any(group.watch is _CLOSED or group.is_broken for group in groups)


@cache
def _all_reduce_options(op: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, True  # type: ignore[assignment]
    return options


def user_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the given group, or the default one; raises ConfigError if no group was
    initialized."""
    require(
        process_group is None or isinstance(process_group, dist.ProcessGroup),
        "process_group must be a torch.distributed.ProcessGroup, got "
        f"{type(process_group).__name__}.",
        where="the group over which gradients are averaged",
        remedy="Pass what torch.distributed.new_group() returned; a rank outside of the group "
        "does not wrap.",
        error=WrongType,
    )
    require(
        process_group is not None or (dist.is_available() and dist.is_initialized()),
        "torch.distributed is not initialized.",
        where="no default process group exists in this process",
        remedy='Call torch.distributed.init_process_group("gloo") (or "nccl") first, and start '
        "the ranks with torchrun --nproc-per-node=2 script.py.",
    )
    return dist.group.WORLD if process_group is None else process_group  # type: ignore[return-value]


def chosen_group(
    process_group: dist.ProcessGroup | GroupRef | None,
    mesh: DeviceMesh | None,
    strategy: str | None = None,
) -> GroupRef:
    """Returns the group that the user asks for by one of the two arguments, or the default group.

    Raises ConfigError if both are given, or if the choice does not fit the strategy.
    """
    if isinstance(process_group, GroupRef):
        return process_group
    require(
        process_group is None or mesh is None,
        "Cannot specify both process_group and device_mesh arguments.",
        where=_WHERE,
        remedy='Give process_group=, or one dimension of a mesh, such as mesh["dp"].',
    )
    if strategy == HYBRID.name:
        return _arranged(mesh)
    if mesh is None:
        return GroupRef.of(user_group(process_group))
    require(
        mesh.ndim == 1,
        f"Only 1D device mesh is supported, but got {mesh}.",
        where=f"{_WHERE}, with strategy={strategy!r}",
        remedy='Give one dimension of it, such as mesh["dp"], or set strategy="hybrid", under '
        "which the first of two dimensions replicates and the second shards.",
    )
    return GroupRef.of(mesh.get_group())


def warn_of_lone_rank(process_group: object, where: str) -> None:
    """Warns if a user gives a group of one rank in a job of several, because another group is most
    likely meant.

    A one-dimensional mesh is explicit, so it causes no warning.
    """
    if (
        not isinstance(process_group, dist.ProcessGroup)
        or process_group.size() > 1
        or dist.get_world_size() == 1
    ):
        return
    name = (
        process_group.group_name
        if process_group.group_desc == "undefined"
        else process_group.group_desc
    )
    warnings.warn(
        f"the process group {name!r} has 1 rank, and the job has {dist.get_world_size()}: "
        "gradients are averaged with no other "
        f"rank.\n  {where}, rank {dist.get_rank()}\n"
        "  Give the group of all ranks that hold the same parameters. With sequence or context "
        "parallelism these are the ranks "
        "of both dimensions, data and sequence. If one rank is meant, give a DeviceMesh instead, "
        "or filter this warning.",
        stacklevel=3,
    )


def _arranged(mesh: DeviceMesh | None) -> GroupRef:
    if mesh is None or mesh.ndim != 2:
        raise ConfigError(
            'strategy="hybrid" needs a mesh of two dimensions, got '
            f"{'no mesh' if mesh is None else mesh}.",
            where=_WHERE,
            remedy='Write device_mesh=init_device_mesh("cpu", (2, 2), '
            'mesh_dim_names=("replicate", "shard")): '
            "the first dimension replicates, the second shards.",
        )
    require(
        mesh.get_coordinate() is not None,
        f"rank {dist.get_rank()} is not in {mesh}.",
        where=_WHERE,
        remedy="Wrap the model on the ranks of the mesh only.",
    )
    # Groups number their ranks in ascending order: the ranks of a column must have the same place
    # in their rows.
    rows = tuple(tuple(sorted(row)) for row in mesh.mesh.tolist())
    like = GroupRef.of(mesh.get_group(0))
    return GroupRef(tuple(sorted(chain.from_iterable(rows))), like.backend, like.timeout, rows=rows)
