"""The memory of a bucket: gradients in one flat tensor, and the copies into it.

storage.flat        | gradients | padding | trailer |      one allocation, reused for every iteration
storage.gradients   | gradients |
storage.views         one per gradient, of its shape
"""

from collections.abc import Sequence
from itertools import accumulate
from sys import getrefcount

import torch
from torch import Tensor

from undertow.plan import Bucket, ParamSpec
from undertow.runtime.torch_private import private

# A view that no other code holds has two references: the list of views, and the argument of getrefcount.
_REFERENCES_OF_OURS = 2


class BucketStorage:
    """The memory of one bucket of a plan, with a view for each of `like`, tensors of the shapes and strides of its gradients."""

    def __init__(self, layout: Bucket, like: Sequence[Tensor]) -> None:
        self._layout, self._device = layout, like[0].device if like else torch.device(layout.device)
        # Fixed now: parameters may be cast or moved later, and new memory must keep the layout of the other ranks.
        self._shapes, self._strides = [tensor.shape for tensor in like], list(map(strides_of_gradient, like))
        self._starts = [0, *accumulate(tensor.numel() for tensor in like)]
        self.reallocate()
        self._row_shape = _row_shape(self.views)

    @property
    def gradients(self) -> Tensor:
        """The gradients one after another, [numel], without padding and trailer."""
        return self.flat[: self._starts[-1]]

    def fill(self, first: int, sources: list[Tensor]) -> None:
        """Copies `sources` into the views from position `first` on, in one launch."""
        last = first + len(sources)
        if self._row_shape is None:
            private.copy_each(self.views[first:last], sources)
        else:
            # Rows of one shape are adjacent: one concatenation costs a third of as many small copies.
            torch.cat(sources, out=self.flat[self._starts[first] : self._starts[last]].view(-1, *self._row_shape))

    def reallocate(self) -> None:
        """Allocates new memory; code that holds the old one keeps its values."""
        self.flat = torch.empty(self._layout.storage_numel, dtype=getattr(torch, self._layout.dtype), device=self._device)
        # Padding stays zero. Gradients are written first by `pack`, under backward: pages that are new to a process are slow.
        self.flat[self._starts[-1] :].zero_()
        # `.data` gives each view a separate version counter; plain views share one with their base.
        self.views = [view.data for view in self.views_of(self.flat)]
        trailer = self._layout.trailer
        # The trailer, its part without the times, and the times.
        parts = ((trailer.start, trailer.stop), (trailer.start, trailer.busy.start), (trailer.busy.start, trailer.busy.stop))
        self.trailer = [self.flat[start:stop] for start, stop in parts]
        self._pointers = list(map(Tensor.data_ptr, self.views))
        self._num_sharing = private.storage_use_count(self.flat)

    def release(self) -> None:
        """Frees the memory, except what other code holds. It is used no more."""
        self.flat, self.views, self.trailer = torch.empty(0), [], []

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Returns views like `views` of `flat`, which has the same layout."""
        return list(map(flat.as_strided, self._shapes, self._strides, self._starts))

    def is_view_referenced(self, *, num_references: int = 0) -> bool:
        """Returns True if other code refers to a view, so that writing here would change the values it sees.

        A view bound as `.grad` counts. `num_references` is the number of references to views that the caller holds.
        """
        expected = _REFERENCES_OF_OURS * len(self.views) + num_references
        return sum(map(getrefcount, self.views)) > expected or private.storage_use_count(self.flat) > self._num_sharing

    def is_rebased(self) -> bool:
        """Returns True if a view was given other memory (`param.grad.data = ...`, as casts do) and is not a view any more."""
        return list(map(Tensor.data_ptr, self.views)) != self._pointers


def spec_of(name: str, tensor: Tensor, *, is_sparse: bool = False) -> ParamSpec:
    """Returns the planner's description of `tensor`."""
    dtype = private.gradient_dtype(tensor)
    return ParamSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        device=str(tensor.device),
        is_sparse=is_sparse,
        own_dtype=None if dtype == tensor.dtype else str(tensor.dtype).removeprefix("torch."),
    )


def strides_of_gradient(param: Tensor) -> tuple[int, ...]:
    """Returns the strides that autograd and optimizers expect of a gradient: the parameter's, such as channels-last."""
    # A tensor without gaps gives its strides to a new one like it.
    return param.stride() if param.is_contiguous() else torch.empty_like(param, device="meta").stride()


def _row_shape(tensors: Sequence[Tensor]) -> torch.Size | None:
    """Returns the shape of a row if all of several tensors have the same."""
    shapes = {tensor.shape[1:] for tensor in tensors if tensor.dim() > 0}
    has_rows = all(tensor.dim() > 0 and tensor.is_contiguous() for tensor in tensors)
    row_shape = shapes.pop() if len(shapes) == 1 and len(tensors) > 1 and has_rows else None
    return row_shape if row_shape is not None and row_shape.numel() > 0 else None
