"""What would make replicas differ from the next step on: values that some ranks load, settings that some ranks step with."""

import contextlib
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.alike import of_all_ranks
from support.errors import text_of
from support.levels import some
from support.models import noise
from support.naive import collectives, wrapped
from support.ranks import in_ranks
from undertow import DistributedDataParallel, PlanMismatch, ReplicaMismatch, ShardedOptimizer, save_checkpoint

STRATEGIES = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
LOAD = "  Load the same values on every rank, or call broadcast_parameters() on every rank after a load on rank 0."
SET = (
    "ranks step with different settings of an optimizer.\n"
    "  {place}\n"
    "  first difference: {difference}\n"
    "  Give every rank the same settings. A scheduler must follow a number that all ranks have, such as the mean of their losses."
)
SMALL = {"bucket_cap_mb": 1e-4}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    optimizer.zero_grad()
    model(noise(5, 6, step=step)).square().mean().backward()
    optimizer.step()


@contextlib.contextmanager
def in_training(
    strategy: str = "ddp", *, steps: int = 2, module: nn.Module | None = None, **settings: Any
) -> Iterator[tuple[DistributedDataParallel, Any]]:
    with wrapped(Net() if module is None else module, strategy=strategy, **SMALL, **settings) as ddp:
        if strategy == "ddp":
            optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1, momentum=0.9)
        for step in range(steps):
            one_step(ddp, optimizer, step)
        yield ddp, optimizer


def other_values(module: nn.Module, value: float = 0.25) -> dict[str, Tensor]:
    return {name: torch.full_like(it, value) for name, it in module.state_dict().items()}


def load_on(ranks: Any, module: nn.Module, value: float = 0.25) -> None:
    """Only reading the values is collective, under some strategies."""
    state = other_values(module, value)
    if dist.get_rank() in ranks:
        module.load_state_dict(state)


def require_equal_on_all(ddp: nn.Module) -> None:
    mine = [param.detach().clone() for param in ddp.parameters()]
    for theirs in of_all_ranks(mine):
        assert all(map(torch.equal, mine, theirs))


@in_ranks(2, 3)
@STRATEGIES
@pytest.mark.parametrize("steps", [0, 2])
def test_a_load_on_one_rank_is_an_error_before_the_next_step_on_all(strategy: str, steps: int) -> None:
    others = ", ".join(str(rank) for rank in range(1, dist.get_world_size()))
    here, there = (others, "0") if dist.get_world_size() == 2 else ("0", others)
    with in_training(strategy, steps=steps) as (ddp, optimizer):
        load_on([0], ddp.module)
        ddp(noise(5, 6)).square().mean().backward()
        before = [param.detach().clone() for param in ddp.parameters()]
        assert text_of(ReplicaMismatch, optimizer.step) == (
            f"parameter '0.weight' has other values on rank {here} than on rank {there}.\n"
            f"  synchronization {steps}, load_state_dict on rank 0; 6 of 6 parameters differ\n{LOAD}"
        )
        assert all(map(torch.equal, before, ddp.parameters()))


@in_ranks(2)
@pytest.mark.parametrize("strategy", some(["ddp", "zero1", "zero2"], most=2))
def test_the_same_values_on_all_ranks_are_compared_once(strategy: str) -> None:
    with in_training(strategy) as (ddp, optimizer):
        load_on([0, 1], ddp.module)
        with collectives() as called:
            one_step(ddp, optimizer)
            one_step(ddp, optimizer)
        with collectives() as usual:
            one_step(ddp, optimizer)
            one_step(ddp, optimizer)
        assert called.count("all_reduce") == usual.count("all_reduce") + 1
        assert called.count("all_gather") == 0
        require_equal_on_all(ddp)


@in_ranks(2)
@STRATEGIES
def test_broadcast_parameters_is_the_way_out(strategy: str) -> None:
    with in_training(strategy) as (ddp, optimizer):
        load_on([0], ddp.module)
        for is_broken in (True, True, False):
            if is_broken:  # also after the error, as long as they differ
                with pytest.raises(ReplicaMismatch):
                    one_step(ddp, optimizer)
            else:
                ddp.broadcast_parameters()
                one_step(ddp, optimizer)
        require_equal_on_all(ddp)


@in_ranks(2)
@pytest.mark.parametrize("part", ["", "module.2"])
def test_a_load_into_the_wrapper_or_a_part_counts(part: str) -> None:
    with in_training() as (ddp, optimizer):
        load_on([1], ddp.get_submodule(part))
        with pytest.raises(ReplicaMismatch, match=r"load_state_dict on rank 1; [26] of 6"):
            one_step(ddp, optimizer)


@in_ranks(2)
def test_frozen_parameters_count() -> None:
    module = Net()
    module[0].requires_grad_(False)
    with in_training(module=module) as (ddp, optimizer):
        load_on([0], ddp.module[0])
        with pytest.raises(ReplicaMismatch, match=r"^parameter '0\.weight' .*\n.*; 2 of 6 parameters differ"):
            one_step(ddp, optimizer)


@in_ranks(2)
def test_ignored_parameters_buffers_and_loads_of_nothing_do_not_count() -> None:
    module = Net()
    with wrapped(module, ignore=("0.weight", "0.bias")) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        one_step(ddp, optimizer)
        if dist.get_rank() == 0:
            module[0].load_state_dict(other_values(module[0]))
            module.load_state_dict({"1.running_mean": torch.ones(8)}, strict=False)
            module.load_state_dict({"other": torch.ones(8)}, strict=False)
        one_step(ddp, optimizer)


@in_ranks(2)
def test_a_pickle_of_the_module_and_a_copy_know_nothing_of_undertow() -> None:
    with in_training(module=nn.Sequential(nn.Linear(6, 3))) as (ddp, optimizer):
        assert b"undertow" not in pickle.dumps(ddp.module)
        for other in (pickle.loads(pickle.dumps(ddp.module)), copy.deepcopy(ddp.module)):
            load_on([0], other)
        one_step(ddp, optimizer)
    assert not any(part._load_state_dict_pre_hooks for part in ddp.module.modules())


@in_ranks(2, 3)
@STRATEGIES
def test_a_rate_that_differs_is_an_error_in_the_step_after_it_was_used(strategy: str) -> None:
    last = dist.get_world_size() - 1
    with in_training(strategy) as (ddp, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 if dist.get_rank() < last else 0.05
        one_step(ddp, optimizer)
        others = "rank 0" if last == 1 else "ranks 0, 1"
        rates = f"0.1 on {others}, but 0.05 on rank {last}"
        assert text_of(PlanMismatch, lambda: one_step(ddp, optimizer)) == SET.format(
            place=f"synchronization 3, rank {dist.get_rank()}", difference=f"lr of group 0 of SGD with '0.bias' is {rates}"
        )


def of_each_layer(ddp: nn.Module, *rates: float) -> list[torch.optim.Optimizer]:
    layers = [module for module in ddp.modules() if isinstance(module, nn.Linear)]
    return [torch.optim.SGD(layer.parameters(), lr=rate) for layer, rate in zip(layers, rates, strict=True)]


@in_ranks(2)
def test_ranks_may_step_two_optimizers_in_another_order() -> None:
    with wrapped(Net()) as ddp:
        optimizers = of_each_layer(ddp, 0.1, 0.2)
        for step in range(3):
            ddp.zero_grad()
            ddp(noise(5, 6, step=step)).square().mean().backward()
            for optimizer in optimizers[:: -1 if dist.get_rank() else 1]:
                optimizer.step()
        require_equal_on_all(ddp)


@in_ranks(2)
def test_a_group_of_parameters_that_are_not_synchronized_may_differ() -> None:
    local = nn.Linear(3, 2)
    with wrapped(nn.Sequential(Net(), local), ignore=("1.weight",)) as ddp:
        optimizer = torch.optim.SGD(
            [{"params": [local.weight], "lr": 0.1 * dist.get_rank()}, {"params": ddp.module[0].parameters()}], lr=0.1
        )
        for step in range(3):
            optimizer.zero_grad()
            ddp(noise(5, 6, step=step)).square().mean().backward()
            optimizer.step()


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_difference_in_the_last_step_of_a_run_is_found_when_it_is_saved(strategy: str, tmp_path: Path) -> None:
    rank = dist.get_rank()
    folder = of_all_ranks(tmp_path)[0] / "run"
    with in_training(strategy) as (ddp, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        difference = "lr of group 0 of SGD with '0.bias' is 0.1 on rank 0, but 0.2 on rank 1"
        assert text_of(PlanMismatch, lambda: save_checkpoint(folder, ddp, optimizer)) == SET.format(
            place="save_checkpoint", difference=difference
        )
        assert not folder.exists()
