"""Trains with Hugging Face Accelerate in Undertow's class."""

from collections.abc import Iterable, Sequence
from functools import partialmethod
from itertools import chain
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import undertow
from undertow import ShardedOptimizer, SyncConfig
from undertow.errors import require
from undertow.torch_private import private


def prepare(
    accelerator: Accelerator,
    *args: Any,
    config: SyncConfig | None = None,
    shard_optimizer: bool = False,
    whole: bool | None = None,
    stop_signals: Iterable[int] = (),
) -> Any:
    """Does what `accelerator.prepare(*args)` does, with models in Undertow's class; a collective
    call.

        model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader,
        scheduler, shard_optimizer=True)

    With `shard_optimizer=True`, `accelerator.clip_grad_norm_(model.parameters(), ...)` clips by the
    norm of all shards. A process that trains alone gets the result of `accelerator.prepare`.

    Args:
        accelerator: An Accelerator that distributes by DDP.
        args: As for `accelerator.prepare`.
        config: Settings of Undertow.
        shard_optimizer: True shards the optimizers among `args`; the schedulers among them follow.
            If one is sharded already, all stay as they are.
        whole: As for ShardedOptimizer.
        stop_signals: Signals, of the module `signal`, after which `accelerator.check_trigger()` is
            True on every rank, from the same step on. A process that trains alone ignores this.

    Returns:
        The prepared objects in the given order, or the only one.

    Raises:
        ConfigError: If Accelerate distributes differently. With `shard_optimizer=True`, unless
            there are one model and its optimizers, which can be sharded.
    """
    kind = accelerator.distributed_type
    require(
        kind in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU),
        f"Accelerate distributes by {kind}, and Undertow replaces DDP only.",
        where="undertow.integrations.accelerate.prepare",
        remedy="Choose multi-GPU or multi-CPU in `accelerate config`, or call accelerator.prepare.",
    )
    models = [item for item in args if isinstance(item, nn.Module)]
    optimizers = [item for item in args if isinstance(item, Optimizer)]
    require(
        not shard_optimizer or (len(models) == 1 and optimizers),
        f"shard_optimizer=True takes one model and its optimizers, got {len(models)} and "
        f"{len(optimizers)}.",
        where="undertow.integrations.accelerate.prepare",
        remedy="Give all of them in one call, or leave shard_optimizer=True out.",
    )
    items = [
        _wrapped(accelerator, item, config) if isinstance(item, nn.Module) else item
        for item in args
    ]
    signals = tuple(stop_signals)
    for item in items:
        model = private.uncompiled(item)  # Accelerate may call torch.compile
        if signals and isinstance(model, undertow.DistributedDataParallel):
            _stop_on_signal(accelerator, model, signals)
    # Accelerate leaves an object as it is that it has prepared before.
    is_sharded = any(
        isinstance(getattr(item, "optimizer", None), ShardedOptimizer) for item in optimizers
    )
    if shard_optimizer and kind != DistributedType.NO and not is_sharded:
        model = next(item for item in items if isinstance(item, nn.Module))
        schedulers = [item for item in items if isinstance(item, LRScheduler)]
        sharded = iter(shard(accelerator, optimizers, model, schedulers, whole=whole))
        items = [next(sharded) if isinstance(item, Optimizer) else item for item in items]
    others = [item for item in items if not isinstance(item, nn.Module)]
    # With two more, because Accelerate returns a single object without a tuple.
    prepared = iter(accelerator.prepare(*others, None, None))
    items = [item if isinstance(item, nn.Module) else next(prepared) for item in items]
    return items[0] if len(items) == 1 else tuple(items)


def _stop_on_signal(
    accelerator: Accelerator, model: undertow.DistributedDataParallel, signals: Sequence[int]
) -> None:
    undertow.stop_on_signal(model, signals)
    check = accelerator.check_trigger
    # The same answer on every rank: the usual check is a collective call.
    accelerator.check_trigger = lambda: model.stop_requested or check()


def _wrapped(accelerator: Accelerator, model: nn.Module, config: SyncConfig | None) -> Any:
    # Accelerate lists the module of a wrapper, and would list the wrapper too if it were prepared
    # again.
    if getattr(model, "module", None) in accelerator._models:
        return model
    init = partialmethod(undertow.DistributedDataParallel.__init__, config=config)
    wrapper = type("Configured", (undertow.DistributedDataParallel,), {"__init__": init})
    # Accelerate has no argument for the class. It looks torch's class up by its name.
    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", wrapper):
        return accelerator.prepare(model)


def shard(
    accelerator: Accelerator,
    optimizers: Sequence[Optimizer],
    model: nn.Module,
    schedulers: Iterable[Any],
    *,
    whole: bool | None,
) -> list[ShardedOptimizer]:
    """Returns the sharded optimizers, whose gradients `accelerator.clip_grad_norm_` then clips by
    the norm of all shards."""
    sharded = undertow.shard_optimizer(optimizers, model, schedulers=schedulers, whole=whole)
    clip = accelerator.clip_grad_norm_

    def clip_grad_norm_(
        parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Any:
        params = list(parameters)
        groups = chain.from_iterable(each.param_groups for each in sharded)
        mine = chain.from_iterable(group["params"] for group in groups)
        if _trained_ids(params) != _trained_ids(mine):
            # of another model; raises if gradients are sharded
            return clip(params, max_norm, norm_type)
        accelerator.unscale_gradients()
        return sharded[0].clip_grad_norm_(max_norm, norm_type)  # the norm of all of them

    accelerator.clip_grad_norm_ = clip_grad_norm_
    return sharded


def _trained_ids(params: Iterable[Tensor]) -> set[int]:
    return {id(param) for param in params if param.requires_grad}
