"""Undertow: data-parallel training for PyTorch whose gradient communication runs beneath the computation."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from undertow.config import ExpertGroup, SyncConfig
from undertow.errors import (
    CheckpointError,
    ConfigError,
    Desync,
    NonFiniteGradient,
    PeerFailed,
    PhaseError,
    PlanMismatch,
    RankLost,
    ReplicaMismatch,
    ShardedGradientError,
    StallTimeout,
    UndertowError,
    WrongType,
)
from undertow.version import __version__ as __version__

if TYPE_CHECKING:
    from undertow.attached import BucketedDDPHooks, attach
    from undertow.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
    from undertow.clipping import clip_grad_norm_
    from undertow.ddp import DistributedDataParallel
    from undertow.hooks import chain
    from undertow.optim import ShardedOptimizer
    from undertow.runtime.average import average_gradients
    from undertow.runtime.buckets import GradientBucket
    from undertow.runtime.manager import GradientBucketManager
    from undertow.sync import Sync

# Loaded when they are first used: planning works without torch.
_LAZY = {
    "BucketedDDPHooks": "undertow.attached",
    "DistributedDataParallel": "undertow.ddp",
    "GradientBucket": "undertow.runtime.buckets",
    "GradientBucketManager": "undertow.runtime.manager",
    "ShardedOptimizer": "undertow.optim",
    "Sync": "undertow.sync",
    "attach": "undertow.attached",
    "average_gradients": "undertow.runtime.average",
    "chain": "undertow.hooks",
    "clip_grad_norm_": "undertow.clipping",
    "has_checkpoint": "undertow.checkpoint",
    "load_checkpoint": "undertow.checkpoint",
    "save_checkpoint": "undertow.checkpoint",
}

__all__ = [
    "BucketedDDPHooks",
    "CheckpointError",
    "ConfigError",
    "Desync",
    "DistributedDataParallel",
    "ExpertGroup",
    "GradientBucket",
    "GradientBucketManager",
    "NonFiniteGradient",
    "PeerFailed",
    "PhaseError",
    "PlanMismatch",
    "RankLost",
    "ReplicaMismatch",
    "ShardedGradientError",
    "ShardedOptimizer",
    "StallTimeout",
    "Sync",
    "SyncConfig",
    "UndertowError",
    "WrongType",
    "attach",
    "average_gradients",
    "chain",
    "clip_grad_norm_",
    "has_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]

logging.getLogger("undertow").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'undertow' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
