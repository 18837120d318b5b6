"""Gradients that arrive again after their bucket has left."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.models import noise
from support.naive import naive_mean, require_same_gradients, wrapped_and_bare
from support.ranks import Ranks, in_ranks

CAPS = [1e-6, 25.0]


class NestedBackward(torch.autograd.Function):
    """Runs a whole backward through a layer inside its own."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, layer: nn.Module, num_times: int) -> Tensor:
        ctx.layer, ctx.num_times = layer, num_times
        ctx.save_for_backward(x)
        return layer(x).detach().clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        total = torch.zeros_like(x)
        for _ in range(ctx.num_times):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                ctx.layer(inner).backward(grad)
            total += inner.grad
        return total, None, None


class Layers(nn.Module):
    """Three layers, of which `way` runs the middle one so that its gradients come in several parts."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self.middle, self.first(x).tanh()).tanh())


def checkpointed_once(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def checkpointed_without_reentry(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False)


def checkpointed_twice(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, checkpoint(layer, x, use_reentrant=True).tanh(), use_reentrant=True)


def checkpointed_three_times(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, checkpointed_twice(layer, x), use_reentrant=True)


def checkpoint_in_a_checkpoint(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: layer(checkpointed_once(layer, x)), x, use_reentrant=True)


def plain_and_checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(checkpointed_once(layer, x)) + checkpointed_once(layer, x)


def nested_backward(layer: nn.Module, x: Tensor) -> Tensor:
    return NestedBackward.apply(x, layer, 1)


def two_nested_backwards(layer: nn.Module, x: Tensor) -> Tensor:
    return NestedBackward.apply(x, layer, 2)


def nested_and_plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(NestedBackward.apply(x, layer, 2).tanh())


def on_rank_1_only(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpointed_twice(layer, x) if dist.get_rank() == 1 else layer(x)


def more_often_from_rank_to_rank(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(1 + dist.get_rank()):
        x = checkpointed_once(layer, x).tanh()
    return x


WAYS = [
    checkpointed_once,
    checkpointed_without_reentry,
    checkpointed_twice,
    checkpointed_three_times,
    checkpoint_in_a_checkpoint,
    plain_and_checkpointed,
    nested_backward,
    two_nested_backwards,
    nested_and_plain,
    on_rank_1_only,
    more_often_from_rank_to_rank,
]


def each_step_is_right(way: Callable, settings: dict[str, object]) -> None:
    with wrapped_and_bare(Layers(way), **settings) as (ddp, bare):
        for step in range(4):
            for model in (ddp, bare):
                model.zero_grad()
                model(noise(3, 4, step=step)).square().sum().backward()
            naive_mean(bare)
            require_nearly_same(ddp, bare)


def require_nearly_same(ddp: nn.Module, bare: nn.Module) -> None:
    """A part that came late is averaged alone: (a + b) / 2 + (c + d) / 2 in place of ((a + c) + (b + d)) / 2."""
    for ours, wanted in zip(ddp.parameters(), bare.parameters(), strict=True):
        tolerance = 4 * torch.finfo(wanted.dtype).eps * float(wanted.grad.abs().max())
        torch.testing.assert_close(ours.grad, wanted.grad, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize(("bucket_cap_mb", "overlap"), [(1e-6, True), (25.0, True), (1e-6, False)])
@pytest.mark.parametrize("way", WAYS)
def test_parts_that_come_late_are_added(ranks: Ranks, way: Callable, bucket_cap_mb: float, overlap: bool) -> None:
    ranks.run(each_step_is_right, way, {"bucket_cap_mb": bucket_cap_mb, "overlap": overlap})


def num_collectives_per_step(way: Callable) -> list[int]:
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counted(*args: object, **kwargs: object) -> object:
        calls[-1] += 1
        return all_reduce(*args, **kwargs)

    with wrapped_and_bare(Layers(way), bucket_cap_mb=1e-6, order="reverse") as (ddp, _):
        dist.all_reduce = counted
        try:
            for step in range(4):
                calls.append(0)
                ddp(noise(3, 4, step=step)).sum().backward()
        finally:
            dist.all_reduce = all_reduce
    return calls


def test_late_parts_cost_a_second_round_once(ranks: Ranks) -> None:
    """Six buckets; in the first step those of the middle layer's weight and bias go out twice."""
    for calls in ranks.run(num_collectives_per_step, checkpointed_twice):
        assert calls == [8, 6, 6, 6]


@in_ranks(2, 3)
@pytest.mark.parametrize("bucket_cap_mb", CAPS)
def test_a_gradient_penalty_is_right(bucket_cap_mb: float) -> None:
    with wrapped_and_bare(Layers(lambda layer, x: layer(x)), bucket_cap_mb=bucket_cap_mb) as (ddp, bare):
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                x = noise(3, 4, step=step).requires_grad_()
                result = model(x).square().sum()
                (slope,) = torch.autograd.grad(result, x, create_graph=True)
                (result + slope.square().sum()).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)


@in_ranks(2)
@pytest.mark.parametrize("way", [nested_backward, two_nested_backwards, nested_and_plain])
def test_gradients_that_have_a_graph_are_reduced_without_it(way: Callable) -> None:
    with wrapped_and_bare(Layers(way), bucket_cap_mb=1e-6) as (ddp, bare), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True will create a reference cycle")
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                model(noise(3, 4, step=step)).square().sum().backward(create_graph=True)
            for param in bare.parameters():
                param.grad = param.grad.detach()
            naive_mean(bare)
            require_nearly_same(ddp, bare)
            assert not any(param.grad.requires_grad for param in ddp.parameters())
