"""A bucket of gradients that user code packs, reduces and unpacks."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.errors import ConfigError, PhaseError
from undertow.runtime.comm.handles import WorkHandle, all_reduce_async
from undertow.runtime.torch_private import private


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

    Raises ConfigError if the arguments do not fit together.
    """

    def __init__(self, bucket_index: int, size_in_bytes: int, gradients: Sequence[Tensor]) -> None:
        self.bucket_index = bucket_index
        self.size_in_bytes = size_in_bytes
        self.gradients = tuple(gradients)
        self.reduction_handle: WorkHandle | None = None
        self._is_prepared = self.is_copied_back = False
        self._check()
        starts = [0, *accumulate(gradient.numel() for gradient in self.gradients)]
        self.offsets = starts[:-1]  # start of each gradient in `bucket_tensor`, in elements
        first = self.gradients[0]
        # The gradients one after another, [numel].
        self.bucket_tensor = torch.zeros(starts[-1], dtype=first.dtype, device=first.device)
        pairs = zip(self.gradients, pairwise(starts), strict=True)
        self._views = [self.bucket_tensor[start:stop].view(gradient.shape) for gradient, (start, stop) in pairs]

    @property
    def is_reduced(self) -> bool:
        """True if the reduction of the prepared gradients is complete."""
        return self.reduction_handle is not None and self.reduction_handle.is_completed()

    def prepare(self) -> None:
        """Copies the gradients into the bucket.

        Raises ConfigError, with its name, if a gradient is missing, and PhaseError while the bucket is in flight.
        """
        sources = self.require_ready()
        with torch.no_grad():
            private.copy_each(self._views, sources)
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
        self.reduction_handle = all_reduce_async(self.bucket_tensor, process_group, op)
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
        with torch.no_grad():
            private.copy_each(self._present_gradients(), self._views)
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
        if not self.gradients:
            raise ConfigError(
                f"bucket {self.bucket_index} is empty.", where="GradientBucket", remedy="Give it at least one gradient."
            )
        kinds = {(gradient.dtype, gradient.device) for gradient in self.gradients}
        if len(kinds) > 1:
            raise ConfigError(
                f"bucket {self.bucket_index} mixes gradients of {' and '.join(sorted(map(str, kinds)))}.",
                where="GradientBucket",
                remedy="Put each dtype and device into separate buckets; GradientBucketManager does.",
            )
        num_bytes = sum(gradient.numel() * gradient.element_size() for gradient in self.gradients)
        if not self.size_in_bytes >= num_bytes or not self.size_in_bytes > 0:  # also rejects NaN
            raise ConfigError(
                f"bucket {self.bucket_index} of {self.size_in_bytes} bytes cannot hold {num_bytes} bytes of gradients.",
                where="GradientBucket",
                remedy="Give a positive size that is large enough.",
            )
