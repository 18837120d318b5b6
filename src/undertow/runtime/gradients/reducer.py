"""Reduces values over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.config import SyncConfig
from undertow.errors import require
from undertow.plan import Bucket
from undertow.runtime.comm.collectives import Collectives, accumulation_dtype, cast_for_wire, exchanges_over, travels_narrower
from undertow.runtime.comm.comm_hook import CommHook
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.handles import Handle


@dataclass(frozen=True)
class Reducer:
    """The reduction over all ranks: their mean, or the result of the user's hook."""

    group: OwnGroup
    average_in_collective: bool
    hook: CommHook | None = None
    in_order: Collectives | None = None  # adds in rank order, if the settings ask for it
    shard_exchanges: Collectives | None = None  # set if each rank needs only its shards
    wire: torch.dtype | None = None  # dtype on the wire of values that are wider
    nonfinite: str = "ignore"  # treatment of gradients with infinities or NaN
    overlap: bool = True  # True if buckets are launched during backward

    @classmethod
    def of(cls, group: OwnGroup, config: SyncConfig) -> Reducer:
        """Creates the reducer for these settings."""
        is_ordered = config.reduction == "ordered"
        return cls(
            group,
            config.average_in_collective,
            in_order=exchanges_over(group, config, divisor=group.num_ranks) if is_ordered else None,
            wire=None if config.wire_dtype is None else getattr(torch, config.wire_dtype),
            nonfinite=config.nonfinite,
            overlap=config.overlap,
        )

    def __post_init__(self) -> None:
        require(
            self.hook is None or self.wire is None,
            f"a communication hook chooses the dtype of sent gradients, and the settings ask for {self.wire}.",
            where="register_comm_hook, with wire_dtype=...",
            remedy="Leave wire_dtype out, or cast in the hook.",
        )

    @property
    def is_active(self) -> bool:
        """True if there is work: a single rank has its mean already, unless a hook changes it."""
        return self.group.num_ranks > 1 or self.hook is not None

    def averages(self, dtype: torch.dtype) -> bool:
        """Returns True if the backend divides; otherwise gradients are divided before the sum, which may not fit 16 bits."""
        fits = dtype is not torch.float16 or not self.group.is_over_gloo  # NCCL divides each rank's input first
        return fits and self.average_in_collective and self.group.user.can_average and self.wire is None

    def rounds(self, dtype: torch.dtype) -> bool:
        """Returns True if sums of `dtype` come back narrower than they are added up in shards."""
        return accumulation_dtype(dtype) != dtype or travels_narrower(dtype, self.wire)

    def trailer_divisor(self, dtype: torch.dtype) -> float:
        """Returns the divisor that trailers of buckets of `dtype` come back with; shards' trailers are summed."""
        is_divided = self.shard_exchanges is None and (self.averages(dtype) or self.in_order is not None)
        return self.group.num_ranks if is_divided else 1

    def close(self) -> None:
        """Ends the threads of the exchanges and the hook."""
        for owner in (self.in_order, self.hook):
            if owner is not None:
                owner.close()

    def reducing(self, dtype: torch.dtype, *, numel: int) -> Callable[[Tensor], Handle]:
        """Returns `reduce` for dense tensors of `dtype`, decided once."""
        if self.in_order is None and self.averages(dtype):
            return partial(self.group.all_reduce_async, op=dist.ReduceOp.AVG)
        return partial(self.reduce, numel=numel)

    def reduce(self, tensor: Tensor, *, numel: int) -> Handle:
        """Starts to reduce `tensor` to its mean in place; elements after `numel` may come back as a sum."""
        if self.in_order is not None and not tensor.is_sparse:
            return self.in_order.all_reduce(tensor)
        if self.averages(tensor.dtype) and not tensor.is_sparse:
            return self.group.all_reduce_async(tensor, dist.ReduceOp.AVG)
        (tensor if tensor.is_sparse else tensor[:numel]).div_(self.group.num_ranks)
        narrow = cast_for_wire(tensor, self.wire)
        return self.group.all_reduce_async(narrow, finish=None if narrow is tensor else partial(tensor.copy_, narrow))

    def as_sent(self, values: Tensor) -> Tensor:
        """Returns `values` as a reduction sends them: a cast copy, or themselves if they are not cast."""
        if not travels_narrower(values.dtype, self.wire):
            return values
        exchanges = self.shard_exchanges or self.in_order
        is_divided = exchanges is None or exchanges.divides_first
        return cast_for_wire(values / self.group.num_ranks if is_divided else values, self.wire)

    def wire_bytes(self, bucket: Bucket) -> int:
        """Returns the bytes of a bucket that are passed to collectives; 0 if a communication hook sends it."""
        if self.hook is not None:
            return 0
        dtype = getattr(torch, bucket.dtype)
        if self.wire is None or not travels_narrower(dtype, self.wire):
            return bucket.wire_bytes
        # With shards, the trailer is a separate message.
        num_wide = 0 if self.shard_exchanges is None else bucket.storage_numel - bucket.trailer.start
        return (bucket.storage_numel - num_wide) * self.wire.itemsize + num_wide * bucket.itemsize
