"""Modules of TorchScript, whole or as a part, train as the plain module does."""

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.alike import of_all_ranks
from support.levels import some
from support.models import noise, scripted
from support.naive import naive_mean, wrapped
from support.ranks import in_ranks
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scale = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)) * self.scale


class Around(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def quietly(make: Callable[..., Any], *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and a trace does not see batch norm's check of sizes
        return make(*arguments)


def loaded(net: nn.Module) -> Any:
    """Its parameters are plain tensors."""
    file = io.BytesIO()
    quietly(torch.jit.save, scripted(net), file)
    file.seek(0)
    return quietly(torch.jit.load, file)


MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "scripted": scripted,
    "traced": lambda net: quietly(torch.jit.trace, net, torch.ones(3, 4)),
    "loaded": loaded,
    "a part": lambda net: Around(scripted(net)),
}


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    some(
        [("loaded", "zero1"), ("scripted", "ddp"), ("traced", "zero2"), ("a part", "zero1"), ("loaded", "ddp")],
        most=1,
    ),
)
def test_a_script_trains_as_its_module_does(kind: str, strategy: str) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return MAKE[kind](Net())

    model, bare = made(dist.get_rank()), made(0)
    with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(bucket_cap_mb=1e-6, strategy=strategy))) as ddp:
        ours: Any = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        if strategy != "ddp":
            ours = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.125, momentum=0.5)
        wanted = torch.optim.SGD(bare.parameters(), lr=0.125, momentum=0.5)
        for step in range(5):
            ours.zero_grad()
            wanted.zero_grad()
            if step == 3:
                for each in (model, bare):
                    getattr(each, "body", each).scale.requires_grad_(False)
            x = noise(3, 4, step=step)
            ddp(x).square().sum().backward()
            for buffer in bare.buffers():
                dist.broadcast(buffer, 0)
            bare(x).square().sum().backward()
            naive_mean(bare)
            ours.step()
            wanted.step()
            ddp.wait()
            assert all(map(torch.equal, model.parameters(), bare.parameters()))
            assert all(map(torch.equal, model.buffers(), bare.buffers()))


@in_ranks(2)
def test_a_parameter_that_is_assigned_to_a_script_is_averaged() -> None:
    model = scripted(Net())
    with wrapped(model) as ddp:
        ddp(noise(3, 4)).square().sum().backward()
        ddp.zero_grad()
        model.scale = nn.Parameter(torch.full((1,), 2.0))
        ddp(noise(3, 4)).square().sum().backward()
        assert torch.equal(*of_all_ranks(model.scale.grad))


@in_ranks(2)
def test_a_frozen_script_has_nothing_to_average() -> None:
    frozen = quietly(torch.jit.freeze, scripted(Net().eval()))
    with pytest.warns(UserWarning, match="RecursiveScriptModule has no parameter that requires a gradient"):
        DistributedDataParallel(frozen).close()
    with wrapped(Around(frozen)) as ddp:
        ddp(noise(3, 4)).square().sum().backward()
        assert torch.equal(*of_all_ranks(ddp.module.head.weight.grad))
