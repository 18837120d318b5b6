"""Gradients that a function of the user's writes into `.grad` by itself, as fused weight gradients are: autograd brings none."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.drop_in import TIMEOUT_S, average_each, require_same_on_every_rank
from support.errors import text_of
from support.models import noise
from support.naive import require_same
from support.ranks import Ranks, in_ranks
from undertow import DistributedDataParallel, PhaseError, ShardedOptimizer, SyncConfig


class Fused(torch.autograd.Function):
    """A linear layer whose backward adds to its weight's gradient, or makes it; autograd knows nothing of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return x @ layer.weight.detach().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.layer.weight
        new = grad.t() @ x
        if weight.grad is None:
            weight.grad = new
        else:
            weight.grad.add_(new)
        return grad @ weight.detach(), None


class Model(nn.Module):
    """Two layers and a fused one between them or at the end, whose weight may be used by an ordinary layer as well."""

    def __init__(self, *, is_last: bool = False, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight, self.last = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)
        self.never = nn.Parameter(torch.zeros(3))
        self.is_last, self.is_tied = is_last, is_tied

    def forward(self, x: Tensor, *, fused: bool = True) -> Tensor:
        hidden = self.first(x)
        if self.is_tied:  # an ordinary use after the fused one, so that its gradient comes first and the bucket leaves
            return nn.functional.linear(self.last(Fused.apply(hidden, self)).tanh(), self.weight)
        if self.is_last:
            return Fused.apply(self.last(hidden), self)
        return self.last(Fused.apply(hidden, self)) if fused else self.last(hidden)


MODELS = {"in the middle": {}, "ahead of all hooks": {"is_last": True}, "used by autograd too": {"is_tied": True}}


def written(kind: str, strategy: str, set_to_none: bool, num_micro_batches: int) -> tuple[str, ...]:
    model = Model(**MODELS[kind])
    bare = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, config=SyncConfig(strategy=strategy, bucket_cap_mb=1e-6))
    sgd = torch.optim.SGD
    ours = sgd(model.parameters(), lr=0.05) if strategy == "ddp" else ShardedOptimizer(sgd, ddp, lr=0.05)
    for step in range(4):
        for each, optimizer in ((ddp, ours), (bare, sgd(bare.parameters(), lr=0.05))):
            for micro in range(num_micro_batches):
                is_last = micro == num_micro_batches - 1
                with ddp.no_sync() if each is ddp and not is_last else contextlib.nullcontext():
                    # Only the first micro-batch uses the fused layer, where there are several.
                    loss = each(noise(3, 4, step=10 * step + micro), fused=micro == 0).square().mean()
                    if micro == 0:
                        optimizer.zero_grad(set_to_none=set_to_none)
                    loss.backward()
            if each is bare:
                average_each(bare)
            optimizer.step()
        ddp.wait()
        if kind == "used by autograd too":  # (a + b) / 2 + (c + d) / 2 for ((a + c) + (b + d)) / 2: some units in the last place
            for mine, wanted in zip(model.parameters(), bare.parameters(), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0.0, atol=4 * torch.finfo(torch.float32).eps)
                with torch.no_grad():
                    wanted.copy_(mine)
        else:
            require_same(*({key: it.detach() for key, it in each.named_parameters()} for each in (model, bare)))
        require_same_on_every_rank(model)
    unused = ddp.unused_parameters
    ddp.close()
    return unused


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("strategy", "set_to_none", "num_micro_batches"),
    [("ddp", True, 1), ("ddp", False, 1), ("ddp", True, 2), ("zero1", True, 1), ("zero1", False, 2), ("zero2", True, 1)],
    ids=lambda it: str(it),
)
def test_a_gradient_that_a_function_writes_itself_is_averaged(
    two_ranks: Ranks, kind: str, strategy: str, set_to_none: bool, num_micro_batches: int
) -> None:
    for unused in two_ranks.run(written, kind, strategy, set_to_none, num_micro_batches, timeout_s=TIMEOUT_S):
        assert unused == ("never",)


@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
def test_a_gradient_that_is_written_too_late_for_an_eager_step_is_an_error() -> None:
    """What comes after a bucket was stepped is an error, as from autograd; what comes before is not."""
    for kind, expected in (
        ("in the middle", None),
        ("used by autograd too", "parameters are read in the backward that has updated them already."),
    ):
        ddp = DistributedDataParallel(Model(**MODELS[kind]), config=SyncConfig(strategy="zero1", bucket_cap_mb=1e-6))
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, eager=True, lr=0.05)

        def step(number: int, ddp: Any = ddp, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            ddp(noise(3, 4, step=number)).square().mean().backward()
            optimizer.step()

        step(0)
        if expected is None:
            step(1)
            ddp.wait()
            require_same_on_every_rank(ddp)
        else:
            assert text_of(PhaseError, lambda: step(1)).startswith(expected)
        ddp.close()


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_a_rank_that_does_not_use_what_another_writes_gets_the_mean() -> None:
    """Rank 1 does not use the fused layer, and gets the mean all the same; then no rank does, and gradients stay."""
    model = Model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    ddp(noise(3, 4), fused=dist.get_rank() == 0).square().mean().backward()
    bare = Model()
    bare(noise(3, 4), fused=dist.get_rank() == 0).square().mean().backward()
    average_each(bare)
    require_same({"weight": model.weight.grad}, {"weight": bare.weight.grad})
    before = model.weight.grad.clone() / 3
    model.weight.grad = before.clone()
    ddp(noise(3, 4), fused=False).square().mean().backward()
    require_same({"weight": model.weight.grad}, {"weight": before})
    ddp.close()


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("of_some", [False, True])
def test_gradients_assigned_by_hand_are_averaged_before_the_step(of_some: bool) -> None:
    """Of all parameters: no backward runs, and the synchronization that the forward owes comes before the optimizer's step.

    Of some: the others' backward comes after it, and takes up the plan in the order observed.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    bare = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    for step in range(3):
        for each, module in ((ddp, model), (bare, bare)):
            params = tuple(module.parameters())
            chosen, others = (params[2:4], [*params[:2], *params[4:]]) if of_some else (params, [])
            each.zero_grad()
            loss = each(noise(3, 4, step=step)).square().mean()
            grads = torch.autograd.grad(loss, chosen, retain_graph=True)
            for param, grad in zip(chosen, grads, strict=True):
                param.grad = grad
            if others:
                loss.backward(inputs=others)
            if each is bare:
                average_each(bare)
            torch.optim.SGD(params, lr=0.1).step()
        require_same(*({key: it.detach() for key, it in each.named_parameters()} for each in (model, bare)))
    ddp.close()


def summed(way: str, set_to_none: bool) -> str | None:
    """The fused layer writes before any gradient has told that a backward begins."""
    model = Model(is_last=True)
    bare = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, config=SyncConfig(bucket_cap_mb=1e-6, op="sum" if way == "sum" else "mean"))

    def train(step: int) -> None:
        for each in (ddp, bare):
            each.zero_grad(set_to_none=set_to_none)
            if way == "weights" and each is ddp:
                ddp.weight(1.0)
            each(noise(3, 4, step=step)).square().mean().backward()
        average_each(bare)
        if way == "sum":
            for param in bare.parameters():
                param.grad = None if param.grad is None else param.grad * dist.get_world_size()
        require_same(*({key: it.grad for key, it in each.named_parameters()} for each in (model, bare)))

    train(0)
    text = None
    if set_to_none:
        train(1)
        train(2)
    else:
        text = text_of(PhaseError, lambda: train(1))
    ddp.close()
    return text


@pytest.mark.parametrize("way", ["sum", "weights"])
def test_what_is_written_is_told_from_an_earlier_sum_or_is_an_error(fresh_pair: Ranks, way: str) -> None:
    fresh_pair.run(summed, way, True, timeout_s=TIMEOUT_S)
    for text in fresh_pair.run(summed, way, False, timeout_s=TIMEOUT_S):
        assert text == (
            "something else than autograd has added to a gradient that holds an earlier result, "
            "and the two cannot be told apart.\n"
            "  parameter 'weight', before the first gradient of a backward arrived\n"
            "  Clear gradients with zero_grad(set_to_none=True) before each backward, and change them before the forward only."
        )
