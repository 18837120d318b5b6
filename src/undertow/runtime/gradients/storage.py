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
from undertow.runtime.comm.handles import ReductionHandle, all_reduce_async
from undertow.runtime.torch_private import private

# A view that nobody else holds is referenced by our list of views and by the argument of getrefcount.
_REFERENCES_OF_OURS = 2


class GradientBucket:
    """Gradients that travel together, packed into one flat tensor.

    `gradients` are gradient tensors, or tensors that require grad (their `.grad` is meant). All have one dtype and
    device. `size_in_bytes` is how much the bucket may hold; it must be enough for them. Raises ConfigError.

    By hand: `prepare()`, `reduce_async(...)`, `reduction_handle.wait()`, `copy_back()`.
    """

    def __init__(
        self, bucket_index: int, size_in_bytes: int, gradients: Sequence[Tensor], *, layout: Bucket | None = None
    ) -> None:
        self.bucket_index = bucket_index
        self.size_in_bytes = size_in_bytes
        self.gradients = tuple(gradients)
        self.reduction_handle: ReductionHandle | None = None
        self._layout = layout
        self._is_prepared = self.is_copied_back = False
        self._check()
        # Of this moment: parameters may be cast or moved later.
        self._dtype = self.gradients[0].dtype if layout is None else getattr(torch, layout.dtype)
        self._device = self.gradients[0].device if self.gradients or layout is None else torch.device(layout.device)
        # Also of this moment: storage that is renewed later is laid out as that of all other ranks is.
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
        """The gradients one behind the other, [numel]; without padding or trailer."""
        return self.storage[: self._starts[-1]]

    @property
    def offsets(self) -> list[int]:
        """Where each gradient starts in `bucket_tensor`, in elements."""
        return self._starts[:-1]

    @property
    def is_reduced(self) -> bool:
        """Whether a reduction of what `prepare` packed is complete."""
        return self.reduction_handle is not None and self.reduction_handle.is_completed()

    def prepare(self) -> None:
        """Copies the gradients into the bucket. ConfigError, naming it, if one is missing; PhaseError in flight."""
        sources = self.require_ready()
        pairs = [(view, source) for view, source in zip(self.views, sources, strict=True) if view is not source]
        if pairs:
            private.copy_each([view for view, _ in pairs], [source for _, source in pairs])
        self.reduction_handle = None
        self._is_prepared, self.is_copied_back = True, False

    def require_ready(self) -> list[Tensor]:
        """The gradients that `prepare` is to copy; raises what that raises."""
        # Not whether it is complete by now: that depends on the network, and ranks would disagree.
        if self.reduction_handle is not None and not self.reduction_handle.is_found_complete:
            raise PhaseError(
                f"bucket {self.bucket_index} is still being reduced.",
                where="GradientBucket.prepare",
                remedy="Wait for reduction_handle first.",
            )
        return self._present_gradients()

    def reduce_async(
        self, process_group: dist.ProcessGroup | None = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> ReductionHandle:
        """Starts the reduction over all ranks of `process_group`. PhaseError if nothing was prepared for it."""
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
        """Waits for the reduction and copies the result into the gradients, once. PhaseError if none was started."""
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

    def require_reduced(self) -> ReductionHandle:
        """The reduction of what `prepare` packed; PhaseError if none was started."""
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
            # Rows of one shape lie one behind the other: a concatenation costs a third of as many small copies.
            torch.cat(sources, out=self.storage[self._starts[first] : self._starts[last]].view(-1, *self._row_shape))

    def renew(self) -> None:
        """Gives the bucket fresh storage; whoever holds the old one keeps it as it is."""
        storage_numel = self._starts[-1] if self._layout is None else self._layout.storage_numel
        self.storage = torch.zeros(storage_numel, dtype=self._dtype, device=self._device)  # padding stays zero for ever
        # Each counts by itself what is written into it: views share a count with what they are views of, their data does not.
        self.views = [view.data for view in self.views_of(self.storage)]
        self._pointers = list(map(Tensor.data_ptr, self.views))
        self._num_sharing = private.storage_use_count(self.storage)

    def views_of(self, storage: Tensor) -> list[Tensor]:
        """Views like `views` of something that is laid out as our storage is."""
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
        """Whether anything but the caller refers to a view, so that writing here would change what it sees.

        A view that is bound as a `.grad` counts; `num_references` are those that the caller has to views.
        """
        expected = _REFERENCES_OF_OURS * len(self.views) + num_references
        return sum(map(getrefcount, self.views)) > expected or private.storage_use_count(self.storage) > self._num_sharing

    def is_torn(self) -> bool:
        """Whether a view has been given other data (`param.grad.data = ...`, as casts do) and is no view any more."""
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
            return  # a plan's bucket is right
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
        if not self.size_in_bytes >= num_bytes or not self.size_in_bytes > 0:  # NaN is neither
            raise ConfigError(
                f"bucket {self.bucket_index} of {self.size_in_bytes} bytes cannot hold {num_bytes} bytes of gradients.",
                where="GradientBucket",
                remedy="Give a positive size that is large enough.",
            )


def spec_of(name: str, tensor: Tensor, *, is_sparse: bool = False) -> ParamSpec:
    """What the planner needs to know of `tensor`."""
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
    """Those that autograd and optimizers expect of a gradient: the parameter's own, such as channels-last."""
    return torch.empty_like(param, device="meta").stride()


def _row_shape(tensors: Sequence[Tensor]) -> torch.Size | None:
    """The shape of every tensor's rows where it is the same for all of several tensors."""
    shapes = {tensor.shape[1:] for tensor in tensors if tensor.dim() > 0}
    has_rows = all(tensor.dim() > 0 and tensor.is_contiguous() for tensor in tensors)
    row_shape = shapes.pop() if len(shapes) == 1 and len(tensors) > 1 and has_rows else None
    return row_shape if row_shape is not None and row_shape.numel() > 0 else None
