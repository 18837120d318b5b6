"""Optimizers that update parameters which are not the model's any more, or which another optimizer updates."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

from support.alike import of_all_ranks
from support.errors import text_of
from support.ranks import in_ranks
from undertow import ConfigError, DistributedDataParallel, PhaseError, PlanMismatch, ShardedOptimizer, attach

SGD = torch.optim.SGD


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))


def step_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@in_ranks(2)
def test_a_second_sharded_optimizer_is_refused_while_the_first_is_there() -> None:
    model = DistributedDataParallel(net())
    first = ShardedOptimizer(SGD, model, model.module[0].parameters(), lr=0.1)
    first.step = first.step  # a reference of an object to itself, as schedulers make it
    text = text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.AdamW, model, model.module[1].parameters(), lr=0.1))
    assert text == (
        "this model has a ShardedOptimizer already, of SGD: its gradients are cut into shards for one optimizer.\n"
        "  ShardedOptimizer(AdamW, ...)\n"
        "  Give all parameters to one ShardedOptimizer, in several groups. Wrap networks that step in turns each on its own. "
        "To replace the optimizer, `del` the first one before you make another."
    )
    step_of(model, first)  # as if nothing had happened
    model.zero_grad()
    del first
    second = ShardedOptimizer(SGD, model, lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    step_of(model, second)
    model.wait()
    assert not any(map(torch.equal, before, model.parameters()))
    assert text_of(PhaseError, SGD(model.parameters(), lr=0.1).step) == (
        "SGD steps on parameters that a ShardedOptimizer updates.\n"
        f"  rank {dist.get_rank()}: each rank has its shards of the gradients only\n"
        "  Give all parameters to the ShardedOptimizer, and step that one."
    )
    model.close()


@in_ranks(2)
def test_ranks_that_have_not_dropped_the_first_alike_are_told_so() -> None:
    with contextlib.closing(DistributedDataParallel(net())) as model:
        kept = [ShardedOptimizer(SGD, model, lr=0.1)]
        if dist.get_rank() == 1:
            kept.clear()
        text = text_of(PlanMismatch, lambda: ShardedOptimizer(SGD, model, lr=0.1))
    assert of_all_ranks(text) == [text] * 2
    assert "first difference: there is an earlier ShardedOptimizer is True on rank 0 and False on rank 1" in text


# Ways in which a module gets other parameters, behind the back of its optimizer.


def assigned(module: nn.Sequential) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def emptied(module: nn.Sequential) -> None:
    with torch.no_grad():
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            module.to(torch.float64).to(torch.float32)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)


def replaced(module: nn.Sequential) -> None:
    module[1] = nn.Linear(4, 3)


def parametrized(module: nn.Sequential) -> None:
    parametrizations.weight_norm(module[1])


ALL = "SGD updates none of the parameters that this model has now, but some that it had: '0.weight' and 3 more are new."
SOME = "SGD updates parameters that this model had, and nobody updates those that came in their place: "
CHANGES: dict[Callable[[nn.Sequential], None], str] = {
    assigned: ALL,
    emptied: ALL,
    replaced: SOME + "'1.weight' and 1 more.",
    parametrized: SOME + "'1.parametrizations.weight.original0' and 1 more.",
}


def warned(step: Callable[[], object], times: int = 12) -> list[str]:
    """What so many steps warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            step()
    return [str(warning.message).split("\n")[0] for warning in caught]


@in_ranks(1, 2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrap", [DistributedDataParallel, attach])
def test_an_optimizer_that_a_change_of_parameters_has_left_behind_is_told_once(
    wrap: Callable[[nn.Module], DistributedDataParallel], change: Callable[[nn.Sequential], None]
) -> None:
    module = net()
    optimizer = SGD(module.parameters(), lr=0.1)
    with contextlib.closing(wrap(module)) as model:
        called = model if wrap is DistributedDataParallel else module
        assert warned(lambda: step_of(called, optimizer), 1) == []
        change(module)
        assert warned(lambda: step_of(called, optimizer)) == [CHANGES[change]]


# The new parameters have an optimizer, the same or another one, or there is nothing in their place.
@in_ranks(2)
def test_an_optimizer_that_follows_a_change_is_left_in_peace() -> None:
    module = net()
    optimizers = [SGD(module.parameters(), lr=0.1)]
    with contextlib.closing(DistributedDataParallel(module)) as model:
        texts = warned(lambda: step_of(model, *optimizers), 1)
        module[1] = nn.Linear(4, 3)
        optimizers[0].add_param_group({"params": list(module[1].parameters())})
        texts += warned(lambda: step_of(model, *optimizers))
        module[1] = nn.Linear(4, 3)
        optimizers.append(SGD(module[1].parameters(), lr=0.1))
        texts += warned(lambda: step_of(model, *optimizers))
        module[1] = nn.Identity()
        texts += warned(lambda: step_of(model, *optimizers))
        held = {f"module.{name}": nn.Parameter(value.clone()) for name, value in module.named_parameters()}
        torch.func.functional_call(model, held, (torch.ones(2, 4),)).sum().backward()
        texts += warned(optimizers[0].step, 1)
    assert texts == []


@in_ranks(2)
@pytest.mark.parametrize(("change", "name"), [(assigned, "'0.weight' and 3 more"), (replaced, "'1.weight' and 1 more")])
def test_a_sharded_optimizer_that_is_left_behind_raises(change: Callable[[nn.Sequential], None], name: str) -> None:
    with contextlib.closing(DistributedDataParallel(net())) as model:
        optimizer = ShardedOptimizer(SGD, model, lr=0.1)
        step_of(model, optimizer)
        step_of(model, optimizer)
        model.wait()
        change(model.module)
        step_of(model)
        assert text_of(PhaseError, optimizer.step) == (
            "this optimizer updates parameters that the model has no more, and not those that came in their place.\n"
            f"  ShardedOptimizer, parameter {name}\n"
            "  Make the optimizer after the change, or give it the new parameters by add_param_group()."
        )
