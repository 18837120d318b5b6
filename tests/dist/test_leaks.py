"""Gradients live once; after a hundred wraps a rank has as many threads, descriptors, groups and tensors as after ten."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.ranks import in_ranks
from undertow import ConfigError, DistributedDataParallel, PlanMismatch, ShardedOptimizer, SyncConfig

PATIENCE_S = 10.0


def step(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(2, 4)).sum().backward()


def closes() -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    step(ddp)
    ddp.close()


def closes_with_shards() -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
    step(ddp)
    optimizer.step()
    ddp.close()


def drops() -> None:
    step(DistributedDataParallel(nn.Linear(4, 4)))


def fails_on_all_ranks() -> None:
    with pytest.raises(PlanMismatch):
        DistributedDataParallel(nn.Linear(4, 4 + dist.get_rank()))


def is_refused() -> None:
    with pytest.raises(ConfigError):
        DistributedDataParallel(nn.Linear(4, 4), ignore=["no such parameter"])


def held() -> Counter[str]:
    gc.collect()
    threads = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    descriptors = Counter(_target(entry) for entry in os.listdir("/proc/self/fd"))
    groups = {"process groups": len(dist.distributed_c10d._world.pg_map), "tasks": len(os.listdir("/proc/self/task"))}
    # What ranks tell each other all the time is in bytes and whole numbers: parameters, gradients and buckets are not.
    tensors = {"tensors": sum(isinstance(each, torch.Tensor) and each.is_floating_point() for each in gc.get_objects())}
    return threads + descriptors + Counter(groups) + Counter(tensors)


def grown_since(before: Counter[str]) -> dict[str, tuple[int, int]]:
    """What there is more of, or less, than then. A thread may hold something for a moment: it is looked for again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = held()
        changed = {name: (before[name], now[name]) for name in before.keys() | now.keys() if before[name] != now[name]}
        if not changed or time.monotonic() > deadline:
            return changed
        time.sleep(0.1)


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").split(":")[0]
    except FileNotFoundError:
        return "the one that lists them"


@pytest.mark.slow
@in_ranks(2)
@pytest.mark.parametrize("once", [closes, closes_with_shards, drops, fails_on_all_ranks, is_refused])
def test_nothing_is_left_of_many_wraps(once: Callable[[], None]) -> None:
    for _ in range(10):
        once()
    dist.barrier()
    after_10 = held()
    for _ in range(90):
        once()
    dist.barrier()
    assert grown_since(after_10) == {}


def storages() -> dict[int, int]:
    """Address and bytes of every storage above 1 KB of a tensor that Python sees, except messages, which are of bytes."""
    kinds = (torch.Tensor, nn.Parameter)
    tensors = [thing for thing in gc.get_objects() if type(thing) in kinds and thing.dtype != torch.uint8]
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return {pointer: size for pointer, size in found.items() if size > 1024}


@in_ranks(2)
def test_after_a_change_of_plan_the_gradients_are_still_there_once() -> None:
    layers = [nn.Linear(64, 64) for _ in range(6)]
    # They run in another order than they are registered in, so that the second step has another plan.
    module = nn.ModuleList(layers)
    module.forward = nn.Sequential(*reversed(layers)).forward
    gc.collect()
    gc.disable()  # what only the garbage collector frees is held for long
    try:
        before = storages()
        with contextlib.closing(DistributedDataParallel(module, config=SyncConfig(bucket_cap_mb=0.04))) as model:
            first_plan = model.plan.fingerprint
            for _ in range(3):
                model.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
            held = sum(size for pointer, size in storages().items() if pointer not in before)
    finally:
        gc.enable()
    assert model.plan.fingerprint != first_plan
    # Trailers and padding: some 60 elements for each of the eight buckets or fewer.
    gradient_bytes = sum(param.nbytes for param in module.parameters())
    assert gradient_bytes <= held <= gradient_bytes + 8 * 100 * 4
