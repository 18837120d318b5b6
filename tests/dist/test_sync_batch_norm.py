"""Layers that communicate by themselves, as torch's SyncBatchNorm does on GPUs: over the user's group, both ways."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.drop_in import TIMEOUT_S
from support.errors import text_of
from support.models import noise
from support.naive import naive_mean, require_same_gradients, wrapped
from support.ranks import Ranks, in_ranks
from undertow import ConfigError, DistributedDataParallel, ShardedOptimizer, attach


class _CentredOverRanks(torch.autograd.Function):
    """Takes the mean over all ranks' rows away: an all-reduce in forward, and another one in backward, of the same size."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x - _mean_over_ranks(x)

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # with one argument
        return gradient - _mean_over_ranks(gradient)


def _mean_over_ranks(x: Tensor) -> Tensor:
    total = x.sum(0)
    dist.all_reduce(total)
    return total / (len(x) * dist.get_world_size())


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _CentredOverRanks.apply(super().forward(x)).tanh()  # type: ignore[no-untyped-call]


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(
    ("strategy", "settings"), [("ddp", {}), ("ddp", {"reduction": "ordered"}), ("ddp", {"overlap": False}), ("zero1", {})]
)
def test_collectives_of_layers_do_not_meet_ours(settings: dict[str, Any], strategy: str) -> None:
    model = nn.Sequential(*(Centred(6, 6, bias=False) for _ in range(5)))
    bare = copy.deepcopy(model)
    with wrapped(model, bucket_cap_mb=1e-6, strategy=strategy, **settings) as ddp:
        assert ddp.sync.own_group.process_group is not dist.group.WORLD
        make = ShardedOptimizer if strategy != "ddp" else (lambda cls, target, **given: cls(target.parameters(), **given))
        optimizers = [make(torch.optim.SGD, ddp, lr=0.1), torch.optim.SGD(bare.parameters(), lr=0.1)]
        for step in range(4):
            for each, optimizer in zip((ddp, bare), optimizers, strict=True):
                optimizer.zero_grad()
                each(noise(4, 6, step=step)).square().mean().backward()
            naive_mean(bare)
            if strategy == "ddp":
                require_same_gradients(ddp, bare)
            for optimizer in optimizers:
                optimizer.step()
        ddp.wait()
        for ours, wanted in zip(model.parameters(), bare.parameters(), strict=True):
            assert torch.equal(ours, wanted)


def converted() -> tuple[str, str]:
    """What the wrapper and `attach` say of a converted model on the CPU, and what torch's layer says itself."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    assert isinstance(model[1], nn.SyncBatchNorm)
    refused = text_of(ConfigError, lambda: DistributedDataParallel(model))
    assert text_of(ConfigError, lambda: attach(model)) == refused.replace("DistributedDataParallel(...)", "attach(...)")
    return refused, text_of(ValueError, lambda: model(noise(4, 3)))


def test_a_converted_model_is_refused_on_the_cpu_where_torchs_layer_does_not_train(two_ranks: Ranks) -> None:
    for refused, by_torch in two_ranks.run(converted):
        assert refused.startswith("SyncBatchNorm layers only work with GPU modules.")
        assert "SyncBatchNorm expected input tensor to be on" in by_torch
