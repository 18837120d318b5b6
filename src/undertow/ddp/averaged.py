"""Finds modules, parameters and buffers that were registered on a wrapper, or replaced its module,
since it was made."""

import torch
from torch import nn

from undertow.errors import require
from undertow.torch_private import private, tables


def require_averaged(wrapper: nn.Module, wrapped: nn.Module, *, rank: int) -> None:
    """Raises ConfigError if a backward may reach something that was registered on the wrapper
    itself, not on the module that it has wrapped."""
    if not torch.is_grad_enabled():
        return
    module = tables.own_children(wrapper).get("module")
    where = f"DistributedDataParallel, rank {rank}"
    require(
        module is not None and private.unwrapped(module) is private.unwrapped(wrapped),
        f"model.module was {type(wrapped).__name__} when it was wrapped, and now is "
        f"{type(module).__name__}: gradients of the new module are not averaged.",
        where=where,
        remedy="Wrap the new module, after close() of this wrapper; or change parts inside "
        "of model.module.",
    )
    known = {id(param) for _, param in tables.named_parameters(wrapped)}
    trained = (
        name
        for name, param in tables.named_parameters(wrapper)
        if param.requires_grad and id(param) not in known
    )
    name = next(trained, next(iter(tables.own_buffers(wrapper)), None))
    require(
        name is None,
        f"{name!r} was registered on the wrapper, not on its module: it is not synchronized.",
        where=where,
        remedy="Register it on model.module, or on the module before it is wrapped.",
    )
