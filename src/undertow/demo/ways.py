"""The ways of synchronising gradients, each put around a bare model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn

import undertow
from undertow.demo.settings import Way

__all__ = ["BUILDERS", "Synchronised"]

_FIXED_BUCKET_MB = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronised:
    """A model whose gradients are the mean over ranks once `after_backward` has returned.

    Where `sharded` is not None, it is what a ShardedOptimizer steps: each rank has its shards of the mean only.
    """

    module: nn.Module  # what the training loop calls
    after_backward: Callable[[], None]
    close: Callable[[], None]
    sharded: undertow.DistributedDataParallel | None = None
    measured: undertow.DistributedDataParallel | None = None  # of which there is a profile after some steps


def _nothing() -> None:
    pass


def _per_parameter(model: nn.Module) -> Synchronised:
    """What one writes first: a blocking loop over the parameters. The reference for all others."""
    num_ranks = dist.get_world_size()

    def reduce_each() -> None:
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= num_ranks

    return Synchronised(module=model, after_backward=reduce_each, close=_nothing)


def _attached(model: nn.Module, config: undertow.SyncConfig) -> Synchronised:
    sync = undertow.attach(model, config=config)
    return Synchronised(module=model, after_backward=_nothing, close=sync.close)


def _bucketed(model: nn.Module) -> Synchronised:
    return _attached(model, undertow.SyncConfig(overlap=False, bucket_cap_mb=_FIXED_BUCKET_MB, order="reverse"))


def _overlapped(model: nn.Module) -> Synchronised:
    return _attached(model, undertow.SyncConfig(bucket_cap_mb=_FIXED_BUCKET_MB, order="reverse"))


def _torch_ddp(model: nn.Module) -> Synchronised:
    return Synchronised(module=nn.parallel.DistributedDataParallel(model), after_backward=_nothing, close=_nothing)


def _undertow(model: nn.Module) -> Synchronised:
    wrapped = undertow.DistributedDataParallel(model)
    return Synchronised(module=wrapped, after_backward=_nothing, close=wrapped.close, measured=wrapped)


def _sharded(model: nn.Module, *, strategy: str) -> Synchronised:
    # Every step: the times of the others are not thinned out either.
    config = undertow.SyncConfig(strategy=strategy, record="full")
    wrapped = undertow.DistributedDataParallel(model, config=config)
    return Synchronised(module=wrapped, after_backward=_nothing, close=wrapped.close, sharded=wrapped, measured=wrapped)


BUILDERS: Mapping[Way, Callable[[nn.Module], Synchronised]] = {
    Way.PER_PARAMETER: _per_parameter,
    Way.BUCKETED: _bucketed,
    Way.OVERLAPPED: _overlapped,
    Way.TORCH_DDP: _torch_ddp,
    Way.UNDERTOW: _undertow,
    Way.ZERO1: partial(_sharded, strategy="zero1"),
    Way.ZERO2: partial(_sharded, strategy="zero2"),
}
