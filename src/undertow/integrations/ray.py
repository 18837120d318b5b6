"""Trains with Ray Train in Undertow's class."""

from typing import Any

import ray.train.torch
import torch.distributed as dist
from torch import nn

from undertow.config import SyncConfig
from undertow.ddp.wrapper import DistributedDataParallel
from undertow.errors import require


def prepare_model(
    model: nn.Module,
    *,
    config: SyncConfig | None = None,
    move_to_device: bool = True,
    **arguments: Any,
) -> DistributedDataParallel:
    """Moves `model` to this worker's device and wraps it; replaces `ray.train.torch.prepare_model`.

        from undertow.integrations.ray import prepare_model

        def train_loop(settings):
            model = prepare_model(Net(), config=undertow.SyncConfig(strategy="zero1"))
            optimizer = undertow.ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)

    A collective call. The model is wrapped even if the worker is alone.

    Args:
        model: The model.
        config: Undertow's settings.
        move_to_device: False leaves the model on the device that it is on.
        **arguments: Further arguments of `undertow.DistributedDataParallel`.

    Raises:
        ConfigError: If this process is not a worker of Ray Train.
    """
    require(
        dist.is_initialized(),  # Ray Train makes the process group before it calls the function
        "this process is not a worker of Ray Train.",
        where="undertow.integrations.ray.prepare_model",
        remedy="Call it in the function that you give to ray.train.torch.TorchTrainer, with "
        "num_workers of 1 or more.",
    )
    model = ray.train.torch.prepare_model(
        model, move_to_device=move_to_device, parallel_strategy=None
    )
    return DistributedDataParallel(model, config=config, **arguments)
