"""Trains with Hugging Face Accelerate in Undertow's class."""

from collections.abc import Iterable, Sequence
from functools import partialmethod
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
from undertow.integrations.versions import require_version

require_version("accelerate", "1.0")


def prepare(
    accelerator: Accelerator,
    *args: Any,
    config: SyncConfig | None = None,
    shard_optimizer: bool = False,
    elementwise: bool = False,
    device_placement: Sequence[bool | None] | None = None,
) -> Any:
    """Does what `accelerator.prepare(*args)` does, with models in Undertow's class; a collective call.

        model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler, shard_optimizer=True)

    With `shard_optimizer=True`, `accelerator.clip_grad_norm_(model.parameters(), ...)` clips by the norm of all shards. A
    process that trains alone gets what `accelerator.prepare` returns.

    Args:
        accelerator: An Accelerator that distributes by DDP.
        args: As for `accelerator.prepare`.
        config: Settings of Undertow.
        shard_optimizer: True shards the optimizer among `args`; the schedulers among them follow. An optimizer that is
            sharded already stays as it is.
        elementwise: As for ShardedOptimizer.
        device_placement: As for `accelerator.prepare`.

    Returns:
        The prepared objects in the given order, or the only one.

    Raises:
        ConfigError: If Accelerate distributes differently. With `shard_optimizer=True`, unless there are one model and one
            optimizer, which can be sharded.
    """
    kind = accelerator.distributed_type
    require(
        kind in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU),
        f"Accelerate distributes by {kind}, and Undertow replaces DDP only.",
        where="undertow.integrations.accelerate.prepare",
        remedy="Choose multi-GPU or multi-CPU in `accelerate config`, or call accelerator.prepare.",
    )
    models, optimizers, schedulers = (
        [place for place, item in enumerate(args) if isinstance(item, cls)] for cls in (nn.Module, Optimizer, LRScheduler)
    )
    require(
        not shard_optimizer or len(models) == len(optimizers) == 1,
        f"shard_optimizer=True takes one model and one optimizer, got {len(models)} and {len(optimizers)}.",
        where="undertow.integrations.accelerate.prepare",
        remedy="Give both in one call, or leave shard_optimizer=True out.",
    )
    places = [None] * len(args) if device_placement is None else list(device_placement)
    require(
        len(places) == len(args),
        f"device_placement takes one value for each of {len(args)} objects, got {len(places)}.",
        where="undertow.integrations.accelerate.prepare",
        remedy="Give as many, or leave device_placement out.",
    )
    items = _with_prepared_models(accelerator, args, places, config)
    if shard_optimizer and kind != DistributedType.NO:
        plain, model = items[optimizers[0]], items[models[0]]
        # Accelerate leaves an object as it is that it has prepared before.
        if not isinstance(getattr(plain, "optimizer", None), ShardedOptimizer):
            following = [items[place] for place in schedulers]
            items[optimizers[0]] = shard(accelerator, plain, model, following, elementwise=elementwise)
    others = [place for place, item in enumerate(items) if not isinstance(item, nn.Module)]
    on = [places[place] for place in others]
    prepared = accelerator.prepare(*[items[place] for place in others], device_placement=on) if others else ()
    for place, item in zip(others, prepared if len(others) != 1 else (prepared,), strict=True):
        items[place] = item
    return items[0] if len(items) == 1 else tuple(items)


def _with_prepared_models(
    accelerator: Accelerator, args: Sequence[Any], places: Sequence[bool | None], config: SyncConfig | None
) -> list[Any]:
    """Returns the objects, the models among them in Undertow's class."""
    wrapper = type(
        "Configured",
        (undertow.DistributedDataParallel,),
        {"__init__": partialmethod(undertow.DistributedDataParallel.__init__, config=config)},
    )
    # Accelerate has no argument for the class. It looks torch's class up by its name.
    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", wrapper):
        return [
            # Accelerate lists the module of a wrapper, and would list the wrapper too if it were prepared again.
            item
            if not isinstance(item, nn.Module) or getattr(item, "module", None) in accelerator._models
            else accelerator.prepare(item, device_placement=[on])
            for item, on in zip(args, places, strict=True)
        ]


def shard(
    accelerator: Accelerator, optimizer: Optimizer, model: nn.Module, schedulers: Iterable[Any], *, elementwise: bool
) -> ShardedOptimizer:
    """Returns the sharded optimizer, whose gradients `accelerator.clip_grad_norm_` then clips by the norm of all shards."""
    sharded = undertow.shard_optimizer(optimizer, model, schedulers=schedulers, elementwise=elementwise)
    clip = accelerator.clip_grad_norm_

    def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Any:
        params, mine = list(parameters), [param for group in sharded.param_groups for param in group["params"]]
        given, sharded_here = ({id(param) for param in some if param.requires_grad} for some in (params, mine))
        if given != sharded_here:
            return clip(params, max_norm, norm_type)  # of another model; raises if gradients are sharded
        accelerator.unscale_gradients()
        return sharded.clip_grad_norm_(max_norm, norm_type)

    accelerator.clip_grad_norm_ = clip_grad_norm_
    return sharded
