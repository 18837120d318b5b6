"""The settings of the demo, and the variants of synchronization that it compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch import nn

import undertow
from undertow.cost import Link, link_from_text
from undertow.errors import ConfigError
from undertow.schedule import strategy_named

__all__ = ["BUILDERS", "NUM_WARM_UP_STEPS", "OURS", "REFERENCE", "DemoSettings", "Synchronized", "Way"]

NUM_WARM_UP_STEPS = 2  # buckets are made in the first step and may be reordered after it
_MAX_RANKS = 16
_MAX_STEPS = 10_000


class Way(StrEnum):
    """Variants of averaging gradients over ranks, in the order in which the demo runs them."""

    PER_PARAMETER = "per-parameter"
    BUCKETED = "bucketed"
    OVERLAPPED = "overlapped"
    TORCH_DDP = "torch-ddp"
    UNDERTOW = "undertow"
    ZERO1 = "zero1"
    ZERO2 = "zero2"

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Way.PER_PARAMETER: "a reduction per parameter",
    Way.BUCKETED: "bucketed, after backward",
    Way.OVERLAPPED: "bucketed, overlapped",
    Way.TORCH_DDP: "torch DDP, defaults",
    Way.UNDERTOW: "Undertow, defaults",
    Way.ZERO1: "Undertow, ZeRO-1",
    Way.ZERO2: "Undertow, ZeRO-2",
}
REFERENCE = Way.PER_PARAMETER
OURS = frozenset({Way.UNDERTOW, Way.ZERO1, Way.ZERO2})
_UNSHARDED = (Way.PER_PARAMETER, Way.BUCKETED, Way.OVERLAPPED, Way.TORCH_DDP, Way.UNDERTOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One run of the demo. Raises ConfigError for values that cannot work."""

    num_ranks: int = 2
    link: str = "1gbit"
    text: Path | None = None  # None: the standard library's source
    num_steps: int = 8  # measured steps per variant, after the warm-up
    out: Path = Path("out")
    seed: int = 0
    strategy: str = "ddp"  # a strategy with shards is trained as an additional variant

    def __post_init__(self) -> None:
        _check_range("--nproc", self.num_ranks, highest=_MAX_RANKS, remedy="Two show the most on a small machine.")
        _check_range("--steps", self.num_steps, highest=_MAX_STEPS, remedy="Eight are enough for a stable median.")
        _check_range("--seed", self.seed, lowest=0, highest=2**31 - 1, remedy="Any such number will do.")
        link_from_text(self.link)
        if strategy_named(self.strategy).crossing is not None:
            raise ConfigError(
                f"strategy {self.strategy!r} is for several nodes, and the demo runs on one.",
                where="undertow demo",
                remedy='Take "zero1" or "zero2".',
            )

    @property
    def ways(self) -> tuple[Way, ...]:
        """The compared variants, in this order."""
        is_sharded = strategy_named(self.strategy).gather is not None
        return (*_UNSHARDED, Way(self.strategy)) if is_sharded else _UNSHARDED

    @property
    def is_exact(self) -> bool:
        """True if all variants are bit-identical: a + b is b + a, but three ranks may be added in any order."""
        return self.num_ranks <= 2

    @property
    def emulated_link(self) -> Link:
        return link_from_text(self.link)


def _check_range(name: str, value: int, *, lowest: int = 1, highest: int, remedy: str) -> None:
    if not lowest <= value <= highest:
        raise ConfigError(f"{name} must be {lowest} to {highest}, got {value}.", where="undertow demo", remedy=remedy)


_FIXED_BUCKET_MB = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronized:
    """A model whose gradients are the mean over ranks once `after_backward` has returned.

    If `sharded` is not None, a ShardedOptimizer steps it: each rank has only its shards of the mean.
    """

    module: nn.Module  # called by the training loop
    after_backward: Callable[[], None]
    close: Callable[[], None]
    sharded: undertow.DistributedDataParallel | None = None
    measured: undertow.DistributedDataParallel | None = None  # has a profile after some steps


def _nothing() -> None:
    pass


def _per_parameter(model: nn.Module) -> Synchronized:
    """Reduces each parameter in a blocking loop, the obvious first version. The reference for all others."""
    num_ranks = dist.get_world_size()

    def reduce_each() -> None:
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= num_ranks

    return Synchronized(module=model, after_backward=reduce_each, close=_nothing)


def _attached(model: nn.Module, config: undertow.SyncConfig) -> Synchronized:
    sync = undertow.attach(model, config=config)
    return Synchronized(module=model, after_backward=_nothing, close=sync.close)


def _bucketed(model: nn.Module) -> Synchronized:
    return _attached(model, undertow.SyncConfig(overlap=False, bucket_cap_mb=_FIXED_BUCKET_MB, order="reverse"))


def _overlapped(model: nn.Module) -> Synchronized:
    return _attached(model, undertow.SyncConfig(bucket_cap_mb=_FIXED_BUCKET_MB, order="reverse"))


def _torch_ddp(model: nn.Module) -> Synchronized:
    return Synchronized(module=nn.parallel.DistributedDataParallel(model), after_backward=_nothing, close=_nothing)


def _undertow(model: nn.Module) -> Synchronized:
    wrapped = undertow.DistributedDataParallel(model)
    return Synchronized(module=wrapped, after_backward=_nothing, close=wrapped.close, measured=wrapped)


def _sharded(model: nn.Module, *, strategy: Literal["zero1", "zero2"]) -> Synchronized:
    # Every step: the times of the other variants are complete too.
    config = undertow.SyncConfig(strategy=strategy, record="full")
    wrapped = undertow.DistributedDataParallel(model, config=config)
    return Synchronized(module=wrapped, after_backward=_nothing, close=wrapped.close, sharded=wrapped, measured=wrapped)


BUILDERS: Mapping[Way, Callable[[nn.Module], Synchronized]] = {
    Way.PER_PARAMETER: _per_parameter,
    Way.BUCKETED: _bucketed,
    Way.OVERLAPPED: _overlapped,
    Way.TORCH_DDP: _torch_ddp,
    Way.UNDERTOW: _undertow,
    Way.ZERO1: partial(_sharded, strategy="zero1"),
    Way.ZERO2: partial(_sharded, strategy="zero2"),
}
