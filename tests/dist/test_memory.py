"""Gradients live once."""

from __future__ import annotations

import contextlib
import gc

import torch
from torch import nn

from support.ranks import in_ranks
from undertow import DistributedDataParallel, SyncConfig


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
