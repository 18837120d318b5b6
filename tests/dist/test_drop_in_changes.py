"""Parameters that are frozen, unfrozen, added, replaced or cast after the model was wrapped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.drop_in import LEARNING_RATE, TIMEOUT_S, SideBySide, with_both_plans
from support.models import Branches, noise
from support.naive import gradients
from support.ranks import Ranks, in_ranks
from undertow import DistributedDataParallel, attach, clip_grad_norm_

NUM_STEPS_AFTER = 2


class Layers(nn.Module):
    """Three layers, the first of them frozen, and a shift where one is added; every parameter is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.register_parameter("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x if self.shift is None else x + self.shift

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def layer_of_seed(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


class Wide(nn.Linear):
    """A layer with one parameter more."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def unfrozen(module: Layers) -> None:
    module.layers[0].requires_grad_(True)


def frozen(module: Layers) -> None:
    module.layers[1].requires_grad_(False)


def exchanged(module: Layers) -> None:
    """Of the parameters in the first plan none is left."""
    module.requires_grad_(False)
    module.layers[0].requires_grad_(True)


def parameter_added(module: Layers) -> None:
    module.register_parameter("shift", nn.Parameter(torch.full((4,), 0.5)))


def submodule_added(module: Layers) -> None:
    module.layers.append(layer_of_seed(3))


def parameter_replaced(module: Layers) -> None:
    module.layers[1].weight = nn.Parameter(layer_of_seed(4).weight.detach())


def submodule_replaced(module: Layers) -> None:
    module.layers[1] = layer_of_seed(4)


def submodule_replaced_by_a_larger_one(module: Layers) -> None:
    module.layers[1] = Wide()


def submodule_removed(module: Layers) -> None:
    del module.layers[2]


def new_data(module: Layers) -> None:
    for param in module.parameters():
        param.data = param.data * 0.5


def cast_to_double(module: Layers) -> None:
    module.double()


def cast_to_bfloat16(module: Layers) -> None:
    module.bfloat16()


CHANGES = [
    unfrozen,
    frozen,
    exchanged,
    parameter_added,
    submodule_added,
    parameter_replaced,
    submodule_replaced,
    submodule_replaced_by_a_larger_one,
    submodule_removed,
    new_data,
    cast_to_double,
    cast_to_bfloat16,
]
Change = Callable[[Layers], None]
with_every_change = pytest.mark.parametrize("change", CHANGES)


def loss(model: nn.Module, step: int) -> Tensor:
    return model(noise(3, 4, step=step)).square().mean()


def is_followed(change: Change, at_step: int, bucket_cap_mb: float | None, is_attached: bool) -> None:
    with SideBySide(Layers(), bucket_cap_mb, is_attached=is_attached) as side:
        for step in range(at_step + NUM_STEPS_AFTER):
            if step == at_step:
                for module in side.both_modules:
                    change(module)
            side.step(lambda model, step=step: loss(model, step))


# Before which step, the largest bucket in MiB, whether attached. After the first step a plan in the observed order is due.
SITUATIONS = {"before the first step": (0, None, False), "after the first step": (1, 1e-6, False), "later": (3, None, True)}


@pytest.mark.parametrize("situation", SITUATIONS)
@with_every_change
def test_a_change_is_followed_in_the_same_step(ranks: Ranks, change: Change, situation: str) -> None:
    ranks.run(is_followed, change, *SITUATIONS[situation], timeout_s=TIMEOUT_S)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_every_change
def test_a_change_keeps_the_gradients_that_are_there(change: Change) -> None:
    with SideBySide(Layers()) as side:
        for step in range(4):
            if step == 2:
                for module in side.both_modules:
                    change(module)
            side.backward(lambda model, step=step: loss(model, step))
            side.compare()
            side.optimize()


@contextlib.contextmanager
def nothing_frozen(module: nn.Module) -> Iterator[None]:
    """What was accumulated before a parameter was frozen counts, on every rank the same: its mean is due as well."""
    was_frozen = [param for param in module.parameters() if not param.requires_grad]
    for param in was_frozen:
        param.requires_grad_(True)
    yield
    for param in was_frozen:
        param.requires_grad_(False)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_every_change
def test_a_change_while_accumulating_is_followed(change: Change) -> None:
    with SideBySide(Layers(), 1e-6) as side:
        for step in range(3):
            side.zero_grad()
            with side.accumulating():
                side.backward(lambda model, step=step: loss(model, 3 * step))
                if step == 1:
                    for module in side.both_modules:
                        change(module)
                side.backward(lambda model, step=step: loss(model, 3 * step + 1))
            side.backward(lambda model, step=step: loss(model, 3 * step + 2))
            with nothing_frozen(side.bare):
                side.compare()
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_what_was_accumulated_before_a_change_counts(bucket_cap_mb: float | None) -> None:
    """Layer 1 has its gradient from before layer 2 was unfrozen, and none since."""
    model = Branches()
    model.layers[2].requires_grad_(False)
    with SideBySide(model, bucket_cap_mb) as side:
        for step in range(3):
            side.zero_grad()
            with side.accumulating():
                side.backward(lambda model, step=step: model(noise(2, 4, step=2 * step), (0, 1)).square().mean())
            if step == 1:
                for module in side.both_modules:
                    module.layers[2].requires_grad_(True)
            side.backward(lambda model, step=step: model(noise(2, 4, step=2 * step + 1), (2, 0)).square().mean())
            side.compare()
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("change", [unfrozen, frozen, parameter_added, submodule_added])
def test_a_change_between_forward_and_backward_is_followed(change: Change, bucket_cap_mb: float | None) -> None:
    with SideBySide(Layers(), bucket_cap_mb) as side:
        for step in range(4):
            side.zero_grad()
            losses = [loss(model, step) for model in side.both]
            if step == 2:
                for module in side.both_modules:
                    change(module)
            for each in losses:
                each.backward()
            side.compare()
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_parameters_may_take_turns(bucket_cap_mb: float | None) -> None:
    with SideBySide(Layers(), bucket_cap_mb) as side:
        for step in range(6):
            for module in side.both_modules:
                for index, layer in enumerate(module.layers):
                    layer.requires_grad_(index == step % 3)
            side.step(lambda model, step=step: loss(model, step))
            assert [grad is not None for grad in gradients(side.module).values()].count(True) == 2


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_everything_may_be_frozen_for_a_while(bucket_cap_mb: float | None) -> None:
    with SideBySide(Layers(), bucket_cap_mb) as side:
        for step in range(5):
            for module in side.both_modules:
                module.requires_grad_(step not in (1, 2))
            if step in (1, 2):
                assert not any(loss(model, step).requires_grad for model in side.both)
                side.ddp.finish()
                side.optimize()
            else:
                side.step(lambda model, step=step: loss(model, step))


def head_unfrozen(module: Layers) -> None:
    """Whose gradient is the first of a backward: it is there before any that was watched."""
    module.layers[2].requires_grad_(True)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("change", [unfrozen, head_unfrozen, exchanged, parameter_added, submodule_added, parameter_replaced])
def test_a_change_is_followed_where_a_method_of_the_module_is_trained(change: Change, bucket_cap_mb: float | None) -> None:
    """No forward of the wrapper tells of the change: what came before it was seen must count."""
    layers = Layers()
    layers.layers[2].requires_grad_(change is not head_unfrozen)
    with SideBySide(layers, bucket_cap_mb) as side:
        for step in range(5):
            if step == 2:
                for module in side.both_modules:
                    change(module)
            side.zero_grad()
            for module in side.both_modules:
                module.loss(noise(3, 4, step=step)).backward()
            torch.optim.SGD(side.module.parameters(), lr=0.0).step()  # of a change that no gradient has told of, a step does
            side.compare()
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_second_change_that_no_forward_has_told_of_is_followed(bucket_cap_mb: float | None) -> None:
    """The forward tells of one change; of the other, which a method then trains, nothing does."""
    layers = Layers()
    layers.layers[2].requires_grad_(False)
    with SideBySide(layers, bucket_cap_mb) as side:
        for step in range(4):
            side.zero_grad()
            if step == 2:
                for module in side.both_modules:
                    unfrozen(module)
                loss(side.ddp, step)
                for module in side.both_modules:
                    head_unfrozen(module)
            for module in side.both_modules:
                module.loss(noise(3, 4, step=step)).backward()
            side.compare()
            side.optimize()


@in_ranks(2)
def test_one_rank_clips_behind_a_change() -> None:
    """Where no round ends what a change has begun."""
    model = Layers()
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    sync = attach(model, process_group=group)
    for step in range(4):
        if step == 2:
            unfrozen(model)
        model.zero_grad()
        model.forward(noise(3, 4, step=step)).sum().backward()  # past the hooks of forwards
        clip_grad_norm_(sync, 1.0)
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    sync.close()
    dist.destroy_process_group(group)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_parameter_that_is_added_takes_rank_0s_value(bucket_cap_mb: float | None) -> None:
    """The loss is linear in what is added: when its value becomes rank 0's does not change a gradient."""
    with SideBySide(Layers(), bucket_cap_mb) as side:
        for step in range(4):
            if step == 2:
                for module, value in zip(side.both_modules, (1.0 + dist.get_rank(), 1.0), strict=True):
                    module.shift = nn.Parameter(torch.full((4,), value))
            side.step(lambda model, step=step: model(noise(3, 4, step=step)).mean())


def of_as_many_elements() -> tuple[int, ...]:
    layer = nn.Linear(4, 6, bias=False)
    ddp = DistributedDataParallel(layer)
    ddp(torch.ones(1, 4)).sum().backward()
    ddp.zero_grad()
    layer.weight.data = torch.ones(8, 3)
    ddp(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
    ddp.close()
    assert torch.equal(layer.weight.grad, torch.full((8, 3), 3.0))  # two rows of the mean of 1 and 2
    return tuple(layer.weight.grad.shape)


def test_data_of_another_shape_with_as_many_elements_is_followed(two_ranks: Ranks) -> None:
    assert two_ranks.run(of_as_many_elements) == [(8, 3)] * 2
