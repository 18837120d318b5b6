"""The memory of one bucket, and how gradients get into it.

flat       | gradients | padding | trailer |      one allocation, used again in every step
gradients  | gradients |
views        one per gradient, of its shape

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import repeat
from operator import attrgetter, is_
from sys import getrefcount
from typing import TypeAlias

import torch
from torch import Tensor

from undertow.device import device_of
from undertow.plan import Bucket
from undertow.torch_private import private

# Python's garbage collector runs over young objects after 700 net allocations, and every tensor
# visible to Python is one. Smaller batches keep a bucket of thousands of gradients from triggering
# it.
_MOST_AT_ONCE = 512

# References to an object in a list that no other code holds, as `is_referenced` counts them.
_REFERENCES_OF_OURS = sum(map(getrefcount, [object()]))

# Dtypes that numpy does not have, and those that hold the same values.
WIDER_IN_NUMPY = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

_grad_of = attrgetter("grad")

# Gradients to be copied, from a position on, and True if all of them are new tensors.
Copy: TypeAlias = tuple[int, Sequence[Tensor | None], bool]


class BucketMemory:
    """The memory of one bucket of a plan, with a view for each of `like`, tensors of the shapes and
    strides of its gradients.

    A sparse gradient has no place in a flat bucket: the memory of its bucket holds only a trailer.
    """

    def __init__(self, spec: Bucket, like: Sequence[Tensor]) -> None:
        self._spec = spec
        self._device = like[0].device if like else torch.device(spec.device)
        # Fixed now: parameters may be cast or moved later, and new memory must keep the layout of
        # the other ranks.
        self._forms = [(tensor.shape, strides_of_gradient(tensor)) for tensor in like]
        self._starts = [*(slot.start for slot in spec.slots), spec.numel]
        self._reallocate()
        self._row_shape = None if self._gaps else _row_shape(self.views)

    @property
    def gradients(self) -> Tensor:
        """The gradients one after another, and gaps of zeros before some of them. [numel], without
        padding and trailer.

        A new view each time: a view that is kept would count as other code's use of the memory.
        """
        return self.flat[: self._starts[-1]]

    def _reallocate(self) -> None:
        """Allocates new memory; code that holds the old one keeps its values."""
        dtype = getattr(torch, self._spec.dtype)
        self.flat = torch.empty(self._spec.storage_numel, dtype=dtype, device=self._device)
        # Padding stays zero. Gradients are written first by `pack`, under backward: pages that are
        # new to a process are slow.
        self.flat[self._starts[-1] :].zero_()
        self._gaps: list[Tensor] = []  # views between gradients
        for slot, start in zip(self._spec.slots, self._starts[1:], strict=True):
            if slot.stop < start:
                self._gaps.append(self.flat[slot.stop : start].zero_())
        # `.data` gives each view a separate version counter; plain views share one with their base.
        self.views = [view.data for view in self.views_of(self.flat)]
        trailer = self._spec.trailer
        self.trailer = self.flat[trailer.start : trailer.stop]
        # The same memory for numpy, which reads and writes a few elements faster than torch; None
        # on a device, and for bfloat16 and complex32.
        is_on_host = device_of(self._device).is_host and not self.flat.is_meta
        has_array = is_on_host and dtype not in WIDER_IN_NUMPY
        self.trailer_array = self.trailer.numpy() if has_array else None
        self._pointers = list(map(Tensor.data_ptr, self.views))
        self._count_uses = private.counter_of_uses(self.flat)
        self._num_uses = self._count_uses()

    def release(self) -> None:
        """Frees the memory, except the parts that other code holds. It is no longer used."""
        self.flat = self.trailer = torch.empty(0)
        self.trailer_array = None
        self.views = []
        self._gaps = []

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Returns views like `views` of `flat`, which has the same layout."""
        return [
            flat.as_strided(shape, strides, start)
            for (shape, strides), start in zip(self._forms, self._starts, strict=False)
        ]

    def zero_gaps(self) -> None:
        """Writes zeros between gradients. A format leaves NaN there after a block with NaN."""
        for gap in self._gaps:
            gap.zero_()

    def pack(
        self,
        params: Sequence[Tensor],
        not_arrived: Collection[int],
        *,
        later: list[Copy] | None = None,
    ) -> dict[int, Tensor | None]:
        """Moves every `.grad` into its view, leaving None.

        Returns the previous `.grad` by position, if it is None or the position is in `not_arrived`.
        If that gradient is the view itself, returns a copy, because the reduction overwrites it.
        With `later`, gradients are added to it, and copied by `copy_in`.
        """
        if torch.is_grad_enabled():  # not in a usual backward, and setting it takes time
            with torch.no_grad():
                return self.pack(params, not_arrived, later=later)
        if later is None and self._gaps:
            self.zero_gaps()
        # True if a view was given other memory, as casts do: `param.grad.data = ...`
        is_rebased = list(map(Tensor.data_ptr, self.views)) != self._pointers
        if not_arrived or is_rebased or self._is_referenced():
            return self._pack_any(params, not_arrived, is_rebased=is_rebased, later=later)
        # The usual case: `.grad` was cleared before backward, and every gradient is a new tensor.
        unused: list[int] = []
        for start in range(0, len(params), _MOST_AT_ONCE):
            some = params[start : start + _MOST_AT_ONCE]
            grads = list(map(_grad_of, some))
            has_none = any(map(is_, grads, repeat(None)))
            if has_none:
                unused += [start + place for place, grad in enumerate(grads) if grad is None]
            if later is None:
                self._copy(start, grads, are_new=not has_none)
            else:
                later.append((start, grads, not has_none))
            with private.as_plain_tensors():
                for param in some:
                    param.grad = None
        return dict.fromkeys(unused)

    def _pack_any(
        self,
        params: Sequence[Tensor],
        not_arrived: Collection[int],
        *,
        is_rebased: bool,
        later: list[Copy] | None,
    ) -> dict[int, Tensor | None]:
        grads = [param.grad for param in params]
        kept: dict[int, Tensor | None] = {}
        for position in unused_positions(grads, not_arrived):  # and no reference to a view is left
            kept[position] = grads[position]
            if grads[position] is self.views[position]:
                kept[position] = self.views[position].clone()
        for param in params:
            param.grad = None
        num_in_place = sum(map(is_, grads, self.views))
        if num_in_place == len(grads) and not is_rebased:
            return kept
        # Other code may still hold the last step's gradients, which must not change.
        if is_rebased or self._is_referenced(num_references=num_in_place):
            self._reallocate()
        if later is None:
            self._copy(0, grads, are_new=False)
        else:
            later.append((0, grads, False))
        return kept

    def copy_in(self, later: list[Copy]) -> None:
        """Copies the gradients that `pack` has left for later, maybe in another thread."""
        while later:
            start, grads, are_new = later.pop(0)
            self._copy(start, grads, are_new=are_new)
            del grads  # frees them before the next copy
        self.zero_gaps()

    def _copy(self, start: int, grads: Sequence[Tensor | None], *, are_new: bool) -> None:
        """Copies gradients, from position `start` on, into their views.

        `are_new` is False if some may be None, or in place already.
        """
        stop = start + len(grads)
        try:
            if not are_new:
                self._copy_some(start, grads)
            elif self._row_shape is None:
                private.copy_each(self.views[start:stop], grads)  # type: ignore[arg-type]
            else:
                # Rows of one shape are adjacent: one concatenation costs a third of as many small
                # copies.
                target = self.flat[self._starts[start] : self._starts[stop]]
                torch.cat(grads, out=target.view(-1, *self._row_shape))  # type: ignore[arg-type]
        except RuntimeError:
            # A layer may make sparse gradients without declaring it. Checked only here, because it
            # costs nothing here.
            is_sparse = [grad is not None and grad.layout is not torch.strided for grad in grads]
            if not any(is_sparse):
                raise
            self._copy_some(start, [None if grad is None else grad.to_dense() for grad in grads])

    def _copy_some(self, start: int, grads: Sequence[Tensor | None]) -> None:
        """Copies the gradients that are not in place already, and writes zeros for None."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        absent: list[Tensor] = []
        views = self.views[start : start + len(grads)]
        for view, grad in zip(views, grads, strict=True):
            if grad is None:
                absent.append(view)
            elif grad is not view:
                targets.append(view)
                sources.append(grad)
        if targets:
            private.copy_each(targets, sources)
        for view in absent:
            view.zero_()

    def _is_referenced(self, *, num_references: int = 0) -> bool:
        """Returns True if other code refers to a view, so that writing here would change the values
        it sees.

        A view bound as `.grad` counts. `num_references` is the number of references to views that
        the caller holds.
        """
        expected = _REFERENCES_OF_OURS * len(self.views) + num_references
        return sum(map(getrefcount, self.views)) > expected or self._count_uses() > self._num_uses


def unused_positions(grads: Sequence[Tensor | None], not_arrived: Collection[int]) -> Sequence[int]:
    """Returns the positions whose gradient is None, or that are in `not_arrived`, in order."""
    absent = [position for position, grad in enumerate(grads) if grad is None]
    return sorted({*not_arrived, *absent})


def strides_of_gradient(param: Tensor) -> tuple[int, ...]:
    """Returns the strides that autograd and optimizers expect of a gradient.

    The parameter's, such as channels-last.
    """
    if param.is_contiguous():
        return param.stride()
    # A tensor without gaps gives its strides to a new one like it.
    return torch.empty_like(param, device="meta").stride()


def _row_shape(tensors: Sequence[Tensor]) -> torch.Size | None:
    """Returns the shape of a row if all of several tensors have the same."""
    if len(tensors) < 2 or not all(each.dim() > 0 and each.is_contiguous() for each in tensors):
        return None
    row_shape = tensors[0].shape[1:]
    is_same = all(tensor.shape[1:] == row_shape for tensor in tensors)
    return row_shape if is_same and row_shape.numel() > 0 else None
