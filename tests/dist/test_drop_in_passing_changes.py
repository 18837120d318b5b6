"""Parameters that are in the module, or frozen, for one forward only: not a change of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from support.drop_in import TIMEOUT_S, SideBySide, with_both_plans
from support.errors import text_of
from support.models import noise
from support.ranks import Ranks, in_ranks
from undertow import DistributedDataParallel, PhaseError


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def frozen_teacher(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(param.detach() * 0.5, requires_grad=False) for name, param in model.named_parameters()}


def trained_teacher(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(param.detach() * 0.5) for name, param in model.named_parameters()}


def half_of_a_teacher(model: nn.Module) -> dict[str, nn.Parameter]:
    """The others stay those of the module."""
    return dict(list(trained_teacher(model).items())[::2])


Teacher = Callable[[nn.Module], dict[str, nn.Parameter]]
with_every_teacher = pytest.mark.parametrize("teacher", [frozen_teacher, trained_teacher, half_of_a_teacher])


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("is_first", [True, False], ids=["teacher first", "teacher last"])
@with_every_teacher
def test_a_functional_call_with_other_parameters_changes_nothing(
    teacher: Teacher, is_first: bool, bucket_cap_mb: float | None
) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        x = noise(5, 6, step=step)
        calls = [lambda: functional_call(model, teacher(model), (x,)), lambda: model(x)]
        wanted, got = [call() for call in calls] if is_first else [call() for call in calls[::-1]][::-1]
        return (got - wanted).square().mean()

    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(4):
            side.step(lambda model, step=step: loss(model, step))
        assert side.sync.plan.num_ranks == dist.get_world_size()
        assert [spec.name for spec in side.sync.plan.params] == [name for name, _ in side.module.named_parameters()]


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_a_rank_may_ask_a_teacher_alone() -> None:
    with SideBySide(mlp(), 1e-6) as side:
        for step in range(4):
            if dist.get_rank() == step % 2:
                x = noise(2, 6, step=step)
                # Not in training mode, in which the other ranks would wait for a synchronisation of buffers and gradients.
                functional_call(side.ddp.eval(), trained_teacher(side.ddp), (x,)).sum().backward()
                side.ddp.train()
            side.step(lambda model, step=step: model(noise(5, 6, step=step)).square().mean())


class Pair(nn.Module):
    """A generator and a discriminator, each wrapped by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)


def adversarial() -> list[int]:
    """The discriminator is frozen while the generator learns; returns how many plans each of them has had."""
    bare, wrapped = Pair(), Pair()
    nets = {name: DistributedDataParallel(net) for name, net in wrapped.named_children()}
    pairs = [(nets["generator"], nets["discriminator"]), (bare.generator, bare.discriminator)]
    for step in range(5):
        x, real = noise(3, 4, step=2 * step), noise(3, 4, step=2 * step + 1)
        for generator, discriminator in pairs:
            for turn in (discriminator, generator):
                generator.zero_grad()
                discriminator.zero_grad()
                discriminator.requires_grad_(turn is discriminator)
                fake = generator(x)
                if turn is discriminator:
                    loss = discriminator(fake.detach()).mean() - discriminator(real).mean()
                else:
                    loss = -discriminator(fake).square().mean()
                loss.backward()
                if not isinstance(turn, DistributedDataParallel):
                    for param in turn.parameters():
                        dist.all_reduce(param.grad)
                        param.grad /= dist.get_world_size()
                torch.optim.SGD(turn.parameters(), lr=0.25).step()
        for ours, theirs in zip(wrapped.parameters(), bare.parameters(), strict=True):
            # Three summands in another order: 4 ulps, 5e-7, of gradients below 1, times 0.25, in each of 5 steps.
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if dist.get_world_size() == 2 else 6e-7)
    generations = [net.sync._engine.generation for net in nets.values()]
    for net in nets.values():
        net.close()
    return generations


def test_a_discriminator_that_is_frozen_in_turns_is_not_planned_anew(ranks: Ranks) -> None:
    # One new plan each at most: after the first step, in the order observed.
    assert all(max(generations) <= 1 for generations in ranks.run(adversarial, timeout_s=TIMEOUT_S))


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("in_backward", [False, True], ids=["parameters", "tensors too"])
def test_a_wrapper_may_be_called_with_the_parameters_of_another_one(in_backward: bool) -> None:
    """A is called with B's parameters for a moment; B goes on as if nothing had been."""
    other = DistributedDataParallel(mlp(), bucket_cap_mb=1e-6)
    with SideBySide(mlp(), 1e-6) as side:
        for step in range(3):
            side.zero_grad()
            x = noise(5, 6, step=step)
            losses = [model(x).square().mean() for model in side.both]
            functional_call(other, {f"module.{name}": param for name, param in side.module.named_parameters()}, (x,))
            if in_backward:
                functional_call(other, {f"module.{name}": 2 * it for name, it in side.module.named_parameters()}, (x,))
            for loss in losses:
                loss.backward()
            side.compare()
            side.optimize()
    other.close()


def added_and_frozen_while_accumulating() -> str:
    model = mlp()
    ddp = DistributedDataParallel(model)
    ddp(noise(5, 6)).sum().backward()
    ddp.zero_grad()
    model[0].weight = nn.Parameter(torch.ones(5, 6))
    with ddp.no_sync():
        ddp(noise(5, 6)).sum().backward()
    model[0].weight.requires_grad_(False)
    text = text_of(PhaseError, lambda: ddp(noise(5, 6)).sum().backward())
    model.zero_grad()
    ddp(noise(5, 6)).sum().backward()
    ddp.close()
    return text


def test_a_parameter_that_was_added_and_frozen_between_rounds_is_told(two_ranks: Ranks) -> None:
    for rank, text in enumerate(two_ranks.run(added_and_frozen_while_accumulating, timeout_s=TIMEOUT_S)):
        assert text == (
            "a parameter was added and frozen again between two synchronisations: its gradient is not averaged.\n"
            f"  parameter '0.weight', synchronisation 1, rank {rank}\n"
            "  Synchronise once before it is frozen, and drop its gradient now."
        )
