"""Changes at moments at which a look at the module is easily missed, or sees too much: steps have the naive reference's bits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from support.models import noise
from support.naive import TIMEOUT_S, naive_mean, wrapped_and_bare
from support.ranks import in_ranks
from undertow import ShardedOptimizer

SMALL = {"bucket_cap_mb": 1e-6, "buffers": "off"}  # a bucket for each parameter
NUM_STEPS, MOMENT = 5, 2


class Tower(nn.Module):
    """Layers that are called in turn; the forward makes one more if `makes_layer`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.makes_layer = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.makes_layer:
            torch.manual_seed(5)
            self.layers.append(nn.Linear(4, 4))
            self.makes_layer = False
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs.square().sum()


def require_equal_parameters(one: nn.Module, other: nn.Module) -> None:
    assert [torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True)].count(False) == 0


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125)


@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("way", ["plain", "zero1"])
def test_a_layer_that_is_made_within_the_forward_is_averaged_in_the_same_backward(way: str) -> None:
    with wrapped_and_bare(Tower(), **SMALL, strategy=None if way == "plain" else way) as (ddp, bare):
        optimizers = [sgd(ddp) if way == "plain" else ShardedOptimizer(torch.optim.SGD, ddp, lr=0.125), sgd(bare)]
        for step in range(NUM_STEPS):
            for model, tower, optimizer in zip((ddp, bare), (ddp.module, bare), optimizers, strict=True):
                optimizer.zero_grad()
                tower.makes_layer = step == MOMENT
                loss = model(noise(3, 4, step=step))
                if step == MOMENT:
                    optimizer.add_param_group({"params": list(tower.layers[-1].parameters())})
                loss.backward()
            naive_mean(bare)
            for optimizer in optimizers:
                optimizer.step()
            require_equal_parameters(ddp.module, bare)


@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
def test_a_layer_that_no_optimizer_holds_yet_counts_in_the_norm_that_torch_clips() -> None:
    with wrapped_and_bare(Tower(), **SMALL) as (ddp, bare):
        optimizers = [sgd(ddp), sgd(bare)]
        for step in range(NUM_STEPS):
            for model, tower in ((ddp, ddp.module), (bare, bare)):
                model.zero_grad()
                tower.makes_layer = step == MOMENT
                model(noise(3, 4, step=step)).backward()
            naive_mean(bare)
            for model, optimizer in zip((ddp, bare), optimizers, strict=True):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            require_equal_parameters(ddp.module, bare)


def call_with_others(ddp: nn.Module, others: nn.Module, inputs: Tensor) -> None:
    ddp.eval()
    functional_call(ddp, {f"module.{name}": param for name, param in others.named_parameters()}, (inputs,))
    ddp.train()


def exchange_for_a_look(ddp: Any, others: Any, inputs: Tensor) -> None:
    for _ in range(2):
        for layer, other in zip(ddp.module.layers, others.layers, strict=True):
            layer.weight, other.weight = other.weight, layer.weight
        ddp.eval()
        ddp(inputs)
        ddp.train()


@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["rank 0", "all ranks"])
@pytest.mark.parametrize("look", [call_with_others, exchange_for_a_look])
def test_a_look_with_other_parameters_between_backward_and_step_owes_no_round(look: Any, ranks: tuple[int, ...]) -> None:
    others = Tower()
    with wrapped_and_bare(Tower(), **SMALL) as (ddp, bare):
        optimizers = [sgd(ddp), sgd(bare)]
        for step in range(NUM_STEPS):
            for model in (ddp, bare):
                model.zero_grad()
                model(noise(3, 4, step=step)).backward()
            naive_mean(bare)
            if step == MOMENT and dist.get_rank() in ranks:
                look(ddp, others, noise(3, 4))
            for optimizer in optimizers:
                optimizer.step()
            require_equal_parameters(ddp.module, bare)


@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("moment", ["a look at the loss", "new memory in the step"])
def test_a_rank_that_does_more_than_the_others_freezes_a_layer_with_them(moment: str) -> None:
    looks, writes = moment == "a look at the loss", moment == "new memory in the step"
    with wrapped_and_bare(Tower(), **SMALL) as (ddp, bare):
        optimizers = [sgd(ddp), sgd(bare)]
        for step in range(NUM_STEPS):
            is_mine = dist.get_rank() == 0
            for model, tower in ((ddp, ddp.module), (bare, bare)):
                if step == MOMENT + 1:
                    tower.layers[0].requires_grad_(False)
                model.zero_grad()
                loss = model(noise(3, 4, step=step))
                if writes and is_mine and step == MOMENT + 1:
                    tower.layers[2].bias.data = tower.layers[2].bias.data.clone()
                loss.backward()
            naive_mean(bare)
            if looks and is_mine and step == MOMENT:
                with ddp.no_sync():
                    ddp(noise(3, 4))
            for optimizer in optimizers:
                optimizer.step()
            require_equal_parameters(ddp.module, bare)
