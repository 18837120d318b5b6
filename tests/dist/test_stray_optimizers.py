"""Optimizers that update parameters which are not the model's any more, or which another optimizer updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

from support.errors import text_of
from support.ranks import Ranks, in_ranks
from undertow import ConfigError, DistributedDataParallel, PhaseError, PlanMismatch, ShardedOptimizer, attach


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))


def batch() -> torch.Tensor:
    return torch.full((2, 4), 1.0 + dist.get_rank())


@in_ranks(2)
def test_a_second_sharded_optimizer_is_refused_while_the_first_is_there() -> None:
    model = DistributedDataParallel(net())
    first = ShardedOptimizer(torch.optim.SGD, model, model.module[0].parameters(), lr=0.1)
    first.step = first.step  # a reference of an object to itself, as schedulers make it
    text = text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.AdamW, model, model.module[1].parameters(), lr=0.1))
    assert text == (
        "this model has a ShardedOptimizer already, of SGD: its gradients are cut into shards for one optimizer.\n"
        "  ShardedOptimizer(AdamW, ...)\n"
        "  Give all parameters to one ShardedOptimizer, in several groups. Wrap networks that step in turns each on its own. "
        "To replace the optimizer, `del` the first one before you make another."
    )
    model(batch()).sum().backward()
    first.step()  # as if nothing had happened
    model.zero_grad()
    del first
    second = ShardedOptimizer(torch.optim.SGD, model, lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    model(batch()).sum().backward()
    second.step()
    model.wait()
    assert not any(map(torch.equal, before, model.parameters()))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert text_of(PhaseError, plain.step) == (
        "SGD steps on parameters that a ShardedOptimizer updates.\n"
        f"  rank {dist.get_rank()}: each rank has its shards of the gradients only\n"
        "  Give all parameters to the ShardedOptimizer, and step that one."
    )
    model.close()


def keep_the_first_on_one_rank() -> str:
    model = DistributedDataParallel(net())
    kept = [ShardedOptimizer(torch.optim.SGD, model, lr=0.1)]
    if dist.get_rank() == 1:
        kept.clear()
    text = text_of(PlanMismatch, lambda: ShardedOptimizer(torch.optim.SGD, model, lr=0.1))
    model.close()
    return text


def test_ranks_that_have_not_dropped_the_first_alike_are_told_so(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(keep_the_first_on_one_rank)
    assert first == second
    assert "first difference: there is an earlier ShardedOptimizer is True on rank 0 and False on rank 1" in first


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


def warned(step: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(warning.message).split("\n")[0] for warning in caught]


def change_behind_a_plain_optimizer(change: Callable[[nn.Sequential], None], expected: str) -> None:
    for wrap in (DistributedDataParallel, attach):
        module = net()
        model = wrap(module)
        called = model if wrap is DistributedDataParallel else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(called: nn.Module = called, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            called(batch()).sum().backward()
            optimizer.step()

        assert warned(step) == []
        change(module)
        texts = [text for _ in range(12) for text in warned(step)]
        assert texts == [expected]
        model.close()


@pytest.mark.parametrize("change", CHANGES)
def test_an_optimizer_that_a_change_of_parameters_has_left_behind_is_told_once(
    two_ranks: Ranks, change: Callable[[nn.Sequential], None]
) -> None:
    two_ranks.run(change_behind_a_plain_optimizer, change, CHANGES[change])


def test_one_rank_is_told_too() -> None:
    with Ranks(1) as alone:
        alone.run(change_behind_a_plain_optimizer, assigned, ALL)


@in_ranks(2)
def test_an_optimizer_that_follows_a_change_is_left_in_peace() -> None:
    """What is meant to be: the new parameters have an optimizer, the same or another one, or there is nothing in their place."""
    module = net()
    model = DistributedDataParallel(module)
    first = torch.optim.SGD(module.parameters(), lr=0.1)
    others: list[torch.optim.Optimizer] = []

    def step() -> None:
        model(batch()).sum().backward()
        for optimizer in (first, *others):
            optimizer.step()
            optimizer.zero_grad()

    texts = warned(step)
    module[1] = nn.Linear(4, 3)
    first.add_param_group({"params": list(module[1].parameters())})
    texts += [text for _ in range(12) for text in warned(step)]
    module[1] = nn.Linear(4, 3)
    others.append(torch.optim.SGD(module[1].parameters(), lr=0.1))
    texts += [text for _ in range(12) for text in warned(step)]
    module[1] = nn.Identity()
    texts += [text for _ in range(12) for text in warned(step)]
    batches, held = torch.ones(2, 4), {name: nn.Parameter(value.clone()) for name, value in module.named_parameters()}
    torch.func.functional_call(model, {f"module.{name}": value for name, value in held.items()}, (batches,)).sum().backward()
    texts += warned(first.step)
    assert texts == []
    model.close()


@in_ranks(2)
@pytest.mark.parametrize(("change", "name"), [(assigned, "'0.weight' and 3 more"), (replaced, "'1.weight' and 1 more")])
def test_a_sharded_optimizer_that_is_left_behind_raises(change: Callable[[nn.Sequential], None], name: str) -> None:
    model = DistributedDataParallel(net())
    optimizer = ShardedOptimizer(torch.optim.SGD, model, lr=0.1)
    for _ in range(2):
        model(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.wait()
    change(model.module)
    model(batch()).sum().backward()
    assert text_of(PhaseError, optimizer.step) == (
        "this optimizer updates parameters that the model has no more, and not those that came in their place.\n"
        f"  ShardedOptimizer, parameter {name}\n"
        "  Make the optimizer after the change, or give it the new parameters by add_param_group()."
    )
    model.close()
