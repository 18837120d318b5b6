"""The requirements of a sharded optimizer on its class, its model and its parameters."""

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from undertow.engine.progress import params_of
from undertow.errors import PhaseError, WrongType, listed, require
from undertow.mesh.local_tensors import is_whole
from undertow.sync.gradient_sync import GradientSync
from undertow.sync.zeroing import ZeroesWithoutReading

TARGET = (
    "Wrap the model first, then write ShardedOptimizer(torch.optim.AdamW, model, lr=...). "
    "Parameters or groups come third: ShardedOptimizer(torch.optim.AdamW, model, groups, lr=...)."
)

ParamGroups = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


def require_arguments(cls: object, sync: GradientSync, params: ParamGroups | None) -> None:
    """Raises WrongType if `cls` is not a class of plain optimizers, and ConfigError if a model with
    experts comes without `params`."""
    require(
        isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and not issubclass(cls, ZeroesWithoutReading),  # a ShardedOptimizer
        f"cls must be a class of optimizers, got {_shown(cls)}.",
        where="ShardedOptimizer",
        remedy="Pass the class, such as torch.optim.AdamW, and its settings by name. An optimizer "
        "that exists is sharded by undertow.shard_optimizer(optimizer, model).",
        error=WrongType,
    )
    require(
        not isinstance(params, Real),
        f"params must be parameters or groups of them, got {type(params).__name__}.",
        where="ShardedOptimizer",
        remedy="Give settings by name: ShardedOptimizer(torch.optim.AdamW, model, lr=...).",
        error=WrongType,
    )
    require(
        not sync.experts or params is not None,
        "this model has experts, whose parameters and optimizer state are sharded over other "
        "ranks than the dense ones.",
        where="ShardedOptimizer",
        remedy="Make one for the model with params=[param for _, param in "
        "sync.named_parameters()], its dense ones, and one for each of sync.experts.",
    )


def _shown(cls: object) -> str:
    """Returns a class as it is, and of anything else the type: an optimizer has many lines."""
    return repr(cls) if isinstance(cls, type) else f"an instance of {type(cls).__name__}"


def require_whole_on_ranks(optimizer: torch.optim.Optimizer, sync: GradientSync) -> None:
    """Raises ConfigError if a parameter is cut over another axis of a mesh: no rank has all of
    it."""
    for name, param in sync.named_parameters():
        require(
            is_whole(param) or all(param is not each for each in params_of(optimizer)),
            f"{type(optimizer).__name__} updates whole parameters, and each rank has a part of "
            f"{name!r} only, by tensor parallelism.",
            where="ShardedOptimizer",
            remedy="Use an optimizer whose updates are of single elements, such as AdamW, or this "
            "one without sharding.",
        )


def require_params_of_the_model(optimizer: torch.optim.Optimizer, sync: GradientSync) -> None:
    """Raises ConfigError if `sync` does not synchronize all parameters of the optimizer."""
    known = {id(param) for _, param in sync.named_parameters()}
    for number, param in enumerate(params_of(optimizer)):
        require(
            id(param) in known,
            f"parameter {number} of the optimizer, of shape {tuple(param.shape)}, is not "
            "synchronized.",
            where="ShardedOptimizer",
            remedy="Give it only parameters of the wrapped module that `ignore` does not name.",
        )


def require_replacements(optimizer: torch.optim.Optimizer, sync: GradientSync) -> None:
    """Raises PhaseError if members of the groups have left the model, and others are in none.

    This happens after a layer was replaced, and after `load_state_dict(assign=True)`.
    """
    own = set(map(id, params_of(optimizer)))
    named_params = sync.named_parameters()
    if own <= {id(param) for _, param in named_params}:
        return
    left_out = [
        repr(name) for name, param in named_params if param.requires_grad and id(param) not in own
    ]
    require(
        not left_out,
        "this optimizer updates parameters that the model no longer has, and not their "
        "replacements.",
        where=f"ShardedOptimizer, parameter {listed(left_out, most=1)}",
        remedy="Make the optimizer after the change.",
        error=PhaseError,
    )
