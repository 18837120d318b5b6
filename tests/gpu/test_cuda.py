"""On a CUDA device: two gloo ranks share it, so that the host paths and the device paths are both in play."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.ranks import Ranks
from undertow import ConfigError, DistributedDataParallel, PhaseError, ShardedOptimizer, SyncConfig

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


def sync_batch_norm() -> tuple[bool, bool]:
    """Whether gradients, then running statistics, are those of torch's own class, to the bit."""
    torch.backends.cudnn.deterministic = True  # of its kernels only those that repeat their bits
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layers, nn.Linear(4 * 12 * 12, 2))).cuda()
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    ours = DistributedDataParallel(model, config=SyncConfig(bucket_cap_mb=0.001))
    equal = []
    try:
        for step in range(4):
            x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()
            for each in (ours, theirs):
                each.zero_grad()
                each(x).square().mean().backward()
            pairs = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
            equal += [torch.equal(mine.grad, reference.grad) for mine, reference in pairs]
        buffers = zip(ours.module.buffers(), theirs.module.buffers(), strict=True)
        return all(equal), all(torch.equal(mine, reference) for mine, reference in buffers)
    finally:
        ours.close()


def test_sync_batch_norm_trains_as_under_torchs_class(two_ranks: Ranks) -> None:
    assert two_ranks.run(sync_batch_norm) == [(True, True)] * 2


def weighted_on_a_device() -> bool:
    """Over gloo, whose handles the host waits for, with the division on the device."""
    rank = dist.get_rank()
    bare = make_model()
    model = DistributedDataParallel(copy.deepcopy(bare), config=SyncConfig(bucket_cap_mb=0.03))
    equal = []
    try:
        for step in range(4):
            x = torch.randn(4 + 4 * rank, 64, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
            model.weight(len(x))
            for module in (model, bare):
                module.zero_grad()
                module(x).square().sum().backward()
            for param in bare.parameters():
                dist.all_reduce(param.grad)
                param.grad /= 12
            pairs = zip(model.module.parameters(), bare.parameters(), strict=True)
            # A device divides by multiplying with a rounded reciprocal, ours and the reference's with another one.
            equal += [torch.allclose(mine.grad, reference.grad, rtol=4 * 2.0**-23, atol=0.0) for mine, reference in pairs]
    finally:
        model.close()
    return all(equal)


def test_weights_divide_on_a_device(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(weighted_on_a_device))


def weights_on_one_rank_only() -> str:
    """A device tells a step late, so that the host does not wait."""
    model = DistributedDataParallel(make_model())
    try:
        for number in range(4):
            if number < 2 or dist.get_rank() == 0:
                model.weight(2)
            model(torch.ones(2, 64, device="cuda")).sum().backward()
    except PhaseError as error:
        return str(error)
    finally:
        model.close()
    return ""


def test_weights_on_some_ranks_only_are_found_a_step_late_on_a_device(two_ranks: Ranks) -> None:
    for text in two_ranks.run(weights_on_one_rank_only):
        assert text.startswith("weights were given on some ranks and not on others.")
        assert "with rank 0, without rank 1" in text


def nonfinite_on_one_rank(policy: str) -> tuple[bool, int]:
    """Later than the rounds that are read at once: every rank must still know before the optimizer steps."""
    model = DistributedDataParallel(make_model(), config=SyncConfig(bucket_cap_mb=0.03, nonfinite=policy))
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for step in range(5):
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.zero_grad()
            x = torch.ones(8, 64, device="cuda")
            x[0, 0] = float("inf") if step == 4 and dist.get_rank() == 1 else 1.0
            model(x).square().mean().backward()
            optimizer.step()
        is_kept = all(map(torch.equal, before, model.parameters()))
        return is_kept, model.report(show=False).num_skipped
    finally:
        model.close()


@pytest.mark.parametrize(("policy", "expected"), [("skip", (True, 1)), ("warn", (False, 0))])
def test_a_gradient_that_is_not_finite_is_known_before_the_step(
    two_ranks: Ranks, policy: str, expected: tuple[bool, int]
) -> None:
    assert two_ranks.run(nonfinite_on_one_rank, policy) == [expected] * 2
