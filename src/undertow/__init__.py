"""Undertow.

Data-parallel training for PyTorch that overlaps gradient communication with computation.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from undertow.config import ExpertGroup, Outer, SyncConfig
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
from undertow.tracebacks import shorten_tracebacks
from undertow.version import __version__ as __version__

if TYPE_CHECKING:
    from undertow.by_hand.average import average_gradients
    from undertow.by_hand.buckets import GradientBucket, GradientBucketManager
    from undertow.checkpoint.background import BackgroundSave
    from undertow.checkpoint.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
    from undertow.ddp.attach import BucketedDDPHooks, attach
    from undertow.ddp.outer_axis import OuterAxis, outer_axis
    from undertow.ddp.signals import stop_on_signal
    from undertow.ddp.wrapper import DistributedDataParallel
    from undertow.optim.clipping import clip_grad_norm_
    from undertow.optim.hidden_matrices import hidden_matrices
    from undertow.optim.shard_optimizer import shard_optimizer
    from undertow.optim.sharded_optimizer import ShardedOptimizer
    from undertow.sync.gradient_sync import GradientSync

# Loaded when they are first used: planning works without torch.
_LAZY = {
    "BackgroundSave": "undertow.checkpoint.background",
    "BucketedDDPHooks": "undertow.ddp.attach",
    "DistributedDataParallel": "undertow.ddp.wrapper",
    "GradientBucket": "undertow.by_hand.buckets",
    "GradientBucketManager": "undertow.by_hand.buckets",
    "OuterAxis": "undertow.ddp.outer_axis",
    "ShardedOptimizer": "undertow.optim.sharded_optimizer",
    "GradientSync": "undertow.sync.gradient_sync",
    "attach": "undertow.ddp.attach",
    "average_gradients": "undertow.by_hand.average",
    "clip_grad_norm_": "undertow.optim.clipping",
    "has_checkpoint": "undertow.checkpoint.checkpoint",
    "hidden_matrices": "undertow.optim.hidden_matrices",
    "load_checkpoint": "undertow.checkpoint.checkpoint",
    "outer_axis": "undertow.ddp.outer_axis",
    "save_checkpoint": "undertow.checkpoint.checkpoint",
    "shard_optimizer": "undertow.optim.shard_optimizer",
    "stop_on_signal": "undertow.ddp.signals",
}

__all__ = [
    "BackgroundSave",
    "BucketedDDPHooks",
    "CheckpointError",
    "ConfigError",
    "Desync",
    "DistributedDataParallel",
    "ExpertGroup",
    "GradientBucket",
    "GradientBucketManager",
    "GradientSync",
    "NonFiniteGradient",
    "Outer",
    "OuterAxis",
    "PeerFailed",
    "PhaseError",
    "PlanMismatch",
    "RankLost",
    "ReplicaMismatch",
    "ShardedGradientError",
    "ShardedOptimizer",
    "StallTimeout",
    "SyncConfig",
    "UndertowError",
    "WrongType",
    "attach",
    "average_gradients",
    "clip_grad_norm_",
    "has_checkpoint",
    "hidden_matrices",
    "load_checkpoint",
    "outer_axis",
    "save_checkpoint",
    "shard_optimizer",
    "stop_on_signal",
]

logging.getLogger("undertow").addHandler(logging.NullHandler())
shorten_tracebacks()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'undertow' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
