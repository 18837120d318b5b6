"""Over NCCL: ranks with a device each or, where there is one only, sharing it, which NCCL takes for two hosts with one each.

Both wait on one device in turns, so that nothing here says how fast anything is.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.ranks import Ranks
from undertow import ConfigError, DistributedDataParallel, ShardedOptimizer, SyncConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL"),
]
_HIDDEN = 256


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        for refusal in ranks.run(why_refused):
            if refusal:
                pytest.skip(f"NCCL does not connect two ranks here: {refusal}")
        yield ranks


@functools.cache
def nccl_group() -> dist.ProcessGroup:
    """Once for each process of a pool."""
    rank, num_devices = dist.get_rank(), torch.cuda.device_count()
    torch.cuda.set_device(rank % num_devices)
    if num_devices < dist.get_world_size():
        # NCCL refuses a device that two ranks of a host have; ranks of two hosts it connects by sockets.
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=50))
    assert group is not None
    return group


def why_refused() -> str:
    try:
        dist.all_reduce(torch.ones(1, device="cuda"), group=nccl_group())
        torch.cuda.synchronize()
    except dist.DistBackendError as error:
        return str(error).strip().splitlines()[-1]
    return ""


def make_model() -> nn.Module:
    nccl_group()  # which sets the device
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_HIDDEN, _HIDDEN) for _ in range(6))).cuda()


def batch_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(32, _HIDDEN, generator=generator).cuda()


def write_over_freed_memory() -> None:
    """What was freed and is still read on another stream is not what it was any more."""
    for numel in (_HIDDEN, _HIDDEN * _HIDDEN, 2 * _HIDDEN * _HIDDEN, 6 * _HIDDEN * _HIDDEN):
        torch.full((numel,), torch.nan, device="cuda")


def trains_as_the_reference(strategy: str, reduction: str) -> bool:
    """To the bit: of two ranks a sum does not depend on its order, and a half is exact."""
    group, bare = nccl_group(), make_model()
    reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
    config = SyncConfig(strategy=strategy, reduction=reduction, bucket_cap_mb=0.3)
    model = DistributedDataParallel(copy.deepcopy(bare), process_group=group, config=config)
    try:
        if strategy == "ddp":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        else:
            optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=0.01)
        for step in range(8):
            for module, steps in ((model, optimizer), (bare, reference)):
                steps.zero_grad()
                module(batch_of(step)).square().mean().backward()
                write_over_freed_memory()
                if module is bare:
                    for param in bare.parameters():
                        dist.all_reduce(param.grad, group=group)
                        param.grad /= 2
                steps.step()
                write_over_freed_memory()
        model.wait()
        pairs = zip(model.module.parameters(), bare.parameters(), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)
    finally:
        model.close()


@pytest.mark.parametrize("reduction", ["native", "ordered"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_training_over_nccl_has_the_reference_s_bits(nccl_ranks: Ranks, strategy: str, reduction: str) -> None:
    assert nccl_ranks.run(trains_as_the_reference, strategy, reduction) == [True, True]


def gradients_on_a_narrow_wire() -> list[torch.Tensor]:
    """After each of several backwards without an update: what they were reduced from is the same every time."""
    model = DistributedDataParallel(
        make_model(), process_group=nccl_group(), config=SyncConfig(wire_dtype="bfloat16", bucket_cap_mb=0.3)
    )
    try:
        gradients = []
        for _ in range(6):
            model.zero_grad()
            model(batch_of(0)).square().mean().backward()
            write_over_freed_memory()
            gradients.append(torch.cat([param.grad.flatten() for param in model.module.parameters()]).cpu())
        return gradients
    finally:
        model.close()


def test_what_a_narrow_reduction_reads_is_held_until_it_has_been_read(nccl_ranks: Ranks) -> None:
    of_first, of_second = nccl_ranks.run(gradients_on_a_narrow_wire)
    for gradient in (*of_first, *of_second):
        assert torch.equal(gradient, of_first[0])


def eager() -> str:
    model = DistributedDataParallel(make_model(), process_group=nccl_group(), config=SyncConfig(strategy="zero1"))
    try:
        with pytest.raises(ConfigError) as caught:
            ShardedOptimizer(torch.optim.AdamW, model, lr=0.01, eager=True)
    finally:
        model.close()
    return str(caught.value)


def test_eager_steps_over_nccl_are_refused_by_name(nccl_ranks: Ranks) -> None:
    for text in nccl_ranks.run(eager):
        assert "eager=True is not built yet for nccl" in text
