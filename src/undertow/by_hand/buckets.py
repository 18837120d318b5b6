"""Buckets of gradients that user code packs, reduces and unpacks: no hooks, no schedule."""

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.engine.params import spec_of
from undertow.errors import PhaseError, require
from undertow.plan import SizeCaps, group_by_size, largest_first
from undertow.ranks.group import user_group
from undertow.ranks.handle import Handle
from undertow.ranks.users_groups import all_reduce_over
from undertow.torch_private import private


class GradientBucket:
    """Gradients packed into one flat tensor, to be reduced together.

    To reduce a bucket by hand:

        bucket.prepare()
        handle = bucket.reduce_async()
        handle.wait()
        bucket.copy_back()

    Args:
        bucket_index: Number of the bucket, for errors.
        size_in_bytes: Capacity; it must be large enough for the gradients.
        gradients: Gradient tensors, or tensors that require grad: then it takes their `.grad`.
            All have one dtype and device.

    Raises:
        ConfigError: If the arguments do not fit together.
    """

    def __init__(self, bucket_index: int, size_in_bytes: int, gradients: Sequence[Tensor]) -> None:
        self.bucket_index = bucket_index
        self.size_in_bytes = size_in_bytes
        self.gradients = tuple(gradients)
        self.reduction_handle: Handle | None = None
        self._is_prepared = False
        self.is_copied_back = False
        require(
            self.gradients,
            f"bucket {bucket_index} is empty.",
            where="GradientBucket",
            remedy="Give it at least one gradient.",
        )
        self._held = {
            id(gradient) for gradient in self.gradients if private.is_held_by_torch(gradient)
        }
        kinds = {(private.gradient_dtype(gradient), gradient.device) for gradient in self.gradients}
        require(
            len(kinds) == 1,
            f"bucket {bucket_index} mixes gradients of {' and '.join(sorted(map(str, kinds)))}.",
            where="GradientBucket",
            remedy="Put each dtype and device into separate buckets; GradientBucketManager does.",
        )
        starts = [0, *accumulate(gradient.numel() for gradient in self.gradients)]
        self.offsets = starts[:-1]  # start of each gradient in `bucket_tensor`, in elements
        dtype = private.gradient_dtype(self.gradients[0])
        num_bytes = starts[-1] * dtype.itemsize
        require(
            size_in_bytes >= num_bytes and size_in_bytes > 0,  # also rejects NaN
            f"bucket {bucket_index} of {size_in_bytes} bytes cannot hold {num_bytes} bytes of "
            "gradients.",
            where="GradientBucket",
            remedy="Give a positive size that is large enough.",
        )
        # The gradients one after another, [numel].
        self.bucket_tensor = torch.zeros(starts[-1], dtype=dtype, device=self.gradients[0].device)
        parts = torch.split(self.bucket_tensor, [gradient.numel() for gradient in self.gradients])
        self._views = [
            part.view(gradient.shape) for part, gradient in zip(parts, self.gradients, strict=True)
        ]

    @property
    def is_reduced(self) -> bool:
        """True if the reduction of the prepared gradients is complete."""
        return self.reduction_handle is not None and self.reduction_handle.is_completed()

    @torch.no_grad()
    def prepare(self) -> None:
        """Copies the gradients into the bucket.

        Raises:
            ConfigError: If a gradient is missing; it has the gradient's name.
            PhaseError: While the bucket is in flight.
        """
        # The caller must know of the end. Whether the reduction is complete by now depends on the
        # network, and differs between ranks.
        require(
            self.reduction_handle is None or self.reduction_handle.is_found_complete,
            f"bucket {self.bucket_index} is still being reduced.",
            where="GradientBucket.prepare",
            remedy="Wait for reduction_handle first.",
            error=PhaseError,
        )
        private.copy_each(self._views, self._present_gradients())
        self.reduction_handle = None
        self._is_prepared = True
        self.is_copied_back = False

    def reduce_async(
        self,
        process_group: dist.ProcessGroup | None = None,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> Handle:
        """Starts the reduction over all ranks of `process_group`.

        Args:
            process_group: The ranks; the default group if None.
            op: The operation; the bucket gets its result unchanged, by default the sum.

        Returns:
            A handle with `wait()` and `is_completed()`; code with asyncio can await it.

        Raises:
            PhaseError: If `prepare` was not called for this reduction.
        """
        require(
            self._is_prepared,
            f"bucket {self.bucket_index} holds no new gradients to reduce.",
            where="GradientBucket.reduce_async",
            remedy="Call prepare() after every backward, and reduce once.",
            error=PhaseError,
        )
        self.reduction_handle = all_reduce_over(self.bucket_tensor, user_group(process_group), op)
        self._is_prepared = False
        return self.reduction_handle

    @torch.no_grad()
    def copy_back(self) -> None:
        """Waits for the reduction and copies the result into the gradients.

        Raises:
            PhaseError: If no reduction was started, or if its result has been copied already.
        """
        self.require_reduced()
        require(
            not self.is_copied_back,
            f"bucket {self.bucket_index} has no new result: it has been copied back already.",
            where="GradientBucket.copy_back",
            remedy="Call prepare() and reduce_async() after every backward, and copy back once.",
            error=PhaseError,
        )
        self.reduction_handle.wait()  # type: ignore[union-attr]  # it is reduced
        private.copy_each(self._present_gradients(), self._views)
        self.is_copied_back = True

    def require_reduced(self) -> None:
        """Raises PhaseError if no reduction was started."""
        require(
            self.reduction_handle is not None,
            f"bucket {self.bucket_index} has not been reduced.",
            where="GradientBucket.copy_back",
            remedy="Call prepare() and reduce_async() first.",
            error=PhaseError,
        )

    def _present_gradients(self) -> list[Tensor]:
        found = [
            gradient.grad if gradient.requires_grad else gradient for gradient in self.gradients
        ]
        for position, (gradient, source) in enumerate(zip(self.gradients, found, strict=True)):
            require(
                source is not None,
                f"gradient {position} of bucket {self.bucket_index} is missing: its .grad is None.",
                where=f"a tensor of shape {tuple(gradient.shape)}",
                remedy="Run backward first, and leave out tensors that get no gradient.",
            )
            require(
                id(gradient) not in self._held or private.is_held_by_torch(gradient),
                f"gradient {position} of bucket {self.bucket_index} is out of date: it is no "
                "longer the .grad of its parameter.",
                where=f"a tensor of shape {tuple(gradient.shape)}",
                remedy="Give the parameters instead of their gradients, or call "
                "zero_grad(set_to_none=False).",
                error=PhaseError,
            )
            assert source is not None
            require(
                source.layout is torch.strided and source.dtype == self.bucket_tensor.dtype,
                f"gradient {position} of bucket {self.bucket_index} must be dense and of "
                f"{self.bucket_tensor.dtype}, got {source.dtype} of layout {source.layout}.",
                where=f"a tensor of shape {tuple(gradient.shape)}",
                remedy="Make the bucket after dtypes are set. For a sparse gradient use "
                "average_gradients, or DistributedDataParallel.",
            )
        return found  # type: ignore[return-value]  # none is missing


class AllReductions:
    """The reductions of all buckets in flight, as one handle.

    Wait for it, poll it, or await it from asyncio.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        """Waits until all are complete; raises the backend's error if one failed or timed out."""
        for handle in self._handles:
            handle.wait()

    def is_completed(self) -> bool:
        """Returns True if all are complete."""
        return all(handle.is_completed() for handle in self._handles)

    def __await__(self) -> Generator[Any, None, None]:
        for handle in self._handles:
            yield from handle.__await__()


class GradientBucketManager:
    """Groups gradients into buckets and reduces them.

    Args:
        process_group: The ranks to reduce over; the default group if None.
        parameters: Gradient tensors, or tensors that require grad. Of the latter it reduces the
            `.grad` at the time of the reduction. A gradient tensor held across
            `zero_grad(set_to_none=True)` goes stale: backward makes a new one.
        bucket_size_in_bytes: Largest bucket. A larger parameter gets a separate bucket, and so
            does each dtype and device. Buckets hold the largest parameters first.

    Raises:
        ConfigError: If the size is not a positive number, or an entry is not a tensor.

    ```python
    with undertow.GradientBucketManager(group, list(model.parameters())) as manager:
        loss.backward()
        manager.reduce_all_async()
        manager.copy_back_all()
    ```
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        parameters: Sequence[Tensor],
        bucket_size_in_bytes: float = 25 * 1024 * 1024,
    ) -> None:
        parameters = tuple(parameters)
        self._index_of: dict[int, int] = {}  # of a tensor's bucket, by id
        for index, tensor in enumerate(parameters):
            require(
                isinstance(tensor, Tensor),
                f"parameter {index} is not a tensor but {type(tensor).__name__}.",
                where="GradientBucketManager",
                remedy="Pass model.parameters(), or the gradient tensors.",
            )
            first = self._index_of.setdefault(id(tensor), index)
            require(
                first == index,
                f"parameters {first} and {index} are the same tensor, "
                f"of shape {tuple(tensor.shape)}.",
                where="GradientBucketManager",
                remedy="Name every parameter once; model.parameters() does so for tied weights.",
            )
            require(
                tensor.is_floating_point() or tensor.is_complex(),
                f"parameter {index} has dtype {tensor.dtype}, which has no gradients.",
                where="GradientBucketManager",
                remedy="Leave integer and boolean tensors out.",
            )
        specs = [spec_of(f"tensor {index}", tensor) for index, tensor in enumerate(parameters)]
        groups = group_by_size(
            specs, largest_first(specs), SizeCaps(cap_bytes=bucket_size_in_bytes)
        )
        self.process_group = process_group
        self._buckets: list[GradientBucket] | None = []  # None after `close`
        for index, group in enumerate(groups):
            num_bytes = sum(specs[i].num_bytes for i in group) or 1
            self._buckets.append(GradientBucket(index, num_bytes, [parameters[i] for i in group]))
            self._index_of.update((id(parameters[i]), index) for i in group)

    @property
    def buckets(self) -> tuple[GradientBucket, ...]:
        """The buckets, with the largest gradients first. Raises PhaseError after `close`."""
        if self._buckets is None:
            raise PhaseError(
                "this GradientBucketManager is closed.",
                where="GradientBucketManager",
                remedy="Make a new one.",
            )
        return tuple(self._buckets)

    def get_bucket_index(self, tensor: Tensor) -> int:
        """Returns the index of the bucket that holds the gradient of a tensor.

        Args:
            tensor: One of the tensors that the manager was made with.

        Raises:
            ConfigError: If no bucket holds its gradient.
        """
        num_buckets = len(self.buckets)
        require(
            id(tensor) in self._index_of,
            f"a tensor of shape {tuple(tensor.shape)} belongs to no bucket.",
            where=f"GradientBucketManager of {len(self._index_of)} tensors in {num_buckets} "
            "buckets",
            remedy="Give this tensor itself to the manager when you make it: the parameter, not "
            "a copy or its gradient.",
        )
        return self._index_of[id(tensor)]

    def is_reduced(self, tensor: Tensor) -> bool:
        """Returns True if the reduction of the bucket that holds the gradient of a tensor is
        complete.

        Args:
            tensor: One of the tensors that the manager was made with.
        """
        return self.buckets[self.get_bucket_index(tensor)].is_reduced

    def reduce_bucket_async(
        self, index: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Handle:
        """Prepares one bucket and starts its reduction. Every rank calls this in the same order.

        Args:
            index: The bucket, counted from 0.
            op: The operation over ranks.

        Returns:
            A handle with `wait()` and `is_completed()`; code with asyncio can await it.
        """
        buckets = self.buckets
        require(
            0 <= index < len(buckets),
            f"bucket {index} does not exist.",
            where=f"GradientBucketManager of {len(buckets)} buckets",
        )
        buckets[index].prepare()
        return buckets[index].reduce_async(self.process_group, op)

    def reduce_all_async(self, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> AllReductions:
        """Prepares every bucket and starts its reduction, in order.

        It sends nothing if one of the buckets cannot be prepared.

        Args:
            op: The operation over ranks.

        Returns:
            One handle of all reductions, with `wait()` and `is_completed()`; asyncio can await it.
        """
        for bucket in self.buckets:
            bucket.prepare()
        return AllReductions(
            [bucket.reduce_async(self.process_group, op) for bucket in self.buckets]
        )

    def wait_for_all(self) -> None:
        """Waits until every reduction that was started is complete."""
        for bucket in self.buckets:
            if bucket.reduction_handle is not None:
                bucket.reduction_handle.wait()

    def copy_back_all(self) -> None:
        """Waits for every bucket and copies the results into the gradients, each once.

        Raises:
            PhaseError: If a bucket has not been reduced or no result is new; nothing is copied
                then.
        """
        for bucket in self.buckets:
            bucket.require_reduced()
        new = [bucket for bucket in self.buckets if not bucket.is_copied_back]
        for bucket in new or self.buckets[:1]:  # the first one says that its result is not new
            bucket.copy_back()

    def close(self) -> None:
        """Waits for running reductions and releases the buckets.

        Every later call except `close` raises PhaseError.
        """
        if self._buckets is None:
            return
        try:
            self.wait_for_all()
        finally:
            self._buckets = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
