"""Training on a mesh of two rows of two ranks, and the naive reference of it: gradients added up row by row."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support.models import Case
from support.sharded import OPTIMIZERS, Parameters, optimizer_for, parameters
from undertow import DistributedDataParallel, SyncConfig

Each = Callable[[DistributedDataParallel, torch.optim.Optimizer, int], None]


@contextlib.contextmanager
def mesh_of(*shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> Iterator[DeviceMesh]:
    """A mesh of all ranks, whose groups are gone afterwards."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    try:
        yield mesh
    finally:
        destroy(mesh)


def destroy(mesh: DeviceMesh) -> None:
    for dim in range(mesh.ndim):
        if mesh.get_group(dim) is not dist.group.WORLD:
            dist.destroy_process_group(mesh.get_group(dim))


@contextlib.contextmanager
def hybrid(
    model: nn.Module, optimizer: str = "AdamW", *, eager: bool = False, shape: tuple[int, int] = (2, 2), **settings: Any
) -> Iterator[tuple[DistributedDataParallel, torch.optim.Optimizer]]:
    """The wrapped model with its optimizer, on a mesh of that shape."""
    with mesh_of(*shape) as mesh:
        ddp = DistributedDataParallel(model, device_mesh=mesh, config=SyncConfig(strategy="hybrid", **settings))
        try:
            yield ddp, optimizer_for(ddp, "hybrid", optimizer, eager=eager)
        finally:
            ddp.close()


def trained_on_mesh(
    case: Case, optimizer: str = "AdamW", *, num_steps: int = 12, each: Each | None = None, **settings: Any
) -> Parameters:
    """The parameters after those steps; `each` takes one."""
    with hybrid(case.model(), optimizer, **settings) as (ddp, opt):
        for step in range(num_steps):
            (each or _each_of(case))(ddp, opt, step)
        return parameters(ddp)


def _each_of(case: Case) -> Each:
    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        case.loss(ddp, step).backward()
        opt.step()

    return each


def trained_naively(
    case: Case, optimizer: str = "AdamW", *, num_steps: int = 12, backward: Callable[[nn.Module, int], None] | None = None
) -> Parameters:
    """A bare model, whose gradients are added up row by row, with torch's optimizer; `backward` runs those of a step."""
    model = copy.deepcopy(case.model())
    cls, settings = OPTIMIZERS[optimizer]
    opt = cls(model.parameters(), **settings)
    for step in range(num_steps):
        opt.zero_grad()
        if backward is None:
            case.loss(model, step).backward()
        else:
            backward(model, step)
        mean_row_by_row(model)
        opt.step()
    return {f"module.{name}": param.detach().clone() for name, param in model.named_parameters()}


def mean_row_by_row(model: nn.Module, rows: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3))) -> None:
    """Makes every `.grad` the sum of each row in rank order, those added up in order, over the number of ranks."""
    for param in model.parameters():
        has_gradient = torch.tensor(float(param.grad is not None))
        dist.all_reduce(has_gradient)
        if has_gradient:
            mine = torch.zeros_like(param) if param.grad is None else param.grad
            of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, mine.contiguous())
            sums = [chain([of_ranks[rank] for rank in row if rank < len(of_ranks)]) for row in rows if row[0] < len(of_ranks)]
            param.grad = chain(sums) / len(of_ranks)


def chain(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
