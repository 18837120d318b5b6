"""torch's `_MixedPrecision`: forward and backward in a narrower dtype; parameters, gradients and optimizer in their own.

Parameters are cast when a forward begins, by an operation that autograd knows: its backward gives each gradient the dtype of its
parameter. After the forward modules have their parameters back. A module that computes again, in a checkpoint's backward, would
do so in another dtype, so it raises an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from undertow.errors import ConfigError, PhaseError
from undertow.runtime.model.module_params import sparse_params
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.module_hook import ModuleHook

_FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Dtypes to cast to; None keeps the tensor's dtype."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    ignored: frozenset[str] = frozenset()  # names of parameters and buffers that keep their dtype
    hooks: list[RemovableHandle] = field(default_factory=list, compare=False)

    def cast_buffers(self, module: nn.Module) -> None:
        """Casts buffers permanently, as torch does."""
        for name, buffer in module.named_buffers():
            if self.buffer_dtype is not None and buffer.is_floating_point() and name not in self.ignored:
                buffer.data = buffer.to(self.buffer_dtype)

    def refuse_sparse_gradients(self, module: nn.Module) -> None:
        """Raises ConfigError for layers with sparse gradients, which autograd cannot cast back to the parameter's dtype."""
        sparse = sparse_params(module) if self.param_dtype is not None else set()
        for name, param in module.named_parameters():
            if id(param) in sparse and param.dtype != self.param_dtype and name not in self.ignored:
                raise ConfigError(
                    f"mixed_precision casts parameter {name!r}, whose gradient is sparse, and autograd cannot cast that back.",
                    where="DistributedDataParallel(mixed_precision=...)",
                    remedy="Make the embedding with sparse=False, or use torch.autocast around the forward.",
                )

    def refuse_recomputation(self, module: nn.Module) -> None:
        """Makes modules raise if their forward runs again in a backward, until `close`."""
        parts = [part for part in module.modules() if part._parameters] if self.param_dtype is not None else []
        for part in parts:
            require = partial(_require_first_forward, weakref.ref(part))
            self.hooks.append(part.register_forward_pre_hook(ModuleHook(part, require)))

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def call(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module's forward in `param_dtype`."""
        dtype = self.param_dtype
        if dtype is None:
            return module(*inputs, **kwargs)
        narrow = {
            name: param.to(dtype)
            for name, param in module.named_parameters()
            if param.is_floating_point() and name not in self.ignored
        }
        return functional_call(module, narrow, *private.cast_floating(inputs, kwargs, dtype))


def mixed_precision_of(given: object, module: nn.Module, ignored: Collection[str]) -> MixedPrecision | None:
    """Applies the argument of torch's constructor to `module`; raises ConfigError if it is not a `_MixedPrecision`."""
    if given is None:
        return None
    dtypes: dict[str, Any] = {name: getattr(given, name, given) for name in _FIELDS}
    if not all(dtype is None or _is_floating(dtype) for dtype in dtypes.values()):
        raise ConfigError(
            f"mixed_precision has no dtypes: {given!r}.",
            where="DistributedDataParallel(...)",
            remedy="Pass torch's _MixedPrecision(param_dtype=torch.bfloat16), or use torch.autocast around the forward.",
        )
    made = MixedPrecision(**dtypes, ignored=frozenset(ignored))
    made.refuse_sparse_gradients(module)
    made.cast_buffers(module)
    made.refuse_recomputation(module)
    return made


def _require_first_forward(called: weakref.ref[nn.Module]) -> None:
    if torch.compiler.is_compiling():  # checking would cut the graph; recomputation there is narrow as well
        return
    module = called()
    is_narrow = module is None or any(type(param) is Tensor for param in module._parameters.values())
    if private.graph_task_id() != -1 and not is_narrow:
        raise PhaseError(
            f"{type(module).__name__} computes again in a backward, where its parameters are not narrow any more.",
            where="DistributedDataParallel(mixed_precision=...), with activation checkpoints",
            remedy="Use torch.autocast around the forward in place of mixed_precision, or leave checkpoints out.",
        )


def _is_floating(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
