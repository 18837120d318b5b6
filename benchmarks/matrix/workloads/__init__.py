"""Models to train, by name: each gives a module whose forward returns the loss, and a rank's batch.

Runs inside any virtual environment that has torch; imports nothing of Undertow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.matrix.profile import PROFILES, scaled
from benchmarks.matrix.workloads import gpt, replay, resnet


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`make_model()` is the same on every rank and has `blocks`, what FSDP2 shards one by one; batches differ by rank."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Tensor, ...]]


def make_workload(name: str, scale: float) -> Workload:
    """The workload that the catalog calls `name`; only replayed ones know another scale than 1."""
    if name in PROFILES:
        profile = scaled(PROFILES[name](), scale)
        return Workload(make_model=lambda: _seeded(lambda: replay.Replay(profile)), make_batch=replay.batch_of)
    module = {"gpt": gpt, "resnet": resnet}[name]
    return Workload(make_model=lambda: _seeded(module.make_model), make_batch=module.batch_of)


def _seeded(make_model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make_model()
