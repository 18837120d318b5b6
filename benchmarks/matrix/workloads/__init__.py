"""Models to train, by name: each gives a module whose forward returns the loss, and a rank's batch.

Runs inside any virtual environment that has torch; imports nothing of Undertow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.matrix.profile import PROFILES, scaled
from benchmarks.matrix.workloads import gpt, replay, resnet, small


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`make_model()` is the same on every rank and has `blocks`, what FSDP2 shards one by one; batches differ by rank."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Tensor, ...]]


def make_workload(name: str, scale: float, device: torch.device) -> Workload:
    """The workload that the catalog calls `name`, on `device`; only replayed ones know another scale than 1."""
    if name in PROFILES:
        profile = scaled(PROFILES[name](), scale)
        return _on(device, lambda: replay.Replay(profile), replay.batch_of)
    if name == "small":
        return _on(device, small.ManySmall, small.batch_of)
    module = {"gpt": gpt, "resnet": resnet}[name]
    size = module.SIZES[device.type]
    return _on(device, lambda: module.make_model(size), lambda rank: module.batch_of(rank, size))


def _on(device: torch.device, make_model: Callable[[], nn.Module], batch_of: Callable[[int], tuple[Tensor, ...]]) -> Workload:
    def make_seeded() -> nn.Module:
        torch.manual_seed(0)
        return make_model().to(device)

    return Workload(make_model=make_seeded, make_batch=lambda rank: tuple(part.to(device) for part in batch_of(rank)))
