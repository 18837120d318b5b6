"""Gradients live once."""

from __future__ import annotations

import gc

import torch
from torch import nn

from support.ranks import Ranks
from undertow import DistributedDataParallel, SyncConfig


class Backwards(nn.Module):
    """Layers that run in another order than they are registered in, so that the second step has another plan."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def gradient_storages() -> tuple[int, int, bool]:
    """Bytes of all large storages that are alive, above those of parameters; of the gradients; whether plans changed."""
    module = Backwards()
    gc.collect()
    gc.disable()  # what only the garbage collector frees is held for long
    try:
        before = storages()
        model = DistributedDataParallel(module, config=SyncConfig(bucket_cap_mb=0.04))
        first_plan = model.plan.fingerprint
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
        held = sum(size for pointer, size in storages().items() if pointer not in before)
        model.close()
    finally:
        gc.enable()
    return held, sum(param.nbytes for param in module.parameters()), model.plan.fingerprint != first_plan


def storages() -> dict[int, int]:
    """Address and bytes of every storage above 1 KB of a tensor that Python sees, but for messages, which are of bytes."""
    kinds = (torch.Tensor, nn.Parameter)
    tensors = [thing for thing in gc.get_objects() if type(thing) in kinds and thing.dtype != torch.uint8]
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return {pointer: size for pointer, size in found.items() if size > 1024}


def test_after_a_change_of_plan_the_gradients_are_still_there_once(two_ranks: Ranks) -> None:
    for held, gradient_bytes, has_changed in two_ranks.run(gradient_storages):
        assert has_changed
        # Trailers and padding: some 60 elements for each of the eight buckets or fewer.
        assert gradient_bytes <= held <= gradient_bytes + 8 * 100 * 4
