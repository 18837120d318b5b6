"""Groups a set of gradients into buckets by hand: no hooks, no schedule."""

from collections.abc import Generator, Sequence
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

from undertow.by_hand.bucket import GradientBucket
from undertow.errors import ConfigError, PhaseError, require
from undertow.plan import SizeCaps, group_by_size, largest_first
from undertow.runtime.comm.handles import WorkHandle
from undertow.runtime.gradients.storage import spec_of


class AllReductions:
    """The reductions of all buckets in flight, as one handle. Wait for it, poll it, or await it from asyncio."""

    def __init__(self, handles: Sequence[WorkHandle]) -> None:
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

    - `parameters`: gradient tensors, or tensors that require grad. Of the latter it reduces the `.grad` at the time of the
      reduction. A gradient tensor held across `zero_grad(set_to_none=True)` goes stale: backward makes a new one.
    - `bucket_size_in_bytes`: largest bucket. A larger parameter gets a separate bucket, and so does each dtype and device.
      Buckets hold the largest parameters first.

    Raises ConfigError if the size is not a positive number, a tensor is given twice, or an entry is not a tensor with gradients.

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
        _check_tensors(parameters)
        specs = [spec_of(f"tensor {index}", tensor) for index, tensor in enumerate(parameters)]
        groups = group_by_size(specs, largest_first(specs), SizeCaps(cap_bytes=bucket_size_in_bytes))
        self.process_group = process_group
        self.buckets = tuple(
            GradientBucket(index, sum(specs[i].num_bytes for i in group) or 1, [parameters[i] for i in group])
            for index, group in enumerate(groups)
        )
        self._bucket_of = {id(tensor): bucket.bucket_index for bucket in self.buckets for tensor in bucket.gradients}
        self._is_closed = False

    def get_bucket_index(self, tensor: Tensor) -> int:
        """Returns the index of the bucket that holds `tensor`'s gradient; raises ConfigError if no bucket does."""
        buckets = self._buckets_for("get_bucket_index")
        require(
            id(tensor) in self._bucket_of,
            f"a tensor of shape {tuple(tensor.shape)} belongs to no bucket.",
            where=f"GradientBucketManager of {len(self._bucket_of)} tensors in {len(buckets)} buckets",
            remedy="Give the manager this very tensor when you make it (the parameter, not a copy or its gradient).",
        )
        return self._bucket_of[id(tensor)]

    def is_reduced(self, tensor: Tensor) -> bool:
        """Returns True if the reduction of the bucket that holds `tensor`'s gradient is complete."""
        return self._buckets_for("is_reduced")[self.get_bucket_index(tensor)].is_reduced

    def reduce_bucket_async(self, index: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> WorkHandle:
        """Prepares one bucket and starts its reduction. Every rank calls this in the same order.

        Returns a handle that can be waited for, asked by `is_completed()`, and awaited.
        """
        buckets = self._buckets_for("reduce_bucket_async")
        require(
            0 <= index < len(buckets), f"bucket {index} does not exist.", where=f"GradientBucketManager of {len(buckets)} buckets"
        )
        buckets[index].prepare()
        return buckets[index].reduce_async(self.process_group, op)

    def reduce_all_async(self, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> AllReductions:
        """Prepares every bucket and starts its reduction, in order; sends nothing if one of them cannot be prepared.

        Returns one handle of all reductions, which can be waited for, asked by `is_completed()`, and awaited.
        """
        for bucket in self._buckets_for("reduce_all_async"):
            bucket.require_ready()
        return AllReductions([self.reduce_bucket_async(index, op) for index in range(len(self.buckets))])

    def wait_for_all(self) -> None:
        """Waits until every reduction that was started is complete."""
        for bucket in self._buckets_for("wait_for_all"):
            if bucket.reduction_handle is not None:
                bucket.reduction_handle.wait()

    def copy_back_all(self) -> None:
        """Waits for every bucket and copies the results into the gradients, each once.

        Raises PhaseError, and copies nothing, if a bucket has not been reduced or no result is new.
        """
        buckets = self._buckets_for("copy_back_all")
        for bucket in buckets:
            bucket.require_reduced()
        for bucket in [bucket for bucket in buckets if not bucket.is_copied_back] or buckets[:1]:
            bucket.copy_back()

    def close(self) -> None:
        """Waits for running reductions and releases the buckets; every later call except `close` raises PhaseError."""
        if self._is_closed:
            return
        try:
            self.wait_for_all()
        finally:
            self.buckets, self._bucket_of, self._is_closed = (), {}, True

    def _buckets_for(self, call: str) -> tuple[GradientBucket, ...]:
        if self._is_closed:
            raise PhaseError(
                "this GradientBucketManager is closed.", where=f"GradientBucketManager.{call}", remedy="Make a new one."
            )
        return self.buckets

    def __enter__(self) -> Self:
        self._buckets_for("__enter__")
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _check_tensors(tensors: Sequence[Tensor]) -> None:
    seen: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        require(
            isinstance(tensor, Tensor),
            f"parameter {index} is not a tensor but {type(tensor).__name__}.",
            where="GradientBucketManager",
            remedy="Pass model.parameters(), or the gradient tensors.",
        )
        if id(tensor) in seen:
            raise ConfigError(
                f"parameters {seen[id(tensor)]} and {index} are the same tensor, of shape {tuple(tensor.shape)}.",
                where="GradientBucketManager",
                remedy="Name every parameter once; model.parameters() does so for tied weights.",
            )
        require(
            tensor.is_floating_point() or tensor.is_complex(),
            f"parameter {index} has dtype {tensor.dtype}, which has no gradients.",
            where="GradientBucketManager",
            remedy="Leave integer and boolean tensors out.",
        )
        seen[id(tensor)] = index
