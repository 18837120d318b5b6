"""Over NCCL: ranks with a device each or, where there is one only, sharing it, which NCCL takes for two hosts with one each.

Both wait on one device in turns, so that nothing here says how fast anything is.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.alike import backward_alike, of_all_ranks, require_equal_gradients, require_equal_values
from support.errors import text_of
from support.ranks import Ranks, in_ranks
from undertow import ConfigError, DistributedDataParallel, ShardedOptimizer, SyncConfig

_HIDDEN = 256


@contextlib.contextmanager
def nccl_group() -> Iterator[dist.ProcessGroup]:
    rank, num_devices = dist.get_rank(), torch.cuda.device_count()
    torch.cuda.set_device(rank % num_devices)
    if num_devices < dist.get_world_size():
        # NCCL refuses a device that two ranks of a host have; ranks of two hosts it connects by sockets.
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=50))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def why_refused() -> str:
    try:
        with nccl_group() as group:
            dist.all_reduce(torch.ones(1, device="cuda"), group=group)
            torch.cuda.synchronize()
    except dist.DistBackendError as error:
        return str(error).strip().splitlines()[-1]
    return ""


@pytest.fixture(scope="module")
def nccl() -> None:
    """Skips where NCCL does not connect two ranks."""
    with Ranks(2) as ranks:
        refusals = list(filter(None, ranks.run(why_refused)))
    if refusals:
        pytest.skip(f"NCCL does not connect two ranks here: {refusals[0]}")


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL"),
    pytest.mark.usefixtures("nccl"),
]


@contextlib.contextmanager
def wrapped(**settings: Any) -> Iterator[tuple[DistributedDataParallel, nn.Module, dist.ProcessGroup]]:
    """A model over NCCL, a bare copy of it, and the group."""
    with nccl_group() as group:
        torch.manual_seed(0)
        bare = nn.Sequential(*(nn.Linear(_HIDDEN, _HIDDEN) for _ in range(6))).cuda()
        model = DistributedDataParallel(copy.deepcopy(bare), process_group=group, config=SyncConfig(**settings))
        with contextlib.closing(model):
            yield model, bare, group


def loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(32, _HIDDEN, generator=generator).cuda()).square().mean()


def write_over_freed_memory() -> None:
    """What was freed and is still read on another stream is not what it was any more."""
    for numel in (_HIDDEN, _HIDDEN * _HIDDEN, 2 * _HIDDEN * _HIDDEN, 6 * _HIDDEN * _HIDDEN):
        torch.full((numel,), torch.nan, device="cuda")


@in_ranks(2)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_training_over_nccl_has_the_reference_s_bits(strategy: str, reduction: str) -> None:
    """Of two ranks a sum does not depend on its order, and a half is exact."""
    with wrapped(strategy=strategy, reduction=reduction, bucket_cap_mb=0.3) as (model, bare, group):

        def mean(model: nn.Module) -> None:
            write_over_freed_memory()
            for param in model.parameters():
                dist.all_reduce(param.grad, group=group)
                param.grad /= 2

        make = ShardedOptimizer if strategy != "ddp" else (lambda cls, model, **how: cls(model.parameters(), **how))
        optimizers = [make(torch.optim.AdamW, model, lr=0.01), torch.optim.AdamW(bare.parameters(), lr=0.01)]
        require = require_equal_gradients if strategy == "ddp" else (lambda *_: None)
        for step in range(8):
            backward_alike(model, bare, loss, steps=[step], mean=mean, require=require)
            for optimizer in optimizers:
                optimizer.step()
                write_over_freed_memory()
        model.wait()
        require_equal_values(model, bare)


@in_ranks(2)
def test_what_a_narrow_reduction_reads_is_held_until_it_has_been_read() -> None:
    """After each of several backwards without an update gradients are reduced from the same values."""
    gradients = []
    with wrapped(wire_dtype="bfloat16", bucket_cap_mb=0.3) as (model, _, _):
        for _ in range(6):
            model.zero_grad()
            loss(model, 0).backward()
            write_over_freed_memory()
            gradients.append(torch.cat([param.grad.flatten() for param in model.module.parameters()]).cpu())
    first = of_all_ranks(gradients[0])[0]
    assert [torch.equal(gradient, first) for gradient in gradients] == [True] * 6


@in_ranks(2)
def test_eager_steps_over_nccl_are_refused_by_name() -> None:
    with wrapped(strategy="zero1") as (model, _, _):
        text = text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.AdamW, model, lr=0.01, eager=True))
    assert "eager=True is not built yet for nccl" in text
