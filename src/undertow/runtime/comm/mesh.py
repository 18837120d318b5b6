"""Chooses the ranks that a user asks for, and their arrangement."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from undertow.errors import ConfigError
from undertow.runtime.comm.group import GroupRef, user_group
from undertow.schedule import HYBRID

_WHERE = "the ranks over which gradients are averaged"
_HOW = 'device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))'


def chosen_group(
    process_group: dist.ProcessGroup | GroupRef | None, mesh: DeviceMesh | None, strategy: str | None = None
) -> GroupRef:
    """Returns the group that the user asks for by one of the two arguments, or the default group.

    Raises ConfigError if both are given, or if the choice does not fit the strategy.
    """
    if isinstance(process_group, GroupRef):
        return process_group
    if process_group is not None and mesh is not None:
        raise ConfigError(
            "Cannot specify both process_group and device_mesh arguments.",
            where=_WHERE,
            remedy='Give process_group=, or one dimension of a mesh, such as mesh["dp"].',
        )
    if strategy == HYBRID.name:
        return _arranged(mesh)
    if mesh is None:
        return GroupRef.of(user_group(process_group))
    if mesh.ndim != 1:
        raise ConfigError(
            f"Only 1D device mesh is supported, but got {mesh}.",
            where=f"{_WHERE}, with strategy={strategy!r}",
            remedy='Give one dimension of it, such as mesh["dp"], or set strategy="hybrid", under which the first of two '
            "dimensions replicates and the second shards.",
        )
    return GroupRef.of(mesh.get_group())


def warn_of_lone_rank(process_group: object, where: str) -> None:
    """Warns if a user gives a group of one rank in a job of several, because another group is most likely meant.

    A one-dimensional mesh is explicit, so it causes no warning.
    """
    if not isinstance(process_group, dist.ProcessGroup) or process_group.size() > 1 or dist.get_world_size() == 1:
        return
    given = process_group.group_desc
    name = process_group.group_name if given == "undefined" else given
    warnings.warn(
        f"the process group {name!r} has 1 rank, and the job has {dist.get_world_size()}: gradients are averaged with no other "
        f"rank.\n  {where}, rank {dist.get_rank()}\n"
        "  Give the group of all ranks that hold the same parameters. With sequence or context parallelism these are the ranks "
        "of both dimensions, data and sequence. If one rank is meant, give a DeviceMesh instead, or filter this warning.",
        stacklevel=3,
    )


def other_group(process_group: dist.ProcessGroup, strategy: str | None) -> GroupRef:
    """Returns a reference to the new group; ConfigError if a process group cannot express what the strategy needs."""
    if strategy == HYBRID.name:
        raise ConfigError(
            'strategy="hybrid" needs a mesh of two dimensions, got a process group.',
            where=_WHERE,
            remedy="Close the wrapper, and wrap the model anew with another mesh.",
        )
    return GroupRef.of(user_group(process_group))


def _arranged(mesh: DeviceMesh | None) -> GroupRef:
    """Returns all ranks of a mesh, whose first dimension replicates and whose second dimension shards."""
    if mesh is None or mesh.ndim != 2:
        got = "no mesh" if mesh is None else f"{mesh}"
        raise ConfigError(
            f'strategy="hybrid" needs a mesh of two dimensions, got {got}.',
            where=_WHERE,
            remedy=f"Write {_HOW}: the first dimension replicates, the second shards.",
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in {mesh}.", where=_WHERE, remedy="Wrap the model on the ranks of the mesh only."
        )
    rows = tuple(map(tuple, mesh.mesh.tolist()))
    # Groups number their ranks in ascending order; otherwise the ranks of a column would hold different shards.
    unordered = next((row for row in rows if list(row) != sorted(row)), None)
    if unordered is not None:
        raise ConfigError(
            f"the second dimension of {mesh} does not count upwards.",
            where=f"it has the ranks {', '.join(map(str, unordered))}",
            remedy=f"Write {_HOW}, which puts them in order.",
        )
    like = GroupRef.of(mesh.get_group(0))
    return GroupRef(tuple(sorted(rank for row in rows for rank in row)), like.backend, like.timeout, rows=rows)
