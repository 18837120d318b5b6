"""Eight ranks once: sums, shards and rows that are longer than those of the other tests."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.models import CASES
from support.ranks import in_ranks
from support.sharded import Parameters, chain, hybrid, parameters, require_equal, trained

CASE, NUM_STEPS = CASES["mlp"], 4
SETTINGS = {"num_steps": NUM_STEPS, "reduction": "ordered", "bucket_cap_mb": 3e-4}


def naive(*rows: tuple[int, ...]) -> Parameters:
    """The parameters of a bare model whose gradients are added up row by row."""
    model = CASE.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        CASE.loss(model, step).backward()
        mean_row_by_row(model, rows)
        optimizer.step()
    return {f"module.{name}": param.detach() for name, param in model.named_parameters()}


def mean_row_by_row(model: nn.Module, rows: tuple[tuple[int, ...], ...]) -> None:
    """Makes every `.grad` the sum of each row in rank order, those added up in order, over the number of ranks."""
    for param in model.parameters():
        of_ranks = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, param.grad)
        param.grad = chain([chain([of_ranks[rank] for rank in row]) for row in rows]) / len(of_ranks)


def trained_on_mesh() -> Parameters:
    with hybrid(CASE.model(), shape=(2, 4), reduction="ordered", bucket_cap_mb=3e-4) as (ddp, optimizer):
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            CASE.loss(ddp, step).backward()
            optimizer.step()
        return parameters(ddp)


@pytest.mark.slow
@in_ranks(8, is_fresh=True)
def test_eight_ranks_have_the_bits_of_sums_in_rank_order() -> None:
    in_rank_order = naive((0, 1, 2, 3, 4, 5, 6, 7))
    for strategy in ("ddp", "zero1", "zero2"):
        require_equal(in_rank_order, trained(CASE, strategy, **SETTINGS), what=strategy)
    require_equal(naive((0, 1, 2, 3), (4, 5, 6, 7)), trained_on_mesh(), what="hybrid")
