"""Optimizer steps that are left out: by a gradient scaler, by an exception, by the user."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.drop_in import TIMEOUT_S, SideBySide
from support.errors import text_of
from support.models import Branches, noise
from support.ranks import Ranks, in_ranks
from undertow import Desync, DistributedDataParallel


def branches_loss(model: nn.Module, step: int) -> Tensor:
    return model(noise(2, 4, step=step), (0, 1, 2)).square().mean()


def after_a_skipped_step(set_to_none: bool, by_hand: bool) -> list[str]:
    """Rank 1's backward reaches no parameter in step 2, behind a step that was left out on every rank."""
    idle = []
    with SideBySide(Branches(), 1e-6) as side:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.125) for model in side.both]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
            if step == 2 and dist.get_rank() == 1:
                if by_hand:
                    side.ddp.finish()  # no data, and no forward
                else:
                    branches_loss(side.ddp, step).detach().requires_grad_().backward()
            else:
                side.ddp.zero_grad(set_to_none=set_to_none)
                branches_loss(side.ddp, step).backward()
                branches_loss(side.bare, step).backward()
            if step == 1:
                continue
            optimizers[0].step()
            side.compare()
            optimizers[1].step()
            idle.append(sorted(side.ddp.unused_parameters))
    return idle[1]


@pytest.mark.parametrize("by_hand", [True, False], ids=["without data", "nothing reached"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_without_gradients_joins_after_a_skipped_step(ranks: Ranks, set_to_none: bool, by_hand: bool) -> None:
    unused = ranks.run(after_a_skipped_step, set_to_none, by_hand, timeout_s=TIMEOUT_S)
    assert [len(names) for names in unused] == [0, 6, 0][: ranks.num_ranks]


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_finish_may_be_called_again() -> None:
    """A second finish(), and one after a backward, do nothing."""
    with SideBySide(Branches(), 1e-6) as side:
        for step in range(3):
            side.zero_grad()
            if dist.get_rank() == 1:
                side.ddp.finish()
            else:
                side.backward(lambda model, step=step: branches_loss(model, step))
            side.ddp.finish()
            side.ddp.finish()
            side.compare()
            side.optimize()


def second_round_on_one_rank_only() -> str:
    """Rank 0 synchronises twice in a step, rank 1's second backward reaches nothing, and it cannot know of the round.

    Before an optimizer has stepped for the first time nobody can: a rank may leave that to others.
    """
    ddp = DistributedDataParallel(Branches())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)

    def train() -> None:
        for step in range(4):
            optimizer.zero_grad()
            branches_loss(ddp, step).backward()
            second = branches_loss(ddp, step + 10)
            if dist.get_rank() == 0:
                second.backward()
            optimizer.step()

    text = text_of(Desync, train)
    ddp.close()
    return text


def test_rounds_of_different_steps_do_not_pair_off(fresh_pair: Ranks) -> None:
    texts = fresh_pair.run(second_round_on_one_rank_only, timeout_s=TIMEOUT_S)
    for rank, text in enumerate(texts):
        assert text == (
            "ranks are not in the same step.\n"
            f"  synchronisation 3, rank {rank}\n"
            "  rank 0: synchronisation 3, without an optimizer step since the one before\n"
            "  rank 1: synchronisation 3, after an optimizer step\n"
            "  Run as many synchronised backwards and optimizer steps on every rank; one without a backward calls finish()."
        )


def all_params(model: nn.Module) -> list[list[nn.Parameter]]:
    return [[*layer.parameters()] for layer in model.layers]


def body_then_head(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = all_params(model)
    return [torch.optim.SGD(first, lr=0.125), torch.optim.SGD([param for layer in others for param in layer], lr=0.125)]


def rank_0_looks(ddp: DistributedDataParallel, step: int) -> None:
    if dist.get_rank() == 0:
        branches_loss(ddp, step)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_one_rank_may_look_at_its_loss_between_the_steps_of_two_optimizers() -> None:
    with SideBySide(Branches()) as side:
        for step in range(3):
            side.zero_grad()
            side.backward(lambda model, step=step: branches_loss(model, step))
            side.compare()
            body, head = body_then_head(side.module)
            body.step()
            rank_0_looks(side.ddp, step)
            head.step()
            for optimizer in body_then_head(side.bare):
                optimizer.step()


def only_rank_0_steps(rank: int, params: list[list[nn.Parameter]]) -> list[nn.Parameter]:
    return [param for layer in params for param in layer] if rank == 0 else []


def frozen_ones_on_rank_0(rank: int, params: list[list[nn.Parameter]]) -> list[nn.Parameter]:
    return params[0] if rank == 0 else [param for layer in params[1:] for param in layer]


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("share", [only_rank_0_steps, frozen_ones_on_rank_0])
def test_optimizers_may_step_on_some_ranks_only(share: object) -> None:
    """Each rank updates a share of the parameters, and sends them to the others."""
    with SideBySide(Branches()) as side:
        for module in side.both_modules:
            module.layers[0].requires_grad_(False)
        mine = share(dist.get_rank(), all_params(side.module))
        optimizer = torch.optim.SGD(mine, lr=0.125) if mine else None
        for step in range(4):
            side.zero_grad()
            side.backward(lambda model, step=step: branches_loss(model, step))
            side.compare()
            if optimizer is not None:
                optimizer.step()
            for param, theirs in zip(side.module.parameters(), side.bare.parameters(), strict=True):
                dist.broadcast(param.data, 0 if share is only_rank_0_steps else 1)
                theirs.data.copy_(param.data)


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("by_hand", [True, False], ids=["finish", "one more forward"])
def test_a_mean_of_zero_is_a_result(by_hand: bool) -> None:
    """The mean is exactly zero: that is a result, and no gradient that was thrown away."""
    ddp = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((1, 2), 1.0 if dist.get_rank() else -1.0)).sum().backward()
        if dist.get_rank() == 0:
            if by_hand:
                ddp.finish()
            else:
                ddp(torch.ones(1, 2))
        optimizer.step()
        assert ddp.module.weight.grad.tolist() == [[0.0, 0.0]]
    ddp.close()
