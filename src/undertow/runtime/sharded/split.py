"""A parameter that lies in several buckets, each of which takes a piece of its gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undertow.plan import Slot
from undertow.runtime.sharded.placeholder import GradientPlaceholder


class Taken(NamedTuple):
    """The previous `.grad`: a placeholder and the gradient added to it, or a gradient alone."""

    held: GradientPlaceholder | None
    grad: Tensor | None
    is_live: bool = False  # the placeholder held an earlier part when it was taken; it may hold a new one later


class SplitParam:
    """Takes the whole gradient out of `.grad` for the first bucket and keeps it for the others; also a late gradient."""

    def __init__(self, param: Tensor, num_pieces: int) -> None:
        self._param = param
        self._num_pieces = num_pieces
        self._taken, self._num_to_take = Taken(None, None), 0
        self._late: Tensor | None = None
        self._num_to_catch = 0

    def begin_round(self) -> None:
        """Forgets gradients that were taken before."""
        self._taken, self._num_to_take = Taken(None, None), 0
        self._late, self._num_to_catch = None, 0

    def take(self) -> Taken:
        """Returns the same gradient for every bucket of one synchronization."""
        if self._num_to_take == 0:
            self._num_to_take = self._num_pieces
            self._taken = self._out_of_grad()
        self._num_to_take -= 1
        taken = self._taken
        if self._num_to_take == 0:
            self._taken = Taken(None, None)
        return taken

    def catch(self) -> Tensor | None:
        """Returns the same late gradient for every bucket of one synchronization."""
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
    """Returns a tensor that a bucket packs instead of a split parameter: of the piece's size, without memory for it."""
    return torch.empty(1, dtype=like.dtype, device=like.device).expand(slot.numel)
