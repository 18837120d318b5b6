"""The ranks that a user chooses: a process group, or a mesh."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from undertow.errors import ConfigError, WrongType, require
from undertow.ranks import faults
from undertow.ranks.answers import in_ranges
from undertow.schedule import HYBRID
from undertow.torch_private import process_groups

_WHERE = "the ranks over which gradients are averaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The abilities of a backend, as far as they were checked.

    The defaults are right for every backend.
    """

    average: bool = False  # in an all-reduce; without it, Undertow divides
    divide_first: bool = False  # for such an average, so that sums of 16 bits do not overflow
    # Sends from the host's memory. Ranks may post messages with tags to each other in any order.
    send_from_host: bool = False
    order_streams: bool = False  # on an accelerator, a wait does not block the host


_NCCL = Abilities(average=True, divide_first=True, order_streams=True)
# By family, whose names begin so: "nccl" is also "nccl2", "nccl-legacy" and "ncclx".
# Reduce-scatters ask for sums: in some versions of torch, gloo's returns one instead of an average.
BACKENDS = {
    "gloo": Abilities(average=True, send_from_host=True),
    "emulated": Abilities(average=True, send_from_host=True),
    "nccl": _NCCL,
    "rccl": _NCCL,  # AMD's, with the same interface
    "xccl": Abilities(order_streams=True),  # some versions of oneCCL cannot average
}
_OF_GPUS = {family for family, can in BACKENDS.items() if can.order_streams}


def family_of(backend: str) -> str | None:
    """Returns the family of a backend, by which `BACKENDS` knows it; None for an unknown one."""
    name = backend.lower()
    return next((family for family in BACKENDS if name.startswith(family)), None)


@cache
def tell_of_unknown(backend: str) -> None:
    """Says once that a backend is unknown, and what follows from that."""
    if family_of(backend) is None:
        faults.tell(
            f"the backend {backend!r} is unknown: Undertow uses only its sums, and the host waits "
            f"for its messages. Known are {', '.join(BACKENDS)}, and names that begin with them."
        )


@dataclass(frozen=True)
class GroupRef:
    """Describes a process group of the user's, so that a clone can be made; it can be pickled.

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
            process_groups.timeout_of(group),
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
            f"this process is not among the ranks of the model, {in_ranges(self.ranks)}.",
            where="a copy of a wrapped model",
            remedy="Call torch.distributed.init_process_group() and load it on those ranks only, "
            "or save model.module.",
        )
        return self.ranks.index(rank)

    @cached_property
    def places(self) -> Mapping[int, int]:
        """The rank in the group of each of its ranks of the world."""
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def row_places(self) -> tuple[tuple[int, ...], ...]:
        """The rows, with ranks of the group instead of the world."""
        return tuple(tuple(map(self.places.__getitem__, row)) for row in self.rows)

    @property
    def num_shards(self) -> int:
        """The ranks that share the shards of a replica: of a row of the mesh, or all."""
        return len(self.rows[0]) if self.rows else len(self.ranks)

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

    def backend_for(self, device: torch.device) -> str:
        """Returns the backend that transfers tensors of that device."""
        by_type = dict(pair.split(":", 1) for pair in self.backend.split(",") if ":" in pair)
        return by_type.get(device.type, self.backend)

    def require_device(self, device: torch.device) -> None:
        """Raises ConfigError if the backend cannot transfer tensors of `device`."""
        backend = self.backend_for(device)
        has_none = ":" in backend  # there are backends for other devices only
        require(
            device.type != "cpu" or not (has_none or family_of(backend) in _OF_GPUS),
            f'the model is on the CPU, and the backend "{backend}" only transfers tensors of GPUs.',
            where="the group over which gradients are averaged",
            remedy="Move the model to this rank's GPU before you wrap it: model.cuda(local_rank). "
            'Without GPUs, call init_process_group("gloo").',
        )

    def abilities_for(self, device: torch.device) -> Abilities:
        """Returns the abilities of that backend."""
        family = family_of(self.backend_for(device))
        return Abilities() if family is None else BACKENDS[family]

    def replica(self) -> GroupRef:
        """Returns this process's replica: its row of a mesh, or this rank alone."""
        if self.rows:
            return self.axes()[0]
        return GroupRef((dist.get_rank(),), self.backend, self.timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupRef, (self.ranks, self.backend, self.timeout, None, self.rows)

    def __deepcopy__(self, _memo: object) -> GroupRef:
        return self


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
    *,
    has_replicas: bool = False,
) -> GroupRef:
    """Returns the group that the user asks for by one of the two arguments, or the default group.

    With `has_replicas`, rows of a mesh are replicas. Raises ConfigError if both are given, or if
    the choice does not fit the strategy.
    """
    if isinstance(process_group, GroupRef):
        return process_group
    require(
        process_group is None or mesh is None,
        "Cannot specify both process_group and device_mesh arguments.",
        where=_WHERE,
        remedy='Give process_group=, or one dimension of a mesh, such as mesh["dp"].',
    )
    if strategy == HYBRID.name or (has_replicas and mesh is not None and mesh.ndim == 2):
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
