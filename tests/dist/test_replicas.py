"""Parameters that are no longer the same on all ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.errors import text_of
from support.inside import late_ops
from support.mixture import MATCH, experts_group, mixture
from support.mixture import loss as mixture_loss
from support.models import mlp, noise
from support.ranks import Ranks, RanksFailed, in_ranks
from support.sharded import hybrid, training
from undertow import DistributedDataParallel, ExpertGroup, ReplicaMismatch, SyncConfig
from undertow.schedule import OpKind

REMEDY = "  Look for what writes to parameters, or steps, on some ranks only; broadcast_parameters() makes them equal again."
OTHER_STEP = 3


def same_mlp() -> nn.Module:
    torch.manual_seed(3)
    return mlp()


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, other: int | None, *, num_steps: int = 9) -> None:
    """In the forward of one step the rank `other` writes to two parameters, to one of them the last bit of an element."""
    for step in range(num_steps):
        ddp.steps_begun = step
        optimizer.zero_grad()
        if step == OTHER_STEP and dist.get_rank() == other:
            ddp.wait()
            with torch.no_grad():
                ddp.module[2].weight.view(torch.int32).view(-1)[5].add_(1)
                ddp.module[2].bias.add_(1.0)
        ddp(noise(4, 6, step=step)).square().mean().backward()
        optimizer.step()


def found(strategy: str, every: int, other: int, eager: bool) -> tuple[str, int]:
    with training(same_mlp(), strategy, "SGD", eager=eager, check_replicas_every=every) as (ddp, optimizer):
        return text_of(ReplicaMismatch, lambda: train(ddp, optimizer, other)), ddp.steps_begun


def told(name: str, ranks: str, step: int, how_many: str) -> str:
    return f"parameter {name!r} has other values on {ranks}.\n  synchronisation {step}; {how_many} parameters differ\n{REMEDY}"


@pytest.mark.parametrize(("every", "step"), [(1, 3), (4, 3), (3, 5), (7, 6)])
def test_the_first_parameter_the_ranks_and_the_step_are_named(three_ranks: Ranks, every: int, step: int) -> None:
    text = told("2.weight", "rank 1 than on rank 0, 2", step, "2 of 4")
    assert three_ranks.run(found, "ddp", every, 1, False) == [(text, step)] * 3


def test_of_two_ranks_the_first_one_is_taken_for_right(two_ranks: Ranks) -> None:
    text = told("2.weight", "rank 1 than on rank 0", 3, "2 of 4")
    assert [two_ranks.run(found, "ddp", 1, other, False) for other in (0, 1)] == [[(text, 3)] * 2] * 2


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_sharded_parameters_are_compared_when_they_have_come(three_ranks: Ranks, strategy: str) -> None:
    text = told("2.weight", "rank 1 than on rank 0, 2", 3, "2 of 4")
    assert three_ranks.run(found, strategy, 1, 1, False) == [(text, 3)] * 3


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
            ddp.wait()
            assert (strategy != "ddp" and dist.get_rank() == 1) == (late != [])
            results.append([param.detach().clone() for param in ddp.parameters()])
    assert all(map(torch.equal, *results))


def rows_apart() -> tuple[str, int]:
    """A rank writes to what its row then gathers from it: the other row has other values."""
    with hybrid(same_mlp(), "SGD", check_replicas_every=1) as (ddp, optimizer):
        return text_of(ReplicaMismatch, lambda: train(ddp, optimizer, 3)), ddp.steps_begun


def test_rows_of_a_mesh_are_compared_too(four_ranks: Ranks) -> None:
    text = told("2.weight", "rank 3 than on rank 0, 1, 2", 3, "2 of 4")
    assert four_ranks.run(rows_apart) == [(text, 3)] * 4


def experts_apart() -> str:
    with experts_group() as group:
        config = SyncConfig(experts=(ExpertGroup(match=MATCH, process_group=group, divisor=4),), check_replicas_every=2)
        with contextlib.closing(DistributedDataParallel(mixture(), config=config)) as ddp:
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            try:
                for step in range(4):
                    optimizer.zero_grad()
                    if (dist.get_rank(), step) == (3, 3):
                        with torch.no_grad():
                            ddp.module.experts["0"].bias.add_(1.0)
                    mixture_loss(ddp, step).backward()
                    optimizer.step()
            except ReplicaMismatch as error:
                return str(error).split("\n")[0]
            return ""


def test_experts_are_compared_among_ranks_that_have_the_same(four_ranks: Ranks) -> None:
    text = "parameter 'experts.0.bias' has other values on rank 3 than on rank 1."
    assert four_ranks.run(experts_apart) == ["", text, "", text]


def uneven(num_batches: int) -> bool:
    """A rank that has run out of data keeps its parameters until the others are through."""
    config = SyncConfig(check_replicas_every=1)
    with contextlib.closing(DistributedDataParallel(same_mlp(), config=config)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(num_batches if dist.get_rank() == 0 else 6):
                optimizer.zero_grad()
                if (dist.get_rank(), step) == (1, 4) and num_batches > 4:
                    with torch.no_grad():
                        ddp.module[0].bias.add_(1.0)
                ddp(noise(4, 6, step=step)).square().mean().backward()
                optimizer.step()
        optimizer.zero_grad()
        ddp(noise(4, 6)).square().mean().backward()
        optimizer.step()
    return True


def test_ranks_without_data_are_left_out(ranks: Ranks) -> None:
    assert all(ranks.run(uneven, 3))


def test_two_ranks_with_data_are_compared_in_a_join(two_ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"ReplicaMismatch: parameter '0\.bias' has other values on rank 1 than on rank 0\."):
        two_ranks.run(uneven, 5)


def apart_in_join() -> str:
    """Rank 0 has run out of data; the others come apart, and go on living when they have closed their model."""
    try:
        uneven_among_others()
    except ReplicaMismatch as error:
        return str(error).split("\n")[0]
    return ""


def uneven_among_others() -> None:
    with contextlib.closing(DistributedDataParallel(same_mlp(), config=SyncConfig(check_replicas_every=1))) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(2 if dist.get_rank() == 0 else 6):
                optimizer.zero_grad()
                if (dist.get_rank(), step) == (2, 4):
                    with torch.no_grad():
                        ddp.module[0].bias.add_(1.0)
                ddp(noise(4, 6, step=step)).square().mean().backward()
                optimizer.step()


def test_a_rank_without_data_learns_that_others_have_come_apart(fresh_ranks: Ranks) -> None:
    text = "parameter '0.bias' has other values on rank 2 than on rank 1."
    assert fresh_ranks.run(apart_in_join, timeout_s=20.0) == [text] * 3


def two_models() -> list[str]:
    """Of two models in one backward both are compared; the one that differs says so."""
    config = SyncConfig(check_replicas_every=1)
    models = [DistributedDataParallel(same_mlp(), config=config) for _ in range(2)]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)
    texts = []
    try:
        for step in range(3):
            optimizer.zero_grad()
            if (dist.get_rank(), step) == (1, 2):
                with torch.no_grad():
                    models[1].module[0].bias.add_(1.0)
            order = models if dist.get_rank() == 0 else models[::-1]
            sum(model(noise(4, 6, step=step)).square().mean() for model in order).backward()
            if step == 2:
                texts.append(text_of(ReplicaMismatch, optimizer.step))
            else:
                optimizer.step()
    finally:
        for model in models:
            model.close()
    return texts


def test_two_models_in_one_backward_are_both_compared(two_ranks: Ranks) -> None:
    assert two_ranks.run(two_models) == [[told("0.bias", "rank 1 than on rank 0", 2, "1 of 4")]] * 2


def frozen_apart() -> str:
    """A frozen parameter that rank 1 has written to; another one is unfrozen on all ranks, which is no difference."""
    model = same_mlp()
    model[0].requires_grad_(False)
    with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(check_replicas_every=1))) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def steps() -> None:
            for step in range(4):
                ddp.steps_begun = step
                model[0].bias.requires_grad_(step > 0)
                if step == 2 and dist.get_rank() == 1:
                    with torch.no_grad():
                        model[0].weight[0, 0].add_(1.0)
                ddp(noise(4, 6, step=step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        return text_of(ReplicaMismatch, steps)


def test_a_frozen_parameter_is_compared_too(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(frozen_apart)
    assert first == second
    assert first.startswith("parameter '0.weight' has other values on rank 1 than on rank 0.\n")
    assert "1 of 4 parameters differ" in first
