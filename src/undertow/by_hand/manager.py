"""Groups a set of gradients into buckets by hand: no hooks, no schedule."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch.distributed as dist
from torch import Tensor

from undertow.errors import ConfigError, PhaseError
from undertow.plan import SizeCaps, group_by_size, largest_first
from undertow.runtime.comm.handles import WorkHandle
from undertow.runtime.gradients.storage import GradientBucket, spec_of


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
        self._require_open("get_bucket_index")
        index = self._bucket_of.get(id(tensor))
        if index is None:
            raise ConfigError(
                f"a tensor of shape {tuple(tensor.shape)} belongs to no bucket.",
                where=f"GradientBucketManager of {len(self._bucket_of)} tensors in {len(self.buckets)} buckets",
                remedy="Give the manager this very tensor when you make it (the parameter, not a copy or its gradient).",
            )
        return index

    def is_reduced(self, tensor: Tensor) -> bool:
        """Returns True if the reduction of the bucket that holds `tensor`'s gradient is complete."""
        self._require_open("is_reduced")
        return self.buckets[self.get_bucket_index(tensor)].is_reduced

    def reduce_bucket_async(self, index: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> WorkHandle:
        """Prepares one bucket and starts its reduction. Every rank calls this in the same order."""
        self._require_open("reduce_bucket_async")
        if not 0 <= index < len(self.buckets):
            raise ConfigError(f"there is no bucket {index}.", where=f"GradientBucketManager of {len(self.buckets)} buckets")
        bucket = self.buckets[index]
        bucket.prepare()
        return bucket.reduce_async(self.process_group, op)

    def reduce_all_async(self, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[WorkHandle]:
        """Prepares every bucket and starts its reduction, in order; sends nothing if one of them cannot be prepared."""
        self._require_open("reduce_all_async")
        for bucket in self.buckets:
            bucket.require_ready()
        return [self.reduce_bucket_async(index, op) for index in range(len(self.buckets))]

    def wait_for_all(self) -> None:
        """Waits until every reduction that was started is complete."""
        self._require_open("wait_for_all")
        for bucket in self.buckets:
            if bucket.reduction_handle is not None:
                bucket.reduction_handle.wait()

    def copy_back_all(self) -> None:
        """Waits for every bucket and copies the results into the gradients, each once.

        Raises PhaseError, and copies nothing, if a bucket has not been reduced or no result is new.
        """
        self._require_open("copy_back_all")
        for bucket in self.buckets:
            bucket.require_reduced()
        for bucket in [bucket for bucket in self.buckets if not bucket.is_copied_back] or self.buckets[:1]:
            bucket.copy_back()

    def close(self) -> None:
        """Waits for running reductions and releases the buckets; every later call except `close` raises PhaseError."""
        if self._is_closed:
            return
        try:
            self.wait_for_all()
        finally:
            self.buckets = ()
            self._bucket_of = {}
            self._is_closed = True

    def _require_open(self, call: str) -> None:
        if self._is_closed:
            raise PhaseError(
                "this GradientBucketManager is closed.", where=f"GradientBucketManager.{call}", remedy="Make a new one."
            )

    def __enter__(self) -> GradientBucketManager:
        self._require_open("__enter__")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _check_tensors(tensors: Sequence[Tensor]) -> None:
    seen: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"parameter {index} is no tensor but {type(tensor).__name__}.",
                where="GradientBucketManager",
                remedy="Pass model.parameters(), or the gradient tensors.",
            )
        if id(tensor) in seen:
            raise ConfigError(
                f"parameters {seen[id(tensor)]} and {index} are the same tensor, of shape {tuple(tensor.shape)}.",
                where="GradientBucketManager",
                remedy="Name every parameter once; model.parameters() does so for tied weights.",
            )
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(
                f"parameter {index} has dtype {tensor.dtype}, which has no gradients.",
                where="GradientBucketManager",
                remedy="Leave integer and boolean tensors out.",
            )
        seen[id(tensor)] = index
