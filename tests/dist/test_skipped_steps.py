"""Optimizer steps that are left out: by a gradient scaler, by an exception, by the user."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.drop_in import TIMEOUT_S, SideBySide
from support.errors import text_of
from support.models import Branches, noise
from support.ranks import Ranks
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


def finished_twice() -> None:
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


def test_finish_may_be_called_again(ranks: Ranks) -> None:
    ranks.run(finished_twice, timeout_s=TIMEOUT_S)


def second_round_on_one_rank_only() -> str:
    """Rank 0 synchronises twice in a step, rank 1's second backward reaches nothing, and it cannot know of the round."""
    ddp = DistributedDataParallel(Branches())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)

    def train() -> None:
        for step in range(3):
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
            f"  synchronisation 1, rank {rank}\n"
            "  Run the same number of synchronised backwards on every rank; a rank that has none calls finish()."
        )
