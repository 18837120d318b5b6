"""Whatever a forward does and returns: shared weights, checkpoints, buffers, nested outputs, other parameters, exceptions."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from support.drop_in import TIMEOUT_S, SideBySide, squares, with_both_plans
from support.models import CASES, Branches, mlp, noise
from support.ranks import Ranks, in_ranks

NUM_STEPS = 3


@in_ranks(2, 3)
@with_both_plans
def test_tied_weights_have_one_gradient(bucket_cap_mb: float | None) -> None:
    case = CASES["tied transformer"]
    with SideBySide(case.model(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.step(lambda model, step=step: case.loss(model, 2 * step))


@in_ranks(2, 3)
@with_both_plans
def test_a_module_may_be_used_several_times(bucket_cap_mb: float | None) -> None:
    with SideBySide(Branches(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            order = (0, 1, 0, 2, 0, 0) if dist.get_rank() == 0 else (2, 0, 1)
            side.step(lambda model, step=step, order=order: model(noise(2, 4, step=step), order).square().mean())


class Checkpointed(nn.Module):
    """Three layers; the middle one runs `num_times` in checkpoints."""

    def __init__(self, num_times: int, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.num_times = num_times
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.num_times):
            x = checkpoint(self.middle, x.tanh(), use_reentrant=self.use_reentrant)
        return self.last(x)


def checkpoints(num_times: int, use_reentrant: bool, bucket_cap_mb: float | None) -> None:
    with SideBySide(Checkpointed(num_times, use_reentrant), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            side.backward(squares(3, 4, step=step))
            side.compare(in_parts=use_reentrant and num_times > 1)
            side.optimize()


@with_both_plans
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("num_times", [1, 2])
def test_a_layer_may_be_checkpointed(ranks: Ranks, num_times: int, use_reentrant: bool, bucket_cap_mb: float | None) -> None:
    ranks.run(checkpoints, num_times, use_reentrant, bucket_cap_mb, timeout_s=TIMEOUT_S)


@in_ranks(2, 3)
@with_both_plans
def test_batch_norm_allows_two_forwards_before_backward(bucket_cap_mb: float | None) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    with SideBySide(model, bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.step(lambda model, step=step: squares(5, 6, step=2 * step)(model) + squares(5, 6, step=2 * step + 1)(model))
        for ours, wanted in zip(side.module.buffers(), side.bare.buffers(), strict=True):
            # Statistics follow rank 0, for which nothing differs.
            assert dist.get_rank() > 0 or torch.equal(ours, wanted)


class Scaled(nn.Module):
    """Multiplies by a buffer, which autograd saves for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.tensor([3.0]))

    def forward(self) -> Tensor:
        return (self.weight * self.scale).sum()


def saved_buffer() -> list[float]:
    with SideBySide(Scaled()) as side:
        first = side.ddp()
        if dist.get_rank() == 0:
            side.module.scale = torch.tensor([201.0])
        second = side.ddp()
        results = []
        for result in (first, second):
            side.ddp.zero_grad()
            result.backward()
            results.append(side.module.weight.grad.item())
        return results


def test_a_buffer_that_backward_needs_is_not_overwritten_by_the_next_forward(ranks: Ranks) -> None:
    """Exact: the mean of three equal small integers is that integer."""
    for results in ranks.run(saved_buffer):
        assert results == [3.0, 201.0]


def stop(*_: object) -> None:
    raise ZeroDivisionError


def in_no_sync(side: SideBySide, step: int) -> None:
    def accumulate() -> None:
        with side.accumulating():
            side.backward(squares(2, 4, step=step))
            stop()

    with pytest.raises(ZeroDivisionError):
        accumulate()


def in_forward(side: SideBySide, step: int) -> None:
    for model, module in zip(side.both, side.both_modules, strict=True):
        handle = module.layers[1].register_forward_hook(stop)
        with pytest.raises(ZeroDivisionError):
            squares(2, 4, step=step)(model)
        handle.remove()


def in_backward(side: SideBySide, step: int) -> None:
    for model, module in zip(side.both, side.both_modules, strict=True):
        handle = module.layers[1].weight.register_hook(stop)
        with pytest.raises(ZeroDivisionError):
            squares(2, 4, step=step)(model).backward()
        handle.remove()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("at_step", [0, 1])
@pytest.mark.parametrize("where", [in_no_sync, in_forward, in_backward])
def test_the_step_after_an_exception_is_right(
    where: Callable[[SideBySide, int], None], at_step: int, bucket_cap_mb: float | None
) -> None:
    with SideBySide(Branches(), bucket_cap_mb) as side:
        for step in range(3):
            if step == at_step:
                where(side, step)
            side.step(squares(2, 4, step=step))


Both = namedtuple("Both", "left right")


@dataclass
class Record:
    left: Tensor
    right: list[Tensor]
    note: str | None = None


class Plain:
    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right


# How two tensors are returned, and where they are found again.
OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "dict": (lambda x, y: {"x": x, "more": {"y": y, "n": 3, "none": None}}, lambda out: (out["x"], out["more"]["y"])),
    "tuple": (lambda x, y: (x, None, 7, (y, "text")), lambda out: (out[0], out[3][0])),
    "list": (lambda x, y: [x, [y], None], lambda out: (out[0], out[1][0])),
    "named tuple": (Both, lambda out: (out.left, out.right)),
    "dataclass": (lambda x, y: Record(x, [y]), lambda out: (out.left, out.right[0])),
    "object": (Plain, lambda out: (out.left, out.right)),
}


class TwoOutputs(nn.Module):
    """Returns two tensors with parameters of their own in a structure, and remembers it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)
        self.name = name
        self.made: Any = None

    def forward(self, x: Tensor) -> Any:
        self.made = OUTPUTS[self.name][0](self.left(x), self.right(x))
        return self.made


@in_ranks(2, 3)
@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_comes_back_as_it_is_and_trains(name: str) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        out = model(noise(5, 6, step=step))
        assert model is side.bare or out is side.module.made
        left, right = OUTPUTS[name][1](out)
        return left.square().mean() + (right.square().mean() if step != 1 else 0)

    with SideBySide(TwoOutputs(name), 1e-6) as side:
        for step in range(NUM_STEPS):
            side.step(lambda model, step=step: loss(model, step))


@in_ranks(2, 3)
@with_both_plans
@pytest.mark.parametrize("arguments", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_an_output_may_be_changed_in_place(arguments: dict[str, bool], bucket_cap_mb: float | None) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        out = model(noise(5, 6, step=step))
        out.mul_(2).add_(1)
        out[:, 0] = 0
        return out.square().mean()

    with SideBySide(mlp(), bucket_cap_mb, **arguments) as side:
        for step in range(NUM_STEPS):
            side.step(lambda model, step=step: loss(model, step))


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("of_the_wrapper", [True, False], ids=["of the wrapper", "of the module"])
def test_a_functional_call_trains_what_its_parameters_are_made_from(of_the_wrapper: bool, bucket_cap_mb: float | None) -> None:
    """Every second step runs on tensors that are made from the parameters."""

    def loss(model: nn.Module, step: int) -> Tensor:
        called = side.module if model is side.ddp and not of_the_wrapper else model
        doubled = {name: 2 * param for name, param in called.named_parameters()}
        return functional_call(called, doubled, (noise(5, 6, step=step),)).square().mean()

    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(4):
            side.step((lambda model, step=step: loss(model, step)) if step % 2 else squares(5, 6, step=step))
