"""Process groups of our own."""

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
from undertow.runtime.peers.leaked_groups import FREEING
from undertow.runtime.peers.model_monitor import ModelMonitor
from undertow.runtime.peers.waiting import Launching, Waiting, join_ring, require_no_fault
from undertow.runtime.peers.worker import Worker
from undertow.runtime.torch_private import private

_Result = TypeVar("_Result")
# Backends that divide inside the collective; for others we divide before a sum.
_BACKENDS_WITH_AVERAGE = ("gloo", "nccl", "xccl", "emulated")
_BACKENDS_OVER_GLOO = ("gloo", "emulated")


@dataclass(frozen=True)
class GroupRef:
    """A process group of the user's, as far as another one like it can be made from this; it can be pickled.

    The group itself is held weakly, for torch.distributed owns it: a process whose groups are held by somebody else when
    they are destroyed may abort at exit.
    """

    ranks: tuple[int, ...]  # in the world
    backend: str  # as torch.distributed takes it: "gloo", or one for each type of device, "cpu:gloo,cuda:nccl"
    timeout: timedelta | None
    held: weakref.ref[dist.ProcessGroup] | None = field(default=None, compare=False)
    # Of a mesh of two dimensions: ranks with shards of one another; a row for each replica.
    rows: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> GroupRef:
        ranks = tuple(dist.get_process_group_ranks(group))
        backend: str = dist.get_backend(group)
        if backend == dist.Backend.UNDEFINED:  # init_process_group() was left to choose
            backend = dist.get_backend_config(group)
        return cls(ranks, backend, private.timeout_of(group), weakref.ref(group))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The user's group itself; None where it is gone, or was not pickled with us."""
        group = None if self.held is None else self.held()
        if group is None and dist.is_initialized() and self.ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        return group

    @property
    def rank(self) -> int:
        """This process's place in the group. ConfigError where a copy was loaded in a process that has none."""
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
        """The rows with the places of their ranks in the group."""
        return tuple(tuple(map(self.ranks.index, row)) for row in self.rows)

    @property
    def inside(self) -> GroupRef:
        """The ranks that have shards of one another, this process among them."""
        row = next((row for row in self.rows if dist.get_rank() in row), self.ranks)
        return GroupRef(row, self.backend, self.timeout)

    @property
    def across(self) -> GroupRef | None:
        """The ranks that have the same shard as this process; None where no rank has the same."""
        column = next((column for column in zip(*self.rows, strict=True) if dist.get_rank() in column), None)
        return None if column is None else GroupRef(tuple(sorted(column)), self.backend, self.timeout)

    @property
    def can_average(self) -> bool:
        """Whether a collective can divide."""
        return any(name in self.backend for name in _BACKENDS_WITH_AVERAGE)

    def backend_for(self, device: torch.device) -> str:
        """The backend that carries tensors of that device."""
        by_type = dict(pair.split(":", 1) for pair in self.backend.split(",") if ":" in pair)
        return by_type.get(device.type, self.backend)

    def clone(self) -> dist.ProcessGroup:
        """A new group of the same ranks; a collective call."""
        return private.new_group(self.ranks, self.backend, self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupRef, (self.ranks, self.backend, self.timeout, None, self.rows)

    def __deepcopy__(self, _memo: object) -> GroupRef:
        return self


class OwnGroup:
    """A clone of the user's process group: our collectives never interleave with the user's own.

    It is made by `open`, and held weakly for the reason that `GroupRef` gives. One whose ranks are some of those of the group
    that it is `within`, or all of them, has their faults: whoever waits over either wakes up.
    """

    def __init__(
        self, user: GroupRef, *, device: torch.device, limits: SyncConfig | None = None, within: OwnGroup | None = None
    ) -> None:
        self.user = user
        self._within = within
        self.all_meet = within is None  # before it is made, so that nobody waits there for a rank that is gone
        self.rank = user.rank
        self.num_ranks = len(user.ranks)
        self.backend = user.backend_for(device)
        self.device = device  # where small tensors of exchanges live
        self.member: ModelMonitor | None = None  # by which we know whether the other ranks are there
        self.num_steps: Callable[[], int] = int
        self.is_idle: Callable[[], bool] = bool
        self.module: weakref.ref[torch.nn.Module] | None = None
        self.hooks_use_users = False  # communication hooks, whose collectives go over the user's group
        self.in_join = False  # which torch has go over the user's group as well
        self._destroying = threading.RLock()  # a model that is collected here would have us destroy what we interrupt
        self._limits = SyncConfig() if limits is None else limits
        self._group: weakref.ref[dist.ProcessGroup] | None = None

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def open(self) -> None:
        """Makes the clone; a collective call, before any other one over it. One that is `within` another comes after that."""
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
        """The clone. Gloo connects in a thread that is left behind where a rank is gone: it would wait for that one."""
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
            member.num_steps, member.is_idle, member.module = self.num_steps, self.is_idle, self.module
        return member

    def waiting(self, what: str = "") -> Waiting:
        """`with` it this rank waits for what other ranks bring: where one is gone, the error says so."""
        return Waiting(self.member, what)

    def complete(self, work: dist.Work) -> None:
        """Returns when `work` is complete (of a device: when the current stream waits for it); raises what has failed.

        RuntimeError where it never will be, for a rank is gone.
        """
        if self.device.type != "cpu":
            work.wait()
        elif not self._comes_to_an_end(partial(_ends, work)):
            raise _cut()

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Returns with the sum over ranks in `tensor`, or what else `op` makes of it."""
        self.all_reduce_async(tensor, op).wait()

    def all_reduce_async(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> ReductionHandle:
        """Starts the same; whoever waits for it learns where a rank is gone."""
        return all_reduce_async(tensor, self.process_group, op, complete=self.complete)

    def result(self, future: Future[_Result]) -> _Result:
        """What a thread that waits for other ranks has made of it, or what failed; RuntimeError where it never comes back."""
        if not self._comes_to_an_end(lambda within_s: bool(wait([future], timeout=within_s).done)):
            raise _cut()
        return future.result()

    def _comes_to_an_end(self, ends: Callable[[float], bool]) -> bool:
        """Gloo fails what is under way when it closes a connection, but for a message of which a part is in the socket."""
        is_broken = False
        while not ends(patience.LOOK_S):
            if is_broken:
                return False
            is_broken = self.is_broken
        return True

    def worker(self, name: str) -> Worker:
        """A thread that waits for other ranks, and that the process does not wait for at exit where one of them is lost."""
        return Worker(name, is_broken=partial(are_left, weakref.WeakSet((self,))))

    def places(self, mine: str) -> dict[int, str]:
        """Where ranks stand that ask this at the same time, each in its words; of the groups of ours of one model."""
        return {} if self.member is None else self.member.places(mine)

    def gathering_state(self) -> Waiting:
        """`with` it all ranks bring what they have of an optimizer's state; where one does not come, the error says so."""
        if self.member is not None:
            self.member.gathers_state()
        return self.waiting("the state of a ShardedOptimizer, which every rank brings in state_dict()")

    def launching(self) -> Launching:
        """`with` it this rank sends what other ranks expect in this order."""
        return Launching(self.member)

    def require_no_fault(self) -> None:
        """Raises where another rank is gone or has failed, or this rank was too late."""
        require_no_fault(self.member)

    @property
    def is_over_gloo(self) -> bool:
        """Whether gloo carries our tensors: it posts sends and receives of the host's memory, and divides sums."""
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
        """Whether torch.distributed still has the group, and every rank is there."""
        return not self.is_broken and self._group is not None and self._group() is not None and dist.is_initialized()

    def trains_here(self) -> None:
        """This thread trains: other ranks are told of an exception that ends it, and shown its stack where it is late."""
        if self.member is not None:
            self.member.thread = threading.get_ident()

    @property
    def is_broken(self) -> bool:
        """Whether a rank is known to be gone: the connections are closed, or are about to be."""
        return self.member is not None and self.member.known_fault is not None

    def close(self) -> None:
        """Destroys the clone; does nothing if torch.distributed has done so already."""
        _destroy(weakref.ref(self))


def _fill(future: Future[_Result], make: Callable[[], _Result]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:
        future.set_exception(error)


def are_left(groups: weakref.WeakSet[OwnGroup]) -> bool:
    """Whether threads that wait for ranks of these groups are not waited for at exit: one may be lost, or its group is gone."""
    return not groups or any(group.member is None or group.is_broken for group in groups)


def _cut() -> RuntimeError:
    return RuntimeError("the connection to another rank was closed in the middle of a message.")


def _ends(work: dist.Work, within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    try:
        work.wait(timedelta(seconds=within_s))
    except RuntimeError:
        if not work.is_completed():  # only the time is over
            time.sleep(max(0.0, until_s - time.monotonic()))  # or the work cannot wait for a time
            return False
        work.wait()  # returns at once, or raises what has failed
    return True


def _interrupt(owner: weakref.ref[OwnGroup]) -> None:
    """From the guard's thread."""
    own = owner()
    if own is None:
        return
    with own._destroying:  # or the last to hold the group would be this thread, which would end it when it may not
        _break_all(own)


def _break_all(own: OwnGroup) -> None:
    """The group of ours, and those of the user's over which something of ours waits."""
    group = None if own._group is None else own._group()
    if group is not None and dist.is_initialized():
        users = own.user.group if own.hooks_use_users or own.in_join else None
        for one in {group, users, None if own.member is None else own.member.borrowed}:
            if one is not None:
                _break(one)


def _break(group: dist.ProcessGroup) -> None:
    """Has what is under way fail, as far as it can; nobody waits for the rest when the group is destroyed."""
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
            _break(group)  # or what is under way would be waited for
        dist.destroy_process_group(group)


def user_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The given group, or the default one; ConfigError, with the way out, where there is none."""
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
