"""Hooks on modules that do nothing on a copy of the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ModuleHook:
    """Calls `then` as a hook of `module`. A deep copy of the module has the hook too, but it does nothing there."""

    def __init__(self, module: nn.Module, then: Callable[[], None]) -> None:
        self._module = weakref.ref(module)
        self._then = then

    def __call__(self, called: nn.Module, *_arguments: Any) -> None:
        if called is self._module():
            self._then()

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


class OutputHook(ModuleHook):
    """A hook after the forward, which calls `then` with the outputs."""

    def __init__(self, module: nn.Module, then: Callable[[object], None]) -> None:
        super().__init__(module, _do_nothing)
        self._then_with = then

    def __call__(self, called: nn.Module, *arguments: Any) -> None:
        if called is self._module():
            self._then_with(arguments[-1])


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_arguments: Any) -> None:
    return None
