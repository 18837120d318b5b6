"""Gradients that were only accumulated are averaged before somebody looks at them, outside of `accumulate()`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.alike import of_all_ranks
from support.errors import text_of
from support.ranks import in_ranks
from support.sharded import training
from undertow import ReplicaMismatch


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(batch).square().sum()


def mean_gradient(module: nn.Linear, step: int) -> torch.Tensor:
    """The naive reference: a bare copy of the model on the batch of every rank."""
    total = torch.zeros_like(module.weight)
    for rank in range(dist.get_world_size()):
        bare = nn.Linear(6, 3)
        bare.load_state_dict(module.state_dict())
        loss_of(bare, step, rank).backward()
        assert bare.weight.grad is not None
        total += bare.weight.grad
    return total / dist.get_world_size()


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_full_gradient_is_the_mean_in_a_window_that_is_cut_short(strategy: str, set_to_none: bool) -> None:
    with training(nn.Linear(6, 3), strategy, "SGD") as (ddp, optimizer):
        ddp.sync.broadcast_parameters()
        loss_of(ddp, 0).backward()
        optimizer.step()
        ddp.wait()
        optimizer.zero_grad(set_to_none=set_to_none)
        expected = mean_gradient(ddp.module, 1)
        with ddp.no_sync():
            loss_of(ddp, 1).backward()
        with pytest.warns(UserWarning, match="full_gradient"):
            found = ddp.full_gradient(ddp.module.weight)
        assert torch.equal(found, expected)  # two summands: any order has the same bits


@in_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_clipping_in_a_window_that_is_cut_short_is_of_the_mean(set_to_none: bool) -> None:
    with training(nn.Linear(6, 3), "zero1", "SGD") as (ddp, optimizer):
        ddp.sync.broadcast_parameters()
        loss_of(ddp, 0).backward()
        optimizer.step()
        ddp.wait()
        optimizer.zero_grad(set_to_none=set_to_none)
        clip: Any = optimizer
        with ddp.no_sync():
            loss_of(ddp, 1).backward()
        with pytest.warns(UserWarning, match="clip_grad_norm_"):
            norm = clip.clip_grad_norm_(1e9)
        expected = torch.stack([ddp.full_gradient(param).norm() for param in ddp.module.parameters()]).norm()
        torch.testing.assert_close(norm, expected)  # another order of additions: fp32's usual 1.3e-6
        assert of_all_ranks(float(norm)) == [float(norm)] * 2
        optimizer.step()


@in_ranks(2)
def test_a_look_on_one_rank_gathers_nothing_about_a_difference_of_replicas() -> None:
    """The other rank is in its next backward. Both raise the error before the step."""
    with training(nn.Linear(6, 3), "ddp", "SGD", check_replicas_every=1) as (ddp, optimizer):
        ddp.sync.broadcast_parameters()
        with torch.no_grad():
            ddp.module.weight.add_(dist.get_rank())
        first, second = (loss_of(ddp, step) for step in range(2))
        first.backward()
        if dist.get_rank() == 0:
            ddp.full_gradient(ddp.module.weight)
        second.backward()
        assert "parameter 'weight' has other values on rank 1" in text_of(ReplicaMismatch, optimizer.step)
