"""Casts to a narrower dtype for the wire, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from undertow.runtime.comm.handles import Handle


def wire_dtype_named(name: str | None) -> torch.dtype | None:
    """Returns the dtype of SyncConfig.wire_dtype."""
    return None if name is None else getattr(torch, name)


def travels_narrower(dtype: torch.dtype, wire: torch.dtype | None) -> bool:
    """Returns True if values of `dtype` are cast for the wire: real numbers with more bytes than `wire`."""
    return wire is not None and dtype.is_floating_point and dtype.itemsize > wire.itemsize


def cast_for_wire(tensor: Tensor, wire: torch.dtype | None) -> Tensor:
    """Returns `tensor`, or a copy of it in `wire` if that is narrower."""
    return tensor.to(wire) if travels_narrower(tensor.dtype, wire) and not tensor.is_sparse else tensor


class CastBack:
    """A reduction of a narrower copy; `wait` writes the result back to the original."""

    def __init__(self, handle: Handle, narrow: Tensor, *, into: Tensor) -> None:
        self._handle = handle
        self._narrow = narrow
        self._into = into

    @torch.no_grad()
    def wait(self) -> None:
        self._handle.wait()
        self._into.copy_(self._narrow)

    def is_completed(self) -> bool:
        return self._handle.is_completed()

    def block_stream(self) -> None:
        self._handle.block_stream()

    def on_done(self, callback: Callable[[object], None]) -> None:
        self._handle.on_done(callback)
