"""Training with plain and with sharded optimizers, for comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from support.models import Case
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig

Parameters = dict[str, Tensor]
OPTIMIZERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
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


@contextlib.contextmanager
def training(
    model: nn.Module, strategy: str = "zero1", optimizer: str = "AdamW", *, eager: bool = False, **settings: Any
) -> Iterator[tuple[DistributedDataParallel, torch.optim.Optimizer]]:
    """The wrapped model with an optimizer that goes with the strategy."""
    ddp = DistributedDataParallel(model, config=SyncConfig(strategy=strategy, **settings))
    try:
        yield ddp, optimizer_for(ddp, strategy, optimizer, eager=eager)
    finally:
        ddp.close()


def optimizer_for(
    ddp: DistributedDataParallel, strategy: str, name: str = "AdamW", *, eager: bool = False
) -> torch.optim.Optimizer:
    cls, settings = OPTIMIZERS[name]
    return cls(ddp.parameters(), **settings) if strategy == "ddp" else ShardedOptimizer(cls, ddp, eager=eager, **settings)


def trained(
    case: Case,
    strategy: str,
    optimizer: str = "AdamW",
    *,
    num_steps: int = 20,
    each: Callable[[DistributedDataParallel, torch.optim.Optimizer, int], None] | None = None,
    **settings: Any,
) -> Parameters:
    """The parameters after those steps; `each` takes one, in place of the usual forward, backward and step."""
    with training(case.model(), strategy, optimizer, **settings) as (ddp, opt):
        for step in range(num_steps):
            if each is None:
                opt.zero_grad()
                case.loss(ddp, step).backward()
                opt.step()
            else:
                each(ddp, opt, step)
        return parameters(ddp)


def parameters(ddp: DistributedDataParallel) -> Parameters:
    ddp.wait()
    return {name: param.detach().clone() for name, param in ddp.named_parameters()}


def require_equal(first: Parameters, second: Parameters, *, what: str = "") -> None:
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert first.keys() == second.keys()
    assert different == [], what


# Most parameters are in pieces.
SMALL = {"bucket_cap_mb": 1e-4}


def step_of(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, case: Any, number: int) -> None:
    opt.zero_grad()
    case.loss(ddp, number).backward()
    opt.step()
