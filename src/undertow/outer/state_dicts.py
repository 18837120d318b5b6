"""Puts the global parameters into the state dicts of a module that trains as a replica.

A program that does not know of replicas writes `model.state_dict()` into a file, on one rank.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from undertow.torch_private import tables
from undertow.torch_private.module_hook import after_state_dicts

# Returns a copy of the global value of a parameter or a buffer; None if it has none.
GlobalCopy: TypeAlias = Callable[[nn.Module, str, Tensor], Tensor | None]


class StateDicts:
    """The state dicts of `module` and of its parts, until `close`.

    Values that other code would write to in place, as with `keep_vars=True`, stay the replica's
    own. Names of one tensor have one copy.
    """

    def __init__(self, module: nn.Module, copy: GlobalCopy) -> None:
        self._copy = copy
        self._is_off = False
        self._state: weakref.ref[Any] | None = None  # the state dict that is being made
        self._copies: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.close = after_state_dicts(module, self._replace)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Context in which state dicts have the replica's own tensors."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def _replace(self, part: nn.Module, state: MutableMapping[str, Any], prefix: str) -> None:
        """Called when a state dict has the tensors of `part` itself."""
        if self._is_off:
            return
        if self._state is None or self._state() is not state:
            self._state = _reference(state)
            self._copies = weakref.WeakValueDictionary()
        for key, tensor in tables.own_tensors(part):
            present = state.get(prefix + key)
            if tensor is None or present is None or present is tensor:
                continue
            copy = self._copies.get(id(tensor))
            if copy is None:
                copy = self._copy(part, key, tensor)
            if copy is not None:
                self._copies[id(tensor)] = state[prefix + key] = copy


def _reference(state: MutableMapping[str, Any]) -> weakref.ref[Any] | None:
    """Returns a reference to the state dict; None for a plain dict, which can have none."""
    try:
        return weakref.ref(state)
    except TypeError:
        return None
