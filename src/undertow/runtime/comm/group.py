"""Undertow's process groups, which are clones of the user's."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from undertow.config import SyncConfig
from undertow.errors import ConfigError, PhaseError, WrongType
from undertow.runtime.comm.handles import ReductionHandle, all_reduce_async
from undertow.runtime.peers import patience
from undertow.runtime.peers.ring import ModelMonitor
from undertow.runtime.peers.threads import FREEING, Worker
from undertow.runtime.peers.waiting import Launching, Waiting, join_ring, require_no_fault
from undertow.runtime.torch_private import private

_Result = TypeVar("_Result")
# Backends that divide inside the collective; for others, gradients are divided before a sum.
_BACKENDS_WITH_AVERAGE = ("gloo", "nccl", "xccl", "emulated")
_BACKENDS_OVER_GLOO = ("gloo", "emulated")


@dataclass(frozen=True)
class GroupRef:
    """A description of a process group of the user's, from which a clone can be made; it can be pickled.

    The group itself is referenced weakly, because torch.distributed owns it: a process may abort at exit if other code holds a
    group when it is destroyed.
    """

    ranks: tuple[int, ...]  # ranks of the world
    backend: str  # as torch.distributed takes it: "gloo", or a backend for each device type, "cpu:gloo,cuda:nccl"
    timeout: timedelta | None
    held: weakref.ref[dist.ProcessGroup] | None = field(default=None, compare=False)
    # For a two-dimensional mesh: one row for each replica, with the ranks that share its shards.
    rows: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> GroupRef:
        ranks = tuple(dist.get_process_group_ranks(group))
        backend: str = dist.get_backend(group)
        if backend == dist.Backend.UNDEFINED:  # init_process_group() chose the backend
            backend = dist.get_backend_config(group)
        return cls(ranks, backend, private.timeout_of(group), weakref.ref(group))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Returns the user's group, or None if it is gone or this is an unpickled copy."""
        group = None if self.held is None else self.held()
        if group is None and dist.is_initialized() and self.ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        return group

    @property
    def rank(self) -> int:
        """This process's rank in the group; ConfigError if a copy was loaded in a process that is not a member."""
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialized.",
                where=f"a copy of a model that was wrapped over {len(self.ranks)} ranks",
                remedy="Call torch.distributed.init_process_group() before loading it, or save model.module instead.",
            )
        if dist.get_rank() not in self.ranks:
            raise ConfigError(
                f"rank {dist.get_rank()} is not among the ranks of the model, {', '.join(map(str, self.ranks))}.",
                where="a copy of a wrapped model",
                remedy="Load it on those ranks only, or save model.module and wrap that.",
            )
        return self.ranks.index(dist.get_rank())

    @property
    def row_places(self) -> tuple[tuple[int, ...], ...]:
        """The rows, with ranks of the group instead of the world."""
        return tuple(tuple(map(self.ranks.index, row)) for row in self.rows)

    @property
    def shard(self) -> GroupRef:
        """Returns the group of ranks that hold the other shards of this replica, this process included."""
        row = next((row for row in self.rows if dist.get_rank() in row), self.ranks)
        return GroupRef(row, self.backend, self.timeout)

    @property
    def replicate(self) -> GroupRef | None:
        """Returns the group of ranks that hold the same shard as this process, or None if there is no other."""
        column = next((column for column in zip(*self.rows, strict=True) if dist.get_rank() in column), None)
        return None if column is None else GroupRef(tuple(sorted(column)), self.backend, self.timeout)

    @property
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
    """A clone of the user's process group, so that Undertow's collectives never interleave with the user's own.

    `open` creates it. It is referenced weakly, for the reason given in `GroupRef`. A group may be `within` another one that has
    all its ranks; then the two share faults, and a fault interrupts waits over either.
    """

    def __init__(
        self, user: GroupRef, *, device: torch.device, limits: SyncConfig | None = None, within: OwnGroup | None = None
    ) -> None:
        self.user = user
        self._within = within
        self.all_meet = within is None  # before the group is made, so that no rank waits there for one that is gone
        self.rank = user.rank
        self.num_ranks = len(user.ranks)
        self.backend = user.backend_for(device)
        self.device = device  # of small tensors that ranks exchange
        self.member: ModelMonitor | None = None  # tells whether the other ranks are alive
        self.num_steps: Callable[[], int] = int
        self.is_idle: Callable[[], bool] = bool
        self.module: weakref.ref[torch.nn.Module] | None = None
        self.hooks_use_users = False  # collectives of communication hooks use the user's group
        self.in_join = False  # torch's join uses the user's group as well
        self._destroying = threading.RLock()  # reentrant: collecting a model here may destroy the group being interrupted
        self._limits = SyncConfig() if limits is None else limits
        self._group: weakref.ref[dist.ProcessGroup] | None = None

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def open(self) -> None:
        """Creates the clone; a collective call before any other over it.

        A group `within` another one is opened after that one.
        """
        if self.num_ranks == 1:
            self._group = weakref.ref(self.user.clone())
            return
        own = weakref.ref(self)
        member = self._joins() if self._within is None else self._within.member
        if member is not None:
            member.groups.append((partial(_interrupt, own), partial(_destroy, own)))
            self.member = member
        with self.waiting("all ranks, to make a process group"):
            if member is not None and self.all_meet:
                timeout = self.user.timeout
                member.meet(patience.GLOO_WAITS_S if timeout is None else timeout.total_seconds())
            require_no_fault(member)
            self._group = weakref.ref(self._made())

    def _made(self) -> dist.ProcessGroup:
        """Returns the clone.

        Gloo connects in a separate thread. If a rank is gone, that thread would wait forever, and it is abandoned.
        """
        if self.backend != "gloo":
            return self.user.clone()
        made: Future[dist.ProcessGroup] = Future()
        thread = self.worker("undertow-connects")
        thread.submit(_fill, made, self.user.clone)
        thread.shutdown()
        return self.result(made)

    def _joins(self) -> ModelMonitor | None:
        member = join_ring(self.user.ranks, self.rank, self._limits)
        if member is not None:
            here = member.here
            here.num_steps, here.is_idle, here.module = self.num_steps, self.is_idle, self.module
        return member

    def waiting(self, what: str = "") -> Waiting:
        """Context in which this rank waits for other ranks; if one is gone, the error says so."""
        return Waiting(self.member, what)

    def complete(self, work: dist.Work) -> None:
        """Waits for `work` (on a device: makes the current stream wait); raises its error if it failed.

        Raises RuntimeError if the work cannot complete because a rank is gone.
        """
        if self.device.type != "cpu":
            work.wait()
        elif not self._comes_to_an_end(partial(_ends, work)):
            raise _cut()

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduces `tensor` over ranks in place and waits for the result."""
        self.all_reduce_async(tensor, op).wait()

    def all_reduce_async(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> ReductionHandle:
        """Starts to reduce `tensor` in place; waiting for the handle raises if a rank is gone."""
        return all_reduce_async(tensor, self.process_group, op, complete=self.complete)

    def result(self, future: Future[_Result]) -> _Result:
        """Waits for the result of a thread that waits for other ranks; RuntimeError if the thread is stuck."""
        if not self._comes_to_an_end(lambda within_s: bool(wait([future], timeout=within_s).done)):
            raise _cut()
        return future.result()

    def _comes_to_an_end(self, ends: Callable[[float], bool]) -> bool:
        """Waits until `ends` returns True; returns False if that cannot happen.

        Gloo fails operations when it closes a connection, except a partly sent message.
        """
        is_broken = False
        while not ends(patience.LOOK_S):
            if is_broken:
                return False
            is_broken = self.is_broken
        return True

    def worker(self, name: str) -> Worker:
        """Returns a worker thread that waits for other ranks; the process does not join it at exit if one of them is lost."""
        return Worker(name, is_broken=partial(are_left, weakref.WeakSet((self,))))

    def places(self, mine: str) -> dict[int, str]:
        """Returns the positions of the ranks of this model that call this at about the same time, in their own words."""
        return {} if self.member is None else self.member.places(mine)

    def gathering_state(self) -> Waiting:
        """Context in which all ranks contribute their optimizer state; if one does not arrive, the error says so."""
        if self.member is not None:
            self.member.gathers_state()
        return self.waiting("the state of a ShardedOptimizer, which every rank brings in state_dict()")

    def launching(self) -> Launching:
        """Context in which this rank sends messages that the other ranks expect in this order."""
        return Launching(self.member)

    def require_no_fault(self) -> None:
        """Raises if another rank is gone or has failed, or if this rank was too late."""
        require_no_fault(self.member)

    @property
    def is_over_gloo(self) -> bool:
        """True if gloo transfers these tensors: it can send and receive host memory, and it can average."""
        return any(name in self.backend for name in _BACKENDS_OVER_GLOO)

    @property
    def process_group(self) -> dist.ProcessGroup:
        if self._group is None:
            self.open()
        group = None if self._group is None else self._group()
        if group is None or not dist.is_initialized():
            raise PhaseError(
                "the process group of this model has been destroyed.",
                where="gradient synchronization",
                remedy="Call torch.distributed.destroy_process_group() after the last backward.",
            )
        return group

    @property
    def is_alive(self) -> bool:
        """True if torch.distributed still has the group and every rank is alive."""
        return not self.is_broken and self._group is not None and self._group() is not None and dist.is_initialized()

    def trains_here(self) -> None:
        """Makes this the training thread: other ranks are told of an exception that ends it and shown its stack if it is late."""
        if self.member is not None:
            self.member.here.thread = threading.get_ident()

    @property
    def is_broken(self) -> bool:
        """True if a rank is known to be gone: the connections are closed or about to be."""
        return self.member is not None and self.member.known_fault is not None

    def close(self) -> None:
        """Destroys the clone unless torch.distributed has done so already."""
        _destroy(weakref.ref(self))


def _fill(future: Future[_Result], make: Callable[[], _Result]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:
        future.set_exception(error)


def are_left(groups: weakref.WeakSet[OwnGroup]) -> bool:
    """Returns True if threads waiting for these groups need not be joined at exit: a rank may be lost, or no group is left."""
    return not groups or any(group.member is None or group.is_broken for group in groups)


def _cut() -> RuntimeError:
    return RuntimeError("the connection to another rank was closed in the middle of a message.")


def _ends(work: dist.Work, within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    try:
        work.wait(timedelta(seconds=within_s))
    except RuntimeError:
        if not work.is_completed():  # only the time limit has passed
            time.sleep(max(0.0, until_s - time.monotonic()))  # or the work does not support a time limit
            return False
        work.wait()  # returns at once, or raises the work's error
    return True


def _interrupt(owner: weakref.ref[OwnGroup]) -> None:
    """Called from the thread that listens to other ranks."""
    own = owner()
    if own is None:
        return
    with own._destroying:  # otherwise this thread might hold the last reference to the group and destroy it too early
        _break_all(own)


def _break_all(own: OwnGroup) -> None:
    """Interrupts Undertow's group and the user's groups over which it waits."""
    group = None if own._group is None else own._group()
    if group is not None and dist.is_initialized():
        users = own.user.group if own.hooks_use_users or own.in_join else None
        for one in {group, users, None if own.member is None else own.member.borrowed}:
            if one is not None:
                _break(one)


def _break(group: dist.ProcessGroup) -> None:
    """Makes operations in flight fail, as far as possible, so that destroying the group does not wait for the rest."""
    private.interrupt(group)
    FREEING.take(group)


def _destroy(owner: weakref.ref[OwnGroup]) -> None:
    own = owner()
    if own is None:
        return
    member, own.member = own.member, None
    if member is not None and own._within is None:
        member.close()
    with own._destroying:
        group = None if own._group is None else own._group()
        if group is None or not dist.is_initialized():
            return
        if member is not None and member.known_fault is not None:
            _break(group)  # destroying would otherwise wait for operations in flight
        dist.destroy_process_group(group)


def user_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the given group, or the default one; raises ConfigError if there is none."""
    if process_group is not None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise WrongType(
                f"process_group must be a torch.distributed.ProcessGroup, got {type(process_group).__name__}.",
                where="the group over which gradients are averaged",
                remedy="Pass what torch.distributed.new_group() returned; a rank outside of the group does not wrap.",
            )
        return process_group
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialized.",
            where="no default process group exists in this process",
            remedy='Call torch.distributed.init_process_group("gloo") (or "nccl") first, and start the ranks with '
            "torchrun --nproc-per-node=2 script.py.",
        )
    return dist.group.WORLD  # type: ignore[return-value]
