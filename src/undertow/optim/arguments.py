"""Checks the arguments of a sharded optimizer, and describes those that must match on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from undertow.errors import ConfigError
from undertow.sync import GradientSync

ParamGroups = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


def require_kind_of_state_dict(kind: object) -> None:
    if kind not in ("full", "sharded"):
        raise ConfigError(
            f'state_dict must be "full" or "sharded", got {kind!r}.',
            where="ShardedOptimizer",
            remedy='Leave it out, or write state_dict="sharded" to save by torch.distributed.checkpoint.',
        )


def require_one_group_of_ranks(sync: GradientSync, params: ParamGroups | None) -> None:
    if sync.experts and params is None:
        raise ConfigError(
            "this model has experts, whose parameters and optimizer state are sharded over other ranks than the dense ones.",
            where="ShardedOptimizer",
            remedy="Make one for the model with params=[param for _, param in sync.named_parameters()], its dense ones, and "
            "one for each of sync.experts.",
        )


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def described(cls: type[Any], param_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the class and the parameter groups of an optimizer, which must be the same on every rank."""
    groups = [
        {"parameters": len(group["params"]), **{name: repr(value) for name, value in hyper_parameters(group).items()}}
        for group in param_groups
    ]
    return {"optimizer": f"{cls.__module__}.{cls.__qualname__}", "parameter groups": groups}
