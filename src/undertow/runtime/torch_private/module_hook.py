"""Hooks on modules that do nothing on a copy of the module; those that cut compiled graphs are private to torch."""

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.compiler import is_exporting
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from undertow.runtime.torch_private import private


class ModuleHook:
    """Calls `then` as a hook of `module`. An export of the module traces nothing of it.

    A deep copy of the module has the hook too, but it does nothing there.
    """

    def __init__(self, module: nn.Module, then: Callable[..., object]) -> None:
        self._module = weakref.ref(module)
        self._then = then

    def __call__(self, called: nn.Module, *_arguments: Any) -> None:
        if not is_exporting() and called is self._module():
            self._then()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_do_nothing,)


def _do_nothing(*_arguments: Any) -> None:
    return None


def cut_graphs(module: nn.Module, size: Callable[[], int]) -> list[RemovableHandle]:
    """Makes torch.compile cut graphs in forwards of `module` at every `size()` bytes of parameters, as for torch's wrapper."""
    around: list[DistributedDataParallel | None] = []  # the previous value for each running forward

    @private.untraced
    def begin() -> None:
        around.append(DistributedDataParallel._active_ddp_module)
        num_bytes = size()
        if num_bytes:
            # With the only attribute that torch.compile reads.
            DistributedDataParallel._active_ddp_module = SimpleNamespace(bucket_bytes_cap=num_bytes)  # type: ignore[assignment]

    @private.untraced
    def end() -> None:
        if around:  # empty if an earlier hook has failed
            DistributedDataParallel._active_ddp_module = around.pop()

    return [
        module.register_forward_pre_hook(ModuleHook(module, begin)),
        module.register_forward_hook(ModuleHook(module, end), always_call=True),
    ]
