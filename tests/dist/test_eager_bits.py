"""An eager step has the bits of one with a barrier, and of unsharded training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.models import CASES, Branches, Case, noise
from support.ranks import in_ranks
from support.sharded import require_equal, trained
from undertow import DistributedDataParallel

SMALL = {"bucket_cap_mb": 1e-4}  # most parameters are in pieces
ORDERED: dict[str, Any] = {"reduction": "ordered"}


@in_ranks(2, 3)
@pytest.mark.parametrize(("case", "strategy"), [("mlp", "zero1"), ("tied transformer", "zero1"), ("convolutions", "zero2")])
def test_eager_steps_have_the_bits_of_plain_ones(case: str, strategy: str) -> None:
    expected = trained(CASES[case], "ddp", **ORDERED)
    for plan in (SMALL, {}):
        require_equal(expected, trained(CASES[case], strategy, eager=True, **ORDERED, **plan), what=str(plan))


# One of each kind: plain, several states, a state that starts with values, scalars of their own, sizes of their own.
@in_ranks(2)
@pytest.mark.parametrize("optimizer", ["Nesterov", "Adam", "foreach AdamW", "Adagrad", "NAdam", "Rprop"])
def test_so_with_other_optimizers(optimizer: str) -> None:
    settings: dict[str, Any] = {"num_steps": 20, **ORDERED}
    expected = trained(CASES["mlp"], "ddp", optimizer, **settings)
    require_equal(expected, trained(CASES["mlp"], "zero1", optimizer, eager=True, **settings, **SMALL))


@in_ranks(2)
def test_so_with_parameters_of_sixteen_bits() -> None:
    case = CASES["mlp"]
    narrow = Case(lambda: case.make().bfloat16(), lambda model, step: model(noise(5, 6, step=step).bfloat16()).float().sum())
    settings: dict[str, Any] = {"num_steps": 8, **ORDERED, **SMALL}
    require_equal(trained(narrow, "zero1", **settings), trained(narrow, "zero1", eager=True, **settings))


@in_ranks(2)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_so_where_micro_batches_add_up(strategy: str, to_none: bool) -> None:
    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad(set_to_none=to_none)
        with ddp.no_sync():
            for micro in range(2):
                CASES["mlp"].loss(ddp, 10 * step + micro).backward()
        CASES["mlp"].loss(ddp, 10 * step + 2).backward()
        opt.step()

    settings: dict[str, Any] = {"num_steps": 6, "each": each, **ORDERED, **SMALL}
    expected = trained(CASES["mlp"], strategy, "SGD", **settings)
    require_equal(expected, trained(CASES["mlp"], strategy, "SGD", eager=True, **settings))


@in_ranks(2)
def test_so_where_gradients_are_never_cleared() -> None:
    """Gradients of all steps so far add up."""

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        CASES["mlp"].loss(ddp, step).mul(1e-3).backward()
        opt.step()

    settings: dict[str, Any] = {"num_steps": 6, "each": each, **ORDERED, **SMALL}
    expected = trained(CASES["mlp"], "zero1", "SGD", **settings)
    require_equal(expected, trained(CASES["mlp"], "zero1", "SGD", eager=True, **settings))


@in_ranks(2, 3)
@pytest.mark.parametrize("to_none", [True, False])
def test_so_where_parameters_are_unused_on_one_rank_and_on_all(to_none: bool) -> None:
    """Layer 2 is used in no odd step, layer 1 by rank 0 alone, and momentum must not move what nobody has used."""
    case = Case(Branches, lambda model, step: model(noise(3, 4, step=step)).sum())

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad(set_to_none=to_none)
        order = (0, 1, 2) if step % 2 == 0 else (0, 1) if dist.get_rank() == 0 else (0,)
        ddp(noise(3, 4, step=step), order).square().sum().backward()
        opt.step()

    settings: dict[str, Any] = {"num_steps": 8, "each": each, **ORDERED}
    expected = trained(case, "ddp", "SGD", **settings)
    for cap in (2e-5, None):
        require_equal(expected, trained(case, "zero1", "SGD", eager=True, bucket_cap_mb=cap, **settings), what=str(cap))


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward; the last one shares the first one's weight, both in a checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4))
        self.blocks[3][2].weight = self.blocks[0][0].weight
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@in_ranks(2, 3)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_so_where_the_model_is_checkpointed_and_tied(use_reentrant: bool) -> None:
    case = Case(lambda: Checkpointed(use_reentrant), lambda model, step: model(noise(5, 6, step=step)).square().mean())
    # In one bucket: a part of a gradient that comes behind its bucket is averaged by itself, and rounded so.
    expected = trained(case, "ddp", num_steps=6, auto_tune=False, **ORDERED)
    for plan in (SMALL, {}):
        require_equal(expected, trained(case, "zero1", num_steps=6, eager=True, **ORDERED, **plan), what=str(plan))
