"""Training with plain and with sharded optimizers, for comparison."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.models import Case
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig
from undertow.runtime.gathers import Gathers
from undertow.schedule import OpKind

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


def delay(ddp: DistributedDataParallel, kind: OpKind, late_rank: int, *, seconds: float) -> list[OpKind]:
    """From now on that rank is late with every op of this kind, under the present plan; what it has been late with."""
    table = ddp.sync._engine.formation.assembly.executor._table
    act, delayed = table[kind], []

    def late(*args: Any) -> None:
        if dist.get_rank() == late_rank:
            delayed.append(kind)
            time.sleep(seconds)
        act(*args)

    table[kind] = late
    return delayed


# Most parameters are in pieces.
SMALL = {"bucket_cap_mb": 1e-4}


class SlowGathers:
    """Has every gather take long on the wire, on one rank or all."""

    def __init__(self, ddp: DistributedDataParallel, *, delay_s: float = 0.02) -> None:
        self.waited: list[int] = []
        gathers = gathers_of(ddp)
        wait = gathers.wait

        def noted(buckets: Any) -> None:
            chosen = [bucket for bucket in buckets if bucket in gathers.in_flight]
            self.waited += chosen
            wait(chosen)

        gathers.wait = noted  # type: ignore[method-assign]
        exchanges = gathers._exchanges
        post = exchanges._send  # type: ignore[attr-defined]

        def late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(delay_s * (dist.get_rank() == 0))
            return post(*args, **kwargs)

        exchanges._send = late  # type: ignore[attr-defined]


def gathers_of(ddp: DistributedDataParallel) -> Gathers:
    return ddp.sync._engine.formation.assembly.reducer.sharding.gathers


def step_of(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, case: Any, number: int) -> None:
    opt.zero_grad()
    case.loss(ddp, number).backward()
    opt.step()
