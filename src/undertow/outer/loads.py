"""Follows loads into a module: outer synchronization asks if they have changed anything."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from undertow.buckets.fingerprints import fingerprints
from undertow.torch_private.module_hook import before_loads

Values = list[int]  # the fingerprint of each parameter


class OuterLoads:
    """The loads into a module since its parameters were last followed.

    `present` returns the parameters that the module has now, by name.
    """

    def __init__(self, module: nn.Module, present: Callable[[], Mapping[str, Tensor]]) -> None:
        self.are_new = False  # since the last `follow`
        self._present = present
        self._before: Values | None = None  # when the first of them began
        self.close = before_loads(module, partial(_begins, weakref.ref(self)))

    @torch.no_grad()
    def begin(self) -> None:
        """Called before a load changes anything."""
        if not self.are_new:
            self._before = None
            with contextlib.suppress(RuntimeError):  # a rank is gone: it is told elsewhere
                self._before = self.values()
        self.are_new = True

    def follow(self) -> Values | None:
        """Returns the values from before the loads; None if they are not known."""
        before, self._before = self._before, None
        self.are_new = False
        return before

    def values(self) -> Values:
        """Returns the fingerprints of the parameters."""
        params = list(self._present().values())
        if not params:
            return []
        found: Values = fingerprints(params, device=params[0].device).tolist()
        return found


def _begins(weak: Callable[[], OuterLoads | None], _module: nn.Module) -> None:
    loads = weak()
    if loads is not None:
        loads.begin()
