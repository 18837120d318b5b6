"""torch's `_MixedPrecision`: forward and backward in a narrower dtype; parameters, gradients and optimizer in their own.

Parameters are cast when a forward begins, by an operation that autograd knows: its backward gives each gradient the dtype of its
parameter. After the forward modules have their parameters back. A module that computes again, in a checkpoint's backward, would
do so in another dtype, so it raises an error.
"""

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from undertow.errors import PhaseError, require
from undertow.runtime.model.module_params import sparse_params
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.module_hook import ModuleHook


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Runs a module's forward in `dtype`; None keeps the dtypes of its parameters."""

    dtype: torch.dtype | None
    ignored: frozenset[str]  # names of parameters that keep their dtype
    hooks: tuple[RemovableHandle, ...]  # raise if a forward runs again in a backward

    def call(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = self.dtype
        if dtype is None:
            return module(*inputs, **kwargs)
        narrow = {
            name: param.to(dtype)
            for name, param in module.named_parameters()
            if param.is_floating_point() and name not in self.ignored
        }
        return functional_call(module, narrow, *private.cast_floating(inputs, kwargs, dtype))

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


def mixed_precision_of(given: object, module: nn.Module, ignored: Collection[str]) -> MixedPrecision | None:
    """Applies the argument of torch's constructor to `module`, whose buffers are cast permanently, as torch does.

    Raises ConfigError if it is not a `_MixedPrecision`, and for layers with sparse gradients, which autograd cannot cast back.
    """
    if given is None:
        return None
    dtypes: list[Any] = [getattr(given, name, given) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")]
    require(
        all(dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point) for dtype in dtypes),
        f"mixed_precision has no dtypes: {given!r}.",
        where="DistributedDataParallel(...)",
        remedy="Pass torch's _MixedPrecision(param_dtype=torch.bfloat16), or use torch.autocast around the forward.",
    )
    dtype, _, buffer_dtype = dtypes
    sparse = set() if dtype is None else sparse_params(module)
    for name, param in module.named_parameters():
        require(
            id(param) not in sparse or param.dtype == dtype or name in ignored,
            f"mixed_precision casts parameter {name!r}, whose gradient is sparse, and autograd cannot cast that back.",
            where="DistributedDataParallel(mixed_precision=...)",
            remedy="Make the embedding with sparse=False, or use torch.autocast around the forward.",
        )
    for name, buffer in module.named_buffers():
        if buffer_dtype is not None and buffer.is_floating_point() and name not in ignored:
            buffer.data = buffer.to(buffer_dtype)
    hooks = [
        part.register_forward_pre_hook(ModuleHook(part, partial(_require_first_forward, weakref.ref(part))))
        for part in module.modules()
        if part._parameters and dtype is not None
    ]
    return MixedPrecision(dtype, frozenset(ignored), tuple(hooks))


def _require_first_forward(called: weakref.ref[nn.Module]) -> None:
    """Raises PhaseError if the module runs again in a backward, when its parameters are not cast any more."""
    if torch.compiler.is_compiling():  # checking would cut the graph; recomputation there is narrow as well
        return
    module = called()
    is_narrow = module is None or any(type(param) is Tensor for param in module._parameters.values())
    if private.graph_task_id() != -1 and not is_narrow:
        raise PhaseError(
            f"{type(module).__name__} computes again in a backward, where its parameters are not narrow any more.",
            where="DistributedDataParallel(mixed_precision=...), with activation checkpoints",
            remedy="Use torch.autocast around the forward instead of mixed_precision, or leave checkpoints out.",
        )
