"""Training with plain and with sharded optimizers, also on a mesh, and what it is compared with."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support.alike import of_all_ranks
from support.models import CASES, Case, noise
from support.ranks import KEPT
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig

Parameters = dict[str, Tensor]
Step = Callable[[Any, Any, int], None]  # what a model and its optimizer do in the step of that number
Write = Callable[[nn.Parameter], None]  # what a program does to a reduced gradient
OPTIMIZERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "plain SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "foreach AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
}
MLP, TIED = CASES["mlp"], CASES["tied transformer"]
SMALL: dict[str, Any] = {"bucket_cap_mb": 1e-4}  # most parameters have a bucket of their own
ORDERED: dict[str, Any] = {"reduction": "ordered", **SMALL}
# The ways to train in shards, by the number of ranks: four ranks are a mesh of two rows.


def ways() -> tuple[dict[str, Any], ...]:
    return ({"strategy": "hybrid"},) if dist.get_world_size() == 4 else ({"strategy": "zero1"}, {"strategy": "zero2"})


@contextlib.contextmanager
def mesh_of(*shape: int, names: tuple[str, ...] = ("replicate", "shard"), backend: str | None = None) -> Iterator[DeviceMesh]:
    override = None if backend is None else dict.fromkeys(names, backend)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override)
    try:
        yield mesh
    finally:
        destroy(mesh)


@functools.cache
def kept_mesh(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    """The same mesh for all tests of ranks that stay: torch caches what an operation of DTensors does, by mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    KEPT.update(mesh.get_all_groups())
    return mesh


def destroy(mesh: DeviceMesh) -> None:
    for dim in range(mesh.ndim):
        if mesh.get_group(dim) is not dist.group.WORLD:
            dist.destroy_process_group(mesh.get_group(dim))


@contextlib.contextmanager
def training(
    model: nn.Module,
    strategy: str = "zero1",
    optimizer: str = "AdamW",
    *,
    shape: tuple[int, ...] = (2, 2),
    **settings: Any,
) -> Iterator[tuple[DistributedDataParallel, Any]]:
    with contextlib.ExitStack() as stack:
        ddp = DistributedDataParallel(
            model,
            device_mesh=stack.enter_context(mesh_of(*shape)) if strategy == "hybrid" else None,
            config=SyncConfig(strategy=strategy, **settings),
        )
        stack.callback(ddp.close)
        yield ddp, optimizer_for(ddp, strategy, optimizer)


@contextlib.contextmanager
def stepped(
    num_steps: int, strategy: str = "zero1", optimizer: str = "SGD", *, case: Case = MLP, **settings: Any
) -> Iterator[tuple[DistributedDataParallel, Any]]:
    with training(case.model(), strategy, optimizer, **settings) as (ddp, opt):
        for number in range(num_steps):
            step_of(ddp, opt, case, number)
        yield ddp, opt


def hybrid(model: nn.Module, optimizer: str = "AdamW", **settings: Any) -> Any:
    return training(model, "hybrid", optimizer, **settings)


def optimizer_for(ddp: DistributedDataParallel, strategy: str, name: str = "AdamW", **how: Any) -> Any:
    cls, settings = OPTIMIZERS[name]
    return cls(ddp.parameters(), **settings) if strategy == "ddp" else ShardedOptimizer(cls, ddp, **how, **settings)


def trained(
    case: Case,
    strategy: str = "zero1",
    optimizer: str = "AdamW",
    *,
    num_steps: int = 20,
    each: Step | None = None,
    before: Step | None = None,
    **settings: Any,
) -> Parameters:
    begin = bare_training if strategy == "naive" else functools.partial(training, strategy=strategy)
    with begin(case.model(), optimizer=optimizer, **settings) as (ddp, opt):
        for number in range(num_steps):
            if before is not None:
                before(ddp, opt, number)
            if each is None:
                step_of(ddp, opt, case, number)
            else:
                each(ddp, opt, number)
        return parameters(ddp)


reference = functools.cache(trained)  # for cases and steps of modules, with which many tests compare


class Bare(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.wait = self.no_sync = contextlib.nullcontext

    def forward(self, *inputs: Any) -> Tensor:
        return self.module(*inputs)


@contextlib.contextmanager
def bare_training(
    model: nn.Module, *, optimizer: str, reduction: str = "ordered"
) -> Iterator[tuple[Bare, torch.optim.Optimizer]]:
    """The bare model with torch's optimizer, which takes the mean of gradients over ranks before it steps."""
    bare, (cls, settings) = Bare(model), OPTIMIZERS[optimizer]
    opt = cls(bare.parameters(), **settings)
    opt.register_step_pre_hook(lambda *_: average_gradients(bare))
    yield bare, opt


def average_gradients(model: nn.Module) -> None:
    """Makes every `.grad` that a rank has the mean over ranks, added up in their order; on four, which are a mesh, row by row."""
    for param in model.parameters():
        if (parts := of_ranks(param)) is not None:
            rows = [parts[:2], parts[2:]] if len(parts) == 4 else [parts]
            param.grad = chain([chain(row) for row in rows]) / len(parts)


def of_ranks(param: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor] | None:
    """The gradients that ranks have, zeros for those that have none; None if nobody has one."""
    has_gradient = torch.tensor(float(param.grad is not None))
    dist.all_reduce(has_gradient, group=group)
    if not has_gradient:
        return None
    mine = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return parts


def chain(parts: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def parameters(ddp: nn.Module) -> Parameters:
    ddp.wait()
    return {name: param.detach().clone() for name, param in ddp.named_parameters()}


def require_equal(first: Parameters, second: Parameters, *, what: str = "") -> None:
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert first.keys() == second.keys()
    assert different == [], what


def require_moved(before: Parameters, after: Parameters) -> None:
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def require_same_everywhere(found: Parameters) -> None:
    for other in of_all_ranks(found):
        require_equal(found, other)


def require_bits(
    case: Case,
    optimizer: str = "SGD",
    *,
    among: Sequence[dict[str, Any]] = (),
    plans: Sequence[dict[str, Any]] = (SMALL,),
    before: Step | None = None,
    **settings: Any,
) -> None:
    """Training in shards has the bits of training without, in all ways, or those `among` them, under each of the plans.

    `before` is called before every step in shards; other settings are of both.
    """
    settings = {"optimizer": optimizer, "num_steps": 6, "reduction": "ordered", **settings}
    expected = reference(case, "naive" if dist.get_world_size() == 4 else "ddp", **settings)
    for way in among or ways():
        for plan in plans:
            require_equal(expected, trained(case, before=before, **settings, **way, **plan), what=f"{way} {plan}")


def step_of(ddp: Any, opt: torch.optim.Optimizer, case: Case, number: int) -> None:
    opt.zero_grad()
    case.loss(ddp, number).backward()
    opt.step()


def one_step(ddp: Any, opt: torch.optim.Optimizer, number: int = 0) -> None:
    step_of(ddp, opt, MLP, number)


# MLP with parameters of each dtype.
NARROW = {
    dtype: Case(
        lambda dtype=dtype: MLP.make().to(dtype),
        lambda model, step, dtype=dtype: model(noise(5, 6, step=step).to(dtype)).float().square().sum(),
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
}


def replaces(param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param)


def removes(param: nn.Parameter) -> None:
    param.grad = None


def clears(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.zero_()


WRITES: tuple[Write, ...] = (replaces, removes, clears)
