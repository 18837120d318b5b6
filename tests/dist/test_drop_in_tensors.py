"""Parameters and gradients of every kind: strides, dtypes, no elements, no parameters, one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist.test_events import collectives
from support.drop_in import TIMEOUT_S, SideBySide, groups_of, squares, with_both_plans
from support.models import Branches, convolutions, mlp, noise
from support.naive import require_same_gradients
from support.ranks import Ranks, in_ranks

NUM_STEPS = 3


class Complex(nn.Module):
    """Parameters of both complex dtypes, and a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.fine = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real((x.to(torch.complex64) @ self.weight) * self.fine * self.scale)


class MixedDtypes(nn.Module):
    """One layer after the other, each of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float32]
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


class Strided(nn.Module):
    """Parameters whose memory is no plain row of rows, and gradients that are not laid out as their parameter is."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.with_gaps = nn.Parameter(torch.randn(3, 10)[:, ::2])
        self.used_turned = nn.Parameter(torch.randn(2, 5))
        self.summed = nn.Parameter(torch.randn(3, 2))  # its gradient is one number, expanded
        self.broadcast = nn.Parameter(torch.randn(1, 2))
        self.block = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.turned @ self.with_gaps @ self.used_turned.t() * self.broadcast
        return out + x.mean() * self.summed.sum() + self.block.sum(0).mean(1)


class NoElements(nn.Module):
    """Parameters without elements among others, one of which is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(0, 3))
        self.layer = nn.Linear(4, 2)
        self.second = nn.Parameter(torch.zeros(2, 0))
        self.unused = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.first.sum() + self.second.sum()


class OnlyNoElements(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = convolutions()

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(2, 2, 6, 6)
        return self.layers(x.contiguous(memory_format=torch.channels_last))


# A model, and the shape of its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "complex": (Complex, (3, 4)),
    "mixed dtypes": (MixedDtypes, (3, 4)),
    "strided": (Strided, (3, 4)),
    "no elements": (NoElements, (3, 4)),
    "only no elements": (OnlyNoElements, (3, 4)),
    "channels last": (ChannelsLast, (4, 36)),
}


def require_strides_of_the_bare_ones(side: SideBySide) -> None:
    """What torch promises of `.grad`: the strides of the parameter, if that fills its memory, else those of a new tensor."""
    strides = [[param.grad is not None and param.grad.stride() for param in module.parameters()] for module in side.both_modules]
    assert strides[0] == strides[1]


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_every_kind_train(name: str, bucket_cap_mb: float | None) -> None:
    make, shape = MODELS[name]
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(make())
    with SideBySide(models[0], bucket_cap_mb, bare=models[1]) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            with side.accumulating():
                side.backward(squares(*shape, step=2 * step))
            side.backward(squares(*shape, step=2 * step + 1))
            side.compare()
            require_strides_of_the_bare_ones(side)
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_gradient_may_get_new_data(bucket_cap_mb: float | None) -> None:
    """`.grad.data = ...` is a common way to scale or to clip; it gives the same tensor another memory."""
    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(4):
            if step != 2:
                side.zero_grad()
            side.backward(squares(5, 6, step=step))
            side.compare()
            for model in side.both:
                for param in model.parameters():
                    param.grad.data = param.grad.data * 0.5
            require_same_gradients(side.ddp, side.bare)
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_model_may_become_channels_last(bucket_cap_mb: float | None) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    with SideBySide(model, bucket_cap_mb) as side:
        for step in range(4):
            if step == 2:  # with the gradients, which are there
                for module in side.both_modules:
                    module.to(memory_format=torch.channels_last)
            side.step(squares(2, 2, 6, 6, step=step))


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_module_without_parameters_can_be_wrapped(bucket_cap_mb: float | None) -> None:
    with pytest.warns(UserWarning, match="Flatten has no parameter that requires a gradient"):
        wrapped = SideBySide(nn.Flatten(), bucket_cap_mb)
    with wrapped as side:
        for step in range(NUM_STEPS):
            x = noise(2, 3, 2, step=step).requires_grad_()
            side.ddp(x).square().sum().backward()
            assert torch.equal(x.grad, 2 * x)
            with side.accumulating():
                side.ddp(x).sum().backward()
            side.ddp.finish()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_frozen_module_can_be_wrapped(bucket_cap_mb: float | None) -> None:
    with pytest.warns(UserWarning, match="Sequential has no parameter that requires a gradient"):
        wrapped = SideBySide(mlp().requires_grad_(False), bucket_cap_mb)
    with wrapped as side:
        for step in range(NUM_STEPS):
            inputs = [noise(5, 6, step=step).requires_grad_() for _ in side.both]
            for model, x in zip(side.both, inputs, strict=True):
                model(x).square().sum().backward()
            assert torch.equal(inputs[0].grad, inputs[1].grad)
            side.ddp.finish()
            side.optimize()
            require_same_gradients(side.ddp, side.bare)


def one_rank(bucket_cap_mb: float | None) -> list[str]:
    """Steps of all kinds in a group that has one rank."""

    def compare() -> None:
        require_same_gradients(side.ddp, side.bare)

    (group,) = groups_of(*([rank] for rank in range(dist.get_world_size())))
    with SideBySide(Branches(), bucket_cap_mb, process_group=group) as side, collectives() as called:
        for step in range(4):
            if step == 2:
                for module in side.both_modules:
                    module.layers[0].requires_grad_(False)
                    module.layers.append(nn.Linear(4, 4).requires_grad_(True))
                    with torch.no_grad():
                        module.layers[3].weight.fill_(0.5)
                        module.layers[3].bias.fill_(0.25)
            side.zero_grad()
            with side.accumulating():
                side.backward(lambda model, step=step: model(noise(2, 4, step=step)).square().mean())
            side.backward(lambda model, step=step: model(noise(2, 4, step=step), (0, 1)).square().mean())
            compare()
            if step >= 2:
                side.backward(lambda model, step=step: model(noise(2, 4, step=step), (3, 1)).square().mean())
            side.ddp.finish()
            compare()
            for model in side.both:
                torch.optim.SGD(model.parameters(), lr=0.1).step()
    dist.destroy_process_group(group)
    return called


@with_both_plans
def test_one_rank_runs_no_collective(ranks: Ranks, bucket_cap_mb: float | None) -> None:
    assert ranks.run(one_rank, bucket_cap_mb, timeout_s=TIMEOUT_S) == [[]] * ranks.num_ranks


@in_ranks(2, 3)
@pytest.mark.parametrize("clears", [True, False])
def test_new_data_of_a_gradient_is_noticed_while_another_is_held(clears: bool) -> None:
    with SideBySide(mlp(), 1.0) as side:
        side.step(squares(5, 6))
        held = side.module[0].weight.grad.detach()
        torn = side.module[2].weight.grad
        torn.data = torn.data * 0.5
        for model in side.both:
            for param in model.parameters():
                param.grad = None if clears else param.grad.zero_()
        side.backward(squares(5, 6, step=1))
        side.compare()
        assert held.shape == (8, 6)


class Float(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@with_both_plans
def test_gradients_may_have_a_dtype_of_their_own(bucket_cap_mb: float | None) -> None:
    """Parameters of half the precision that accumulate in the full one."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        for param in layers[0].bfloat16().parameters():
            param.grad_dtype = torch.float32
        layers.insert(1, Float())
        return layers

    with SideBySide(model(), bucket_cap_mb, bare=model()) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            with side.accumulating():
                side.backward(lambda model, step=step: model(noise(5, 6, step=2 * step).bfloat16()).square().mean())
            side.backward(lambda model, step=step: model(noise(5, 6, step=2 * step + 1).bfloat16()).square().mean())
            side.compare()
            assert {param.grad.dtype for param in side.module.parameters()} == {torch.float32}
