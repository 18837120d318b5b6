"""Which backward synchronises, and what it makes of `.grad`: in every form that a training step takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.drop_in import TIMEOUT_S, SideBySide, squares, with_both_plans
from support.models import Branches, mlp, noise
from support.naive import gradients, naive_mean, require_same_gradients
from support.ranks import in_ranks

NUM_STEPS = 3
ALL, NONE = (0, 1, 2), ()


def loss(model: nn.Module, step: int) -> Tensor:
    return squares(5, 6, step=step)(model)


def along(order: tuple[int, ...], step: int) -> Callable[[nn.Module], Tensor]:
    """A loss that uses the layers of `Branches` in that order."""
    return lambda model: model(noise(2, 4, step=step), order).square().mean()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_two_forwards_before_two_backwards_are_both_synchronised(bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            losses = {model: [loss(model, 2 * step), loss(model, 2 * step + 1)] for model in side.both}
            for index in range(2):
                for model in side.both:
                    losses[model][index].backward()
                side.compare()
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_graph_that_is_retained_is_synchronised_every_time(bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            losses = {model: loss(model, step) for model in side.both}
            for retain_graph in (True, True, False):
                for model in side.both:
                    losses[model].backward(retain_graph=retain_graph)
                side.compare()
            side.optimize()


def by_the_context(ddp: nn.Module, micro_losses: list[Tensor]) -> None:
    *accumulated, last = micro_losses
    with ddp.no_sync():
        for micro_loss in accumulated:
            micro_loss.backward()
    last.backward()


def by_the_flag(ddp: nn.Module, micro_losses: list[Tensor]) -> None:
    for index, micro_loss in enumerate(micro_losses):
        ddp.require_backward_grad_sync = index == len(micro_losses) - 1
        micro_loss.backward()


def by_the_flag_for_a_moment(ddp: nn.Module, micro_losses: list[Tensor]) -> None:
    *accumulated, last = micro_losses
    for micro_loss in accumulated:
        ddp.require_backward_grad_sync = False
        micro_loss.backward()
        ddp.require_backward_grad_sync = True
    last.backward()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("way", [by_the_context, by_the_flag, by_the_flag_for_a_moment])
def test_the_mode_when_backward_runs_counts(way: Callable[[nn.Module, list[Tensor]], None], bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            micro_losses = []
            for index in range(3):  # the last of them, which is to be synchronised, has its forward in no_sync
                with side.accumulating() if index != 1 else contextlib.nullcontext():
                    micro_losses.append(loss(side.ddp, 3 * step + index))
            way(side.ddp, micro_losses)
            for index in range(3):
                loss(side.bare, 3 * step + index).backward()
            side.compare()
            side.optimize()


@in_ranks(2, 3)
@with_both_plans
def test_a_loss_from_outside_is_not_sent_inside_no_sync(bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        before = loss(side.ddp, 0)
        with side.accumulating():
            before.backward()
        loss(side.bare, 0).backward()
        require_same_gradients(side.ddp, side.bare)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_static_graph_may_begin_with_no_sync(bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb, static_graph=True) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            with side.accumulating():
                side.backward(lambda model, step=step: loss(model, 2 * step))
            side.backward(lambda model, step=step: loss(model, 2 * step + 1))
            side.compare()
            side.optimize()


class WithLoss(nn.Module):
    """A model that is trained through a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def loss(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_loss_from_a_method_of_the_module_is_synchronised(bucket_cap_mb: float | None) -> None:
    with SideBySide(WithLoss(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            for index in range(2):
                with side.accumulating() if index == 0 else contextlib.nullcontext():
                    for module in side.both_modules:
                        module.loss(noise(5, 6, step=2 * step + index)).backward()
            side.compare()
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_backward_adds_to_gradients_that_were_set_by_hand(bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            for model in side.both:
                for index, param in enumerate(model.parameters()):
                    # Every other one only, and another one in each step.
                    param.grad = noise(*param.shape, step=step) if (index + step) % 2 else None
            side.backward(squares(5, 6, step=step))
            side.compare()
            side.optimize()


# By step, what each rank uses; a third rank uses what the first one does.
USES = {
    "unused on all ranks": [((0, 2), (0, 2))] * NUM_STEPS,
    "unused on one rank": [(ALL, (0, 2))] * NUM_STEPS,
    "another one in every step": [((0,), (1, 2)), ((1,), (0,)), (ALL, (2,)), ((2, 0), (1, 0)), (ALL, ALL)],
}


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("name", USES)
def test_unused_parameters_need_no_flag(name: str, bucket_cap_mb: float | None) -> None:
    with SideBySide(Branches(), bucket_cap_mb) as side:
        for step, uses in enumerate(USES[name]):
            side.step(along(uses[dist.get_rank() % 2], step))


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_gradient_that_nobody_adds_to_stays_to_the_bit(bucket_cap_mb: float | None) -> None:
    """Layer 1 has a gradient from the first step, and nobody uses it afterwards."""
    with SideBySide(Branches(), bucket_cap_mb) as side:
        side.step(along(ALL, 0))
        for param in side.module.layers[1].parameters():
            param.grad.mul_(0.7)  # the mean of three that are a mean already would have the same bits
        old = gradients(side.module.layers[1])
        for step in range(1, 1 + NUM_STEPS):
            for module in side.both_modules:
                for index in (0, 2):
                    module.layers[index].zero_grad()
            side.backward(along((0, 2), step))
            assert all(torch.equal(grad, old[name]) for name, grad in gradients(side.module.layers[1]).items())
            for index in (0, 2):
                naive_mean(side.bare.layers[index])
                require_same_gradients(side.module.layers[index], side.bare.layers[index])


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("end", ["finish", "optimizer"])
def test_a_rank_that_uses_nothing_joins_in(end: str, bucket_cap_mb: float | None) -> None:
    """Rank 1's loss reaches no parameter in any step but the last."""
    with SideBySide(Branches(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            for model in side.both:
                result = along(NONE if dist.get_rank() == 1 and step < NUM_STEPS - 1 else ALL, step)(model)
                if result.requires_grad:
                    result.backward()
            # Before rank 1 has joined in, the others wait in backward: nothing else may be sent until then.
            if end == "finish":
                side.ddp.finish()
            else:
                torch.optim.SGD(side.ddp.parameters(), lr=0.0).step()
            side.compare()
            side.optimize()


class TwoHeads(nn.Module):
    """Two outputs with parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.left(hidden), self.right(hidden)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("side_of_rank", [(0, 0, 0), (0, 1, 0)], ids=["on all ranks", "another one on rank 1"])
def test_the_loss_need_not_use_every_output(side_of_rank: tuple[int, int, int], bucket_cap_mb: float | None) -> None:
    with SideBySide(TwoHeads(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            index = side_of_rank[dist.get_rank()]
            side.step(lambda model, step=step, index=index: model(noise(5, 6, step=step))[index].square().mean())


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_an_empty_batch_on_one_rank_adds_zeros(bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            num_samples = 0 if dist.get_rank() == step % 2 else 5
            side.step(lambda model, step=step, num=num_samples: model(noise(num, 6, step=step)).square().sum() / 20)
