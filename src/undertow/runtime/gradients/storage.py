"""Buckets of gradients: their storage, and the copies into and out of it.

bucket.storage        | gradients | padding | trailer |      one allocation, reused for every iteration
bucket.bucket_tensor  | gradients |
bucket.views            one per gradient, of its shape
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from sys import getrefcount

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.errors import ConfigError, PhaseError
from undertow.plan import Bucket, ParamSpec
from undertow.runtime.comm.handles import WorkHandle, all_reduce_async
from undertow.runtime.torch_private import private

# A view that no other code holds has two references: the list of views, and the argument of getrefcount.
_REFERENCES_OF_OURS = 2


class GradientBucket:
    """Gradients packed into one flat tensor, to be reduced together.

    To reduce a bucket by hand:

        bucket.prepare()
        handle = bucket.reduce_async()
        handle.wait()
        bucket.copy_back()

    - `bucket_index`: number of the bucket, for errors.
    - `size_in_bytes`: capacity; it must be large enough for the gradients.
    - `gradients`: gradient tensors, or tensors that require grad, of which it takes `.grad`. All have one dtype and device.
    - `layout`: set by the runtime for a bucket of a plan.

    Raises ConfigError if the arguments do not fit together.
    """

    def __init__(
        self, bucket_index: int, size_in_bytes: int, gradients: Sequence[Tensor], *, layout: Bucket | None = None
    ) -> None:
        self.bucket_index = bucket_index
        self.size_in_bytes = size_in_bytes
        self.gradients = tuple(gradients)
        self.reduction_handle: WorkHandle | None = None
        self._layout = layout
        self._is_prepared = self.is_copied_back = False
        self._check()
        # Fixed now, because parameters may be cast or moved later.
        self._dtype = self.gradients[0].dtype if layout is None else getattr(torch, layout.dtype)
        self._device = self.gradients[0].device if self.gradients or layout is None else torch.device(layout.device)
        # Fixed now too: renewed storage must keep the layout of the other ranks.
        self._strides = [] if layout is None else [strides_of_gradient(gradient) for gradient in self.gradients]
        self._starts = [0, *accumulate(gradient.numel() for gradient in self.gradients)]
        self.storage = torch.empty(0)
        self.views: list[Tensor] = []
        self._pointers: list[int] = []
        self._num_sharing = 0
        self.renew()
        self._row_shape = _row_shape(self.views)

    @property
    def bucket_tensor(self) -> Tensor:
        """The gradients one after another, [numel], without padding and trailer."""
        return self.storage[: self._starts[-1]]

    @property
    def offsets(self) -> list[int]:
        """Start of each gradient in `bucket_tensor`, in elements."""
        return self._starts[:-1]

    @property
    def is_reduced(self) -> bool:
        """True if the reduction of the prepared gradients is complete."""
        return self.reduction_handle is not None and self.reduction_handle.is_completed()

    def prepare(self) -> None:
        """Copies the gradients into the bucket.

        Raises ConfigError, with its name, if a gradient is missing, and PhaseError while the bucket is in flight.
        """
        sources = self.require_ready()
        pairs = [(view, source) for view, source in zip(self.views, sources, strict=True) if view is not source]
        if pairs:
            private.copy_each([view for view, _ in pairs], [source for _, source in pairs])
        self.reduction_handle = None
        self._is_prepared, self.is_copied_back = True, False

    def require_ready(self) -> list[Tensor]:
        """Returns the gradients for `prepare` to copy; raises its errors."""
        # Checks what the caller knows, not whether the reduction is complete by now: that depends on the network and differs
        # between ranks.
        if self.reduction_handle is not None and not self.reduction_handle.is_found_complete:
            raise PhaseError(
                f"bucket {self.bucket_index} is still being reduced.",
                where="GradientBucket.prepare",
                remedy="Wait for reduction_handle first.",
            )
        return self._present_gradients()

    def reduce_async(
        self, process_group: dist.ProcessGroup | None = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> WorkHandle:
        """Starts the reduction over all ranks of `process_group`; raises PhaseError unless `prepare` was called for it."""
        if not self._is_prepared:
            raise PhaseError(
                f"bucket {self.bucket_index} holds no new gradients to reduce.",
                where="GradientBucket.reduce_async",
                remedy="Call prepare() after every backward, and reduce once.",
            )
        self._is_prepared = False
        self.reduction_handle = all_reduce_async(self.storage, process_group, op)
        return self.reduction_handle

    def copy_back(self) -> None:
        """Waits for the reduction and copies the result into the gradients.

        Raises PhaseError if no reduction was started, or if its result has been copied already.
        """
        handle = self.require_reduced()
        if self.is_copied_back:
            raise PhaseError(
                f"bucket {self.bucket_index} has no new result: it has been copied back already.",
                where="GradientBucket.copy_back",
                remedy="Call prepare() and reduce_async() after every backward, and copy back once.",
            )
        handle.wait()
        targets = self._present_gradients()
        pairs = [(target, view) for view, target in zip(self.views, targets, strict=True) if view is not target]
        if pairs:
            with torch.no_grad():
                private.copy_each([target for target, _ in pairs], [view for _, view in pairs])
        self.is_copied_back = True

    def require_reduced(self) -> WorkHandle:
        """Returns the handle of the reduction; raises PhaseError if none was started."""
        if self.reduction_handle is None:
            raise PhaseError(
                f"bucket {self.bucket_index} has not been reduced.",
                where="GradientBucket.copy_back",
                remedy="Call prepare() and reduce_async() first.",
            )
        return self.reduction_handle

    def fill(self, first: int, sources: list[Tensor]) -> None:
        """Copies `sources` into the views from position `first` on, in one launch."""
        last = first + len(sources)
        if self._row_shape is None:
            private.copy_each(self.views[first:last], sources)
        else:
            # Rows of one shape are adjacent: one concatenation costs a third of as many small copies.
            torch.cat(sources, out=self.storage[self._starts[first] : self._starts[last]].view(-1, *self._row_shape))

    def renew(self) -> None:
        """Allocates new storage; code that holds the old one keeps its values."""
        storage_numel = self._starts[-1] if self._layout is None else self._layout.storage_numel
        self.storage = torch.zeros(storage_numel, dtype=self._dtype, device=self._device)  # padding stays zero
        # `.data` gives each view a separate version counter; plain views share one with their base.
        self.views = [view.data for view in self.views_of(self.storage)]
        self._pointers = list(map(Tensor.data_ptr, self.views))
        self._num_sharing = private.storage_use_count(self.storage)

    def views_of(self, storage: Tensor) -> list[Tensor]:
        """Returns views like `views` of `storage`, which has the same layout."""
        if self._layout is None:
            return [
                storage[start:stop].view(gradient.shape)
                for gradient, (start, stop) in zip(self.gradients, pairwise(self._starts), strict=True)
            ]
        return [
            storage.as_strided(gradient.shape, strides, start)
            for gradient, strides, start in zip(self.gradients, self._strides, self.offsets, strict=True)
        ]

    def is_held(self, *, num_references: int = 0) -> bool:
        """Returns True if other code refers to a view, so that writing here would change the values it sees.

        A view bound as `.grad` counts. `num_references` is the number of references to views that the caller holds.
        """
        expected = _REFERENCES_OF_OURS * len(self.views) + num_references
        return sum(map(getrefcount, self.views)) > expected or private.storage_use_count(self.storage) > self._num_sharing

    def is_torn(self) -> bool:
        """Returns True if a view was given other memory (`param.grad.data = ...`, as casts do) and is not a view any more."""
        return list(map(Tensor.data_ptr, self.views)) != self._pointers

    def _present_gradients(self) -> list[Tensor]:
        found = []
        for position, gradient in enumerate(self.gradients):
            source = gradient.grad if gradient.requires_grad else gradient
            if source is None:
                raise ConfigError(
                    f"gradient {position} of bucket {self.bucket_index} is missing: its .grad is None.",
                    where=f"a tensor of shape {tuple(gradient.shape)}",
                    remedy="Run backward first, and leave tensors out that get no gradient.",
                )
            found.append(source)
        return found

    def _check(self) -> None:
        if self._layout is not None:
            return  # a plan's bucket is always valid
        if not self.gradients:
            raise ConfigError(
                f"bucket {self.bucket_index} is empty.", where="GradientBucket", remedy="Give it at least one gradient."
            )
        kinds = {(gradient.dtype, gradient.device) for gradient in self.gradients}
        if len(kinds) > 1:
            raise ConfigError(
                f"bucket {self.bucket_index} mixes gradients of {' and '.join(sorted(map(str, kinds)))}.",
                where="GradientBucket",
                remedy="Put each dtype and device into buckets of its own; GradientBucketManager does.",
            )
        num_bytes = sum(gradient.numel() * gradient.element_size() for gradient in self.gradients)
        if not self.size_in_bytes >= num_bytes or not self.size_in_bytes > 0:  # also rejects NaN
            raise ConfigError(
                f"bucket {self.bucket_index} of {self.size_in_bytes} bytes cannot hold {num_bytes} bytes of gradients.",
                where="GradientBucket",
                remedy="Give a positive size that is large enough.",
            )


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
    return torch.empty_like(param, device="meta").stride()


def _row_shape(tensors: Sequence[Tensor]) -> torch.Size | None:
    """Returns the shape of a row if all of several tensors have the same."""
    shapes = {tensor.shape[1:] for tensor in tensors if tensor.dim() > 0}
    has_rows = all(tensor.dim() > 0 and tensor.is_contiguous() for tensor in tensors)
    row_shape = shapes.pop() if len(shapes) == 1 and len(tensors) > 1 and has_rows else None
    return row_shape if row_shape is not None and row_shape.numel() > 0 else None
