"""The ranks of the axes beside the data-parallel one.

mesh ("dp", "tp")    data axis of rank 0       others of rank 0      everyone
0 1                  0, 2                      0, 1                  0, 1, 2, 3
2 3

Reasons: docs/design/meshes.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from undertow.config import SyncConfig, refused
from undertow.errors import WrongType, require, suggestion
from undertow.mesh.local_tensors import distributed
from undertow.torch_private import dtensors, fsdp, tables
from undertow.wire import AUTO


def data_mesh(mesh: DeviceMesh | None, dims: object | None) -> DeviceMesh | None:
    """Returns the data-parallel dimensions of a mesh, as torch's DataParallelMeshDims names them:
    one dimension, or the one that replicates and the one that shards.

    Several dimensions become one if all are of one kind. The mesh itself without `dims`. Raises
    ConfigError if it does not have them.
    """
    if dims is None:
        return mesh
    where = "dp_mesh_dims"
    kinds = [getattr(dims, name, None) for name in ("replicate_names", "shard_names")]
    require(
        None not in kinds,
        f"dp_mesh_dims must be a torch.distributed.fsdp.DataParallelMeshDims, got "
        f"{type(dims).__name__}.",
        where=where,
        remedy='Write DataParallelMeshDims(replicate="dp"), or device_mesh=mesh["dp"].',
        error=WrongType,
    )
    require(
        mesh is not None,
        "dp_mesh_dims names dimensions of a mesh, and no mesh is given.",
        where=where,
        remedy="Give device_mesh, the whole mesh.",
    )
    assert mesh is not None
    known = mesh.mesh_dim_names or ()
    given: list[tuple[str, ...]] = [names for names in kinds if names]
    for name in chain.from_iterable(given):
        require(
            name in known,
            f"the mesh has no dimension {name!r}.",
            where=where,
            remedy=suggestion(
                name, known, instead="" if known else "Name them: mesh_dim_names=(...)."
            ),
        )
    if len(given) == 1 and len(given[0]) > 1:
        return dtensors.flattened(mesh, given[0])
    names = tuple(chain.from_iterable(given))
    require(
        len(names) == len(given),
        f"dp_mesh_dims has several dimensions of one kind, and one of the other: {given}.",
        where=where,
        remedy="Make a mesh with one dimension that replicates and one that shards.",
    )
    return mesh[names]


def require_fits(
    named_params: Sequence[tuple[str, Tensor]], ranks: Sequence[int], config: SyncConfig
) -> None:
    """Raises ConfigError if the settings, or the `ranks` of the data axis, do not fit parameters
    that are DTensors."""
    if not distributed(param for _, param in named_params):
        return
    require_data_axis(named_params, ranks)
    where = f"gradients are averaged over ranks {_listed(ranks)}"
    if config.experts:
        raise refused("experts", "tensor_parallel", where=where)
    require(
        config.wire != AUTO or are_even(param for _, param in named_params),
        'wire="auto" does not work with parameters whose parts have different sizes: the places of '
        "the other axes would choose on their own, and a parameter that all of them hold would "
        "drift apart.",
        where=where,
        remedy='Set wire="int8", or leave wire out.',
    )


def require_distributed_before(
    before: Iterable[tuple[str, Tensor]], after: Iterable[tuple[str, Tensor]]
) -> None:
    """Raises ConfigError if a parameter of `before` has become a DTensor."""
    were_plain = {name for name, param in before if not dtensors.is_dtensor(param)}
    for name, param in after:
        require(
            name not in were_plain or not dtensors.is_dtensor(param),
            f"the model was parallelized after it was wrapped: parameter {name!r} is a DTensor "
            "now.",
            where="a module whose gradients are averaged",
            remedy="Call parallelize_module() first, and wrap the model after it.",
        )


def require_data_axis(named_params: Iterable[tuple[str, Tensor]], ranks: Sequence[int]) -> None:
    """Raises ConfigError if a parameter is distributed over some of the `ranks` of the data axis,
    by torch's fully_shard or because the axis is a tensor-parallel one."""
    for name, param in named_params:
        for dtensor in _dtensors([param]):
            mesh = dtensor.device_mesh
            shared = set(mesh.mesh.flatten().tolist()).intersection(ranks)
            require(
                len(shared) < 2,
                f"{_named(mesh)} is not a data-parallel axis: ranks {_listed(shared)} hold "
                f"different parts of parameter {name!r}.",
                where=f"gradients are averaged over ranks {_listed(ranks)}",
                remedy='Give the data-parallel axis of the mesh, such as device_mesh=mesh["dp"], '
                "and distribute parameters over other axes only.",
            )


def require_fits_replicas(
    module: nn.Module,
    named_params: Sequence[tuple[str, Tensor]],
    ranks: Sequence[int],
    *,
    has_rows: bool,
) -> None:
    """Raises ConfigError if the ranks of replicas that train alone, or rows of ranks, do not fit
    parameters that are DTensors."""
    if not distributed(param for _, param in named_params):
        return
    require(
        not has_rows,
        "outer synchronization has two data-parallel axes, and parameters are DTensors over "
        "others.",
        where="SyncConfig(outer=...)",
        remedy='Give one axis, such as device_mesh=mesh["dp"].',
    )
    # Under fully_shard a parameter may be on the axis of the replicas too, whole.
    if not any(fsdp.is_managed(part) for _, part in tables.named_modules(module)):
        require_data_axis(named_params, ranks)


def require_unmanaged(module: nn.Module, *, caller: str) -> None:
    """Raises ConfigError if torch's fully_shard or replicate averages gradients of the module."""
    for name, part in tables.named_modules(module):
        require(
            not fsdp.is_managed(part),
            f"{f'module {name!r}' if name else 'the model'} is managed by torch's fully_shard or "
            "replicate, which averages its gradients itself.",
            where=f"{caller}(...)",
            remedy="Leave fully_shard out; or keep it, and call undertow.outer_axis(model), which "
            "averages across replicas only.",
        )


def everyone(params: Iterable[Tensor], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ranks of the data axis and of all axes on which a parameter is distributed.

    A mesh knows its neighbors if it is a part of a larger one. Otherwise these are the ranks of the
    data axis only.
    """
    found = set(ranks)
    # By the whole mesh: its axes on which some parameter is distributed. Parameters may be on
    # different ones, and all ranks must find the same set.
    varying: dict[Any, list[bool]] = {}
    for mesh in dict.fromkeys(param.device_mesh for param in _dtensors(params)):
        root = dtensors.root_of(mesh)
        own = _places_of(mesh.mesh.flatten().tolist(), root.mesh)
        varies = [len(set(axis)) > 1 for axis in zip(*own, strict=True)]
        before = varying.setdefault(root, [False] * len(varies))
        varying[root] = [one or other for one, other in zip(before, varies, strict=True)]
    for root, varies in varying.items():
        places = [(root.mesh == rank).nonzero().tolist() for rank in ranks]
        if not all(places):
            return ranks
        for (place,) in places:
            at = tuple(
                slice(None) if is_other else index
                for index, is_other in zip(place, varies, strict=True)
            )
            found.update(root.mesh[at].flatten().tolist())
    return tuple(sorted(found))


def replica_of(params: Iterable[Tensor], ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """Returns the ranks at the same place of the data axis, `ranks`, as this `rank`: those that
    hold one replica of the model together."""
    params = list(params)
    found = {rank}
    for mesh in dict.fromkeys(param.device_mesh for param in _dtensors(params)):
        whole = dtensors.root_of(mesh).mesh
        (own,) = _places_of([rank], whole)
        places = zip(*_places_of(ranks, whole), strict=True)
        is_data = [len(set(axis)) > 1 for axis in places]
        for other in everyone(params, tuple(ranks)):
            (place,) = _places_of([other], whole)
            at = zip(place, own, is_data, strict=True)
            if all(here == there for here, there, is_of_data in at if is_of_data):
                found.add(other)
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """The place of this rank on the axes of a mesh over which parameters are cut: ranks at one
    place have the same parts."""

    sizes: tuple[tuple[str, int], ...] = ()  # of these axes, by name
    number: int = 0  # of all combinations of their indices, row-major

    @property
    def num_places(self) -> int:
        return math.prod(size for _, size in self.sizes)


def place_of(params: Iterable[Tensor]) -> MeshPlace:
    """Returns the place of this rank; the only one if no parameter is cut."""
    indices: dict[str, tuple[int, int]] = {}  # by name: the size of an axis, and the place on it
    for dtensor in _dtensors(params):
        mesh = dtensor.device_mesh
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        coordinate = mesh.get_coordinate()
        for axis, placement in enumerate(dtensor.placements):
            if not placement.is_replicate():
                indices[names[axis]] = mesh.shape[axis], coordinate[axis]
    number = 0
    for size, index in indices.values():
        number = number * size + index
    return MeshPlace(tuple((name, size) for name, (size, _) in indices.items()), number)


def are_even(params: Iterable[Tensor]) -> bool:
    """Returns True if all places have parts of the same shapes."""
    for dtensor in _dtensors(params):
        whole = list(dtensor.shape)
        for placement, size in zip(dtensor.placements, dtensor.device_mesh.shape, strict=True):
            if placement.is_replicate():
                continue
            if whole[placement.dim] % size:
                return False
            whole[placement.dim] //= size
    return True


def is_cut_over_others(param: Tensor, ranks: Collection[int]) -> bool:
    """Returns True if a parameter is cut, and not only over these `ranks`."""
    for dtensor in _dtensors([param]):
        mesh = dtensor.device_mesh
        place = mesh.get_coordinate()
        for axis, placement in enumerate(dtensor.placements):
            at = (*place[:axis], slice(None), *place[axis + 1 :])
            if not placement.is_replicate() and not set(mesh.mesh[at].tolist()).issubset(ranks):
                return True
    return False


def num_pieces(param: Tensor) -> int:
    """Returns into how many parts the ranks of other axes have cut a parameter."""
    pieces = 1
    for dtensor in _dtensors([param]):
        for placement, size in zip(dtensor.placements, dtensor.device_mesh.shape, strict=True):
            pieces *= 1 if placement.is_replicate() else size
    return pieces


def other_groups(params: Iterable[Tensor]) -> list[dist.ProcessGroup]:
    """Returns the groups of this rank over which parameters are distributed."""
    meshes: Any = dict.fromkeys(param.device_mesh for param in _dtensors(params))
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()))


def _dtensors(params: Iterable[Tensor]) -> list[Any]:
    return list(distributed(params))


def _places_of(ranks: Sequence[int], whole: Tensor) -> list[list[int]]:
    return [(whole == rank).nonzero()[0].tolist() for rank in ranks]


def _named(mesh: Any) -> str:
    names = mesh.mesh_dim_names
    if not names:
        return str(mesh)
    return f"the mesh axis {' and '.join(map(repr, names))}"


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
