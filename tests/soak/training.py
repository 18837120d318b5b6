"""The training that faults are injected into, and the same in one process, which is what it has to come to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from soak.injections import NAN, NAN_SKIPPED, NUM_STEPS, Injection
from soak.points import Points
from support.hybrid import chain, mesh_of
from support.inside import observe
from support.models import noise
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig

_NO_NUMBER = "norm.bias"  # whose gradient is none


class Net(nn.Module):
    """Layers with buffers between them; one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.middle, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, leaves_out: bool = False) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(x if leaves_out else self.middle(x))


def _net() -> Net:
    torch.manual_seed(7)
    return Net()


def _loss(model: nn.Module, step: int, rank: int, *, micro_batch: int, leaves_out: bool) -> Tensor:
    return model(noise(4, 8, step=step + 100 * micro_batch, rank=rank), leaves_out).square().mean()


def train(injection: Injection, points: Points, settings: dict[str, object]) -> dict[str, Tensor]:
    """The parameters after the last step, in a process that is one of the ranks."""
    rank = dist.get_rank()
    with contextlib.ExitStack() as stack:
        model, optimizer = _made(injection, points, settings, stack)
        net = model.module
        net.norm.register_forward_pre_hook(lambda *_: points.passes("forward"))
        net.norm.weight.register_hook(lambda _: points.passes("backward"))
        net.norm.bias.register_hook(lambda gradient: gradient * float("nan") if points.takes(NAN) else None)
        optimizer.register_step_pre_hook(lambda *_: points.passes("optimizer"))
        for step in range(NUM_STEPS):
            points.step = step
            points.passes("data")
            if points.takes("freezes"):
                net.middle.weight.requires_grad_(False)
            optimizer.zero_grad()
            last = injection.num_micro_batches - 1
            for micro_batch in range(last + 1):
                with model.no_sync() if micro_batch < last else contextlib.nullcontext():
                    _loss(model, step, rank, micro_batch=micro_batch, leaves_out=points.takes("other graph")).backward()
            optimizer.step()
            points.passes("after step")
        model.wait()
        return {name: param.detach().clone() for name, param in net.named_parameters()}


def _made(
    injection: Injection, points: Points, settings: dict[str, object], stack: contextlib.ExitStack
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    class Passing(torch.optim.AdamW):
        def step(self, *args: object) -> object:
            points.passes("update")
            return super().step(*args)

    how = {"bucket_cap_mb": injection.bucket_cap_mb, "reduction": injection.reduction, **settings}
    strategy = "zero1" if injection.strategy == "eager" else injection.strategy
    mesh = stack.enter_context(_mesh()) if strategy == "hybrid" else None
    model = DistributedDataParallel(_net(), device_mesh=mesh, config=SyncConfig(strategy=strategy, **how))
    observe(
        model,
        before=lambda op: points.passes(f"before {op.kind}"),
        after=lambda op: points.passes(f"behind {op.kind}"),
    )
    stack.callback(points.script_ends, model)
    if strategy == "ddp":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, ShardedOptimizer(Passing, model, lr=0.01, eager=injection.strategy == "eager")


@contextlib.contextmanager
def _mesh() -> Iterator[object]:
    """Its groups stay where the script fails, as those of scripts do."""
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(mesh_of(2, 2))
        try:
            yield mesh
        finally:
            stack.pop_all()


def expected(injection: Injection) -> dict[str, Tensor]:
    """The parameters that every rank has to end with: one process does what all ranks do, one after the other."""
    model, rows = _net(), ((0, 1), (2, 3)) if injection.strategy == "hybrid" else (tuple(range(injection.num_ranks)),)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        gradients = [_gradients(model, injection, step, rank) for rank in range(injection.num_ranks)]
        for name, param in model.named_parameters():
            of_ranks = [gradient.get(name) for gradient in gradients]
            param.grad = _mean(of_ranks, rows) if any(one is not None for one in of_ranks) else None
        if injection.kind != NAN_SKIPPED or step != injection.step:
            optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def _gradients(model: nn.Module, injection: Injection, step: int, rank: int) -> dict[str, Tensor]:
    acts = (rank, step) == (injection.rank, injection.step)
    model.zero_grad()
    for micro_batch in range(injection.num_micro_batches):
        leaves_out = acts and injection.kind == "other graph" and micro_batch == 0
        _loss(model, step, rank, micro_batch=micro_batch, leaves_out=leaves_out).backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    if acts and injection.kind.startswith(NAN):
        gradients[_NO_NUMBER] = gradients[_NO_NUMBER] * float("nan")
    return gradients


def _mean(of_ranks: Sequence[Tensor | None], rows: Sequence[Sequence[int]]) -> Tensor:
    like = next(one for one in of_ranks if one is not None)
    parts = [torch.zeros_like(like) if one is None else one for one in of_ranks]
    return chain([chain([parts[rank] for rank in row]) for row in rows]) / len(parts)


def different(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same to the bit; what is no number is so in both."""
    names = sorted(first.keys() | second.keys())
    return [name for name in names if name not in first or name not in second or not _is_same(first[name], second[name])]


def _is_same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())
