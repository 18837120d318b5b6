"""What runs that save and are interrupted train: a small model by strategy, with inputs of the step and the rank."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from undertow import DistributedDataParallel, Outer, ShardedOptimizer, SyncConfig

_WIDTH = 8
_CONFIGS = {
    "ddp": SyncConfig(bucket_cap_mb=0.002),
    "zero1": SyncConfig(bucket_cap_mb=0.002, strategy="zero1"),
    "param_wire": SyncConfig(bucket_cap_mb=0.002, strategy="zero1", param_wire="int8"),
    "outer": SyncConfig(bucket_cap_mb=0.002, outer=Outer(every=4, fragments=2, delay=1)),
}


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(_WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, _WIDTH))


def made(kind: str) -> tuple[Any, Any]:
    """The wrapped model, and its optimizer."""
    model = DistributedDataParallel(net(), config=_CONFIGS[kind])
    if kind in ("ddp", "outer"):
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, ShardedOptimizer(torch.optim.AdamW, model, lr=0.01)


def inputs(number: int) -> torch.Tensor:
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))


def steps(model: Any, optimizer: Any, numbers: Iterable[int]) -> None:
    for number in numbers:
        optimizer.zero_grad()
        model(inputs(number)).square().mean().backward()
        optimizer.step()


def parameters(model: Any) -> list[torch.Tensor]:
    model.wait()
    return [param.detach().clone() for param in model.parameters()]
