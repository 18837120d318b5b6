"""Hooks on modules that do nothing on a copy of the module."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class ModuleHook:
    """Calls `then` as a hook of `module`. A deep copy of the module has the hook too, but it does nothing there."""

    def __init__(self, module: nn.Module, then: Callable[..., object]) -> None:
        self._module = weakref.ref(module)
        self._then = then

    def __call__(self, called: nn.Module, *_arguments: Any) -> None:
        if called is self._module():
            self._then()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_do_nothing,)


class OutputHook(ModuleHook):
    """A hook after the forward, which calls `then` with the outputs."""

    def __call__(self, called: nn.Module, *arguments: Any) -> None:
        if called is self._module():
            self._then(arguments[-1])


def _do_nothing(*_arguments: Any) -> None:
    return None
