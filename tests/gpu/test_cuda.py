"""On a CUDA device: two gloo ranks share it, so that the host paths and the device paths are both in play."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.ranks import Ranks
from undertow import ConfigError, DistributedDataParallel, ShardedOptimizer, SyncConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).cuda()


def gradients_equal_the_reference() -> bool:
    rank = dist.get_rank()
    bare = make_model()
    model = DistributedDataParallel(copy.deepcopy(bare), config=SyncConfig(bucket_cap_mb=0.03))
    equal = []
    try:
        for step in range(4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
            for module in (model, bare):
                module.zero_grad()
                module(x).square().mean().backward()
            for param in bare.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            equal += [
                torch.equal(mine.grad, reference.grad)
                for mine, reference in zip(model.module.parameters(), bare.parameters(), strict=True)
            ]
    finally:
        model.close()
    return all(equal)


def unused_on_one_rank() -> tuple[bool, tuple[str, ...]]:
    """Later than the rounds that are read at once: this rank must still learn that another one used it."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).cuda()
    model = DistributedDataParallel(layers)
    x = torch.ones(2, 8, device="cuda")
    try:
        for step in range(5):
            model.zero_grad()
            used = layers if step < 4 or rank == 0 else layers[:2]
            sum(layer(x).sum() for layer in used).backward()
        return layers[2].weight.grad is not None, model.unused_parameters
    finally:
        model.close()


def test_gradients_on_a_device_equal_the_reference(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(gradients_equal_the_reference))


def test_a_parameter_unused_on_one_rank_gets_the_mean_in_a_late_round_too(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(unused_on_one_rank)
    assert first == (True, ())
    assert second == (True, ("2.weight", "2.bias"))


def alone_on_a_device() -> bool:
    """One rank has every shard: master weights, norms and scaling run on the device."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).cuda()
    bare = make_model()
    model = DistributedDataParallel(copy.deepcopy(bare), config=SyncConfig(strategy="zero1"))
    optimizers = [ShardedOptimizer(torch.optim.AdamW, model, lr=0.01), torch.optim.AdamW(bare.parameters(), lr=0.01)]
    for _ in range(3):
        for module, optimizer in zip((model, bare), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    model.wait()
    equal = all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True))
    model.close()
    return equal


def test_one_rank_steps_on_a_device_as_a_plain_optimizer_does() -> None:
    with Ranks(1) as one:
        assert one.run(alone_on_a_device) == [True]


def sharded_over_gloo() -> str:
    model = DistributedDataParallel(make_model(), config=SyncConfig(strategy="zero1"))
    try:
        with pytest.raises(ConfigError) as caught:
            ShardedOptimizer(torch.optim.AdamW, model, lr=0.01)
    finally:
        model.close()
    return str(caught.value)


def test_shards_on_devices_need_another_backend_than_gloo(two_ranks: Ranks) -> None:
    for text in two_ranks.run(sharded_over_gloo):
        assert "gloo sends and receives from the host's memory only" in text
