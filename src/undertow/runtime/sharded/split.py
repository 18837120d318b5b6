"""A parameter that lies in several buckets, and its gradient, which all of them take a piece of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undertow.plan import Slot
from undertow.runtime.sharded.placeholder import GradientPlaceholder


class Taken(NamedTuple):
    """What `.grad` was: the placeholder that stood there, and what has been added to that, or a gradient."""

    held: GradientPlaceholder | None
    grad: Tensor | None
    is_live: bool = False  # the placeholder holds an earlier part; later it may hold a new one


class SplitParam:
    """The first bucket takes the whole gradient out of `.grad`, and keeps it for the others; so with one that comes late."""

    def __init__(self, param: Tensor, num_pieces: int) -> None:
        self._param = param
        self._num_pieces = num_pieces
        self._taken, self._num_to_take = Taken(None, None), 0
        self._late: Tensor | None = None
        self._num_to_catch = 0

    def begin_round(self) -> None:
        """Nothing has been taken."""
        self._taken, self._num_to_take = Taken(None, None), 0
        self._late, self._num_to_catch = None, 0

    def take(self) -> Taken:
        """The same for every bucket of one round."""
        if self._num_to_take == 0:
            self._num_to_take = self._num_pieces
            self._taken = self._out_of_grad()
        self._num_to_take -= 1
        taken = self._taken
        if self._num_to_take == 0:
            self._taken = Taken(None, None)
        return taken

    def catch(self) -> Tensor | None:
        """What has come since, the same for every bucket of one round."""
        if self._num_to_catch == 0:
            self._num_to_catch = self._num_pieces
            self._late, self._param.grad = self._param.grad, None
        self._num_to_catch -= 1
        late = self._late
        if self._num_to_catch == 0:
            self._late = None
        return late

    def _out_of_grad(self) -> Taken:
        grad, self._param.grad = self._param.grad, None
        if not isinstance(grad, GradientPlaceholder):
            return Taken(None, grad)
        added, grad.added = grad.added, None
        return Taken(grad, added, is_live=not grad.is_cleared)


def stand_in(slot: Slot, *, like: Tensor) -> Tensor:
    """What a bucket packs in place of a parameter in pieces: of the piece's size, and without memory of its own."""
    return torch.empty(1, dtype=like.dtype, device=like.device).expand(slot.numel)
