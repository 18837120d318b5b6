"""Parameters that are no longer the same on all ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.errors import text_of
from support.inside import late_ops
from support.mixture import MATCH, experts_group, mixture
from support.mixture import loss as mixture_loss
from support.models import CASES, noise
from support.naive import wrapped
from support.ranks import in_ranks
from support.sharded import parameters, require_equal, training
from undertow import ExpertGroup, ReplicaMismatch
from undertow.schedule import OpKind

EVERY: dict[str, Any] = {"check_replicas_every": 1}
REMEDY = "  Look for what writes to parameters, or steps, on some ranks only; broadcast_parameters() makes them equal again."


def same_mlp() -> nn.Module:
    return CASES["mlp"].model()


def spoil(param: Tensor) -> None:
    param.detach().add_(1.0)


def step_of(ddp: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    ddp(noise(4, 6, step=step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, other: int | None, *, num_steps: int = 9) -> None:
    """In the forward of step 3 the rank `other` writes to two parameters, to one of them the last bit of an element."""
    for step in range(num_steps):
        ddp.steps_begun = step
        if step == 3 and dist.get_rank() == other:
            ddp.wait()
            ddp.module[2].weight.detach().view(torch.int32).view(-1)[5].add_(1)
            spoil(ddp.module[2].bias)
        step_of(ddp, optimizer, step)


def require_found(ddp: nn.Module, optimizer: Any, other: int, *, ranks: str, step: int) -> None:
    assert text_of(ReplicaMismatch, lambda: train(ddp, optimizer, other)) == (
        f"parameter '2.weight' has other values on {ranks}.\n  synchronization {step}; 2 of 4 parameters differ\n{REMEDY}"
    )
    assert ddp.steps_begun == step


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("strategy", "every", "step"), [("ddp", 1, 3), ("ddp", 4, 3), ("ddp", 3, 5), ("ddp", 7, 6), ("zero1", 1, 3), ("zero2", 1, 3)]
)
def test_the_first_parameter_the_ranks_and_the_step_are_named(strategy: str, every: int, step: int) -> None:
    others = ", 2" if dist.get_world_size() == 3 else ""
    with training(same_mlp(), strategy, "SGD", check_replicas_every=every) as (ddp, optimizer):
        require_found(ddp, optimizer, 1, ranks=f"rank 1 than on rank 0{others}", step=step)


@in_ranks(2)
def test_of_two_ranks_the_first_one_is_taken_for_right() -> None:
    with training(same_mlp(), "ddp", "SGD", **EVERY) as (ddp, optimizer):
        require_found(ddp, optimizer, 0, ranks="rank 1 than on rank 0", step=3)


@in_ranks(4)
def test_rows_of_a_mesh_are_compared_too() -> None:
    """A rank writes to what its row then gathers from it: the other row has other values."""
    with training(same_mlp(), "hybrid", "SGD", **EVERY) as (ddp, optimizer):
        require_found(ddp, optimizer, 3, ranks="rank 3 than on rank 0, 1, 2", step=3)


@in_ranks(2, 3)
@pytest.mark.parametrize(("strategy", "eager"), [("ddp", False), ("zero1", False), ("zero1", True), ("zero2", False)])
def test_equal_replicas_train_as_without_a_comparison(strategy: str, eager: bool) -> None:
    """Training goes on as without the comparison, where one rank is late with its gathers."""
    results = []
    for every in (1, None):
        with training(same_mlp(), strategy, eager=eager, check_replicas_every=every, auto_tune=False) as (ddp, optimizer):
            train(ddp, optimizer, None, num_steps=3)
            late = [] if strategy == "ddp" else late_ops(ddp, OpKind.ALL_GATHER, 1, seconds=0.05)
            train(ddp, optimizer, None, num_steps=6)
            results.append(parameters(ddp))
            assert (strategy != "ddp" and dist.get_rank() == 1) == (late != [])
    require_equal(*results)


@in_ranks(4)
def test_experts_are_compared_among_ranks_that_have_the_same() -> None:
    is_wrong = pytest.raises(
        ReplicaMismatch, match=r"^parameter 'experts\.0\.bias' has other values on rank 3 than on rank 1\.\n"
    )
    with experts_group() as group:
        experts = (ExpertGroup(match=MATCH, process_group=group, divisor=4),)
        with wrapped(mixture(), experts=experts, check_replicas_every=2) as ddp:
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            with is_wrong if dist.get_rank() % 2 else contextlib.nullcontext():
                for step in range(4):
                    optimizer.zero_grad()
                    if (dist.get_rank(), step) == (3, 3):
                        spoil(ddp.module.experts["0"].bias)
                    mixture_loss(ddp, step).backward()
                    optimizer.step()


@in_ranks(2, 3, is_fresh=True, timeout_s=20.0)
@pytest.mark.parametrize(("num_batches", "spoils"), [(3, False), (2, True), (5, True)])
def test_in_a_join_ranks_with_data_are_compared_and_the_others_are_told(num_batches: int, spoils: bool) -> None:
    """Rank 0 has so many batches, and keeps its parameters until the others are through; in step 4 the last rank writes."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    peers = [str(it) for it in range(last) if it > 0 or num_batches > 4]
    is_found = spoils and peers != []
    with wrapped(same_mlp(), **EVERY) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def train_jointly() -> None:
            with ddp.join():
                for step in range(num_batches if rank == 0 else 6):
                    if is_found and (rank, step) == (last, 4):
                        spoil(ddp.module[0].bias)
                    step_of(ddp, optimizer, step)

        if is_found:
            text = text_of(ReplicaMismatch, train_jointly)
            assert text.startswith(f"parameter '0.bias' has other values on rank {last} than on rank {', '.join(peers)}.\n")
        else:
            train_jointly()
            step_of(ddp, optimizer)


@in_ranks(2)
def test_two_models_in_one_backward_are_both_compared() -> None:
    """The one that differs says so."""
    with wrapped(same_mlp(), **EVERY) as first, wrapped(same_mlp(), **EVERY) as second:
        models = (first, second) if dist.get_rank() == 0 else (second, first)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            if (dist.get_rank(), step) == (1, 2):
                spoil(second.module[0].bias)
            sum(model(noise(4, 6, step=step)).square().mean() for model in models).backward()
            if step < 2:
                optimizer.step()
        with pytest.raises(
            ReplicaMismatch, match=r"'0\.bias' .* rank 1 than on rank 0\.\n  synchronization 2; 1 of 4 parameters"
        ):
            optimizer.step()


@in_ranks(2)
def test_a_frozen_parameter_is_compared_too() -> None:
    """Rank 1 has written to it; another one is unfrozen on all ranks, which is no difference."""
    model = same_mlp()
    model[0].requires_grad_(False)
    with wrapped(model, **EVERY) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def train() -> None:
            for step in range(4):
                model[0].bias.requires_grad_(step > 0)
                if step == 2 and dist.get_rank() == 1:
                    spoil(model[0].weight)
                step_of(ddp, optimizer, step)

        with pytest.raises(ReplicaMismatch, match=r"'0\.weight' .* rank 1 than on rank 0\.\n.*; 1 of 4 parameters differ"):
            train()
