"""Hooks on modules that do nothing on a copy of the module.

Those that cut compiled graphs are private to torch.
"""

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.compiler import is_exporting
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from undertow.torch_private import private
from undertow.torch_private.tables import named_modules


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


class LoadHook(ModuleHook):
    """A hook before `load_state_dict`, which calls `then` with the module.

    A pickle of the module holds a Python function instead, so it can be read without Undertow.
    """

    def __call__(self, called: nn.Module, *_arguments: Any) -> None:
        if called is self._module():
            self._then(called)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (str.format, "")  # takes anything and does nothing


class StateDictHook(ModuleHook):
    """A hook after `state_dict`, which calls `then` with the module, the state dict and the prefix
    of its names."""

    def __call__(self, called: nn.Module, *arguments: Any) -> None:
        if called is self._module():
            state, prefix, *_ = arguments
            self._then(called, state, prefix)


def after_state_dicts(module: nn.Module, then: Callable[..., object]) -> Callable[[], None]:
    """Calls `then` for each part of a module whose tensors a state dict has got, scripts excepted;
    returns a function that ends this."""
    hooks = contextlib.ExitStack()
    for _, part in named_modules(module):
        if not private.is_script(part):
            hooks.callback(part._register_state_dict_hook(StateDictHook(part, then)).remove)  # type: ignore[no-untyped-call]
    return hooks.close


def before_loads(module: nn.Module, then: Callable[[nn.Module], object]) -> Callable[[], None]:
    """Calls `then` before a load into the module or a part of it, scripts excepted; returns a
    function that ends this.

    Parts that are added later count too.
    """
    hooks, watched = contextlib.ExitStack(), weakref.WeakSet[nn.Module]()

    def watch(whole: nn.Module) -> None:
        for _, part in named_modules(whole):
            if part not in watched and not private.is_script(part):
                watched.add(part)
                handle = part.register_load_state_dict_pre_hook(LoadHook(part, then))  # type: ignore[no-untyped-call]
                hooks.callback(handle.remove)

    def is_added(parent: nn.Module, _name: str, part: nn.Module | None) -> None:
        if part is not None and parent in watched:
            watch(part)

    watch(module)
    hooks.callback(register_module_module_registration_hook(is_added).remove)
    return hooks.close


def _do_nothing(*_arguments: Any) -> None:
    return None


def cut_graphs(module: nn.Module, size: Callable[[], int]) -> list[RemovableHandle]:
    """Makes torch.compile cut graphs in forwards of `module` at every `size()` bytes of parameters,
    as for torch's wrapper."""
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
