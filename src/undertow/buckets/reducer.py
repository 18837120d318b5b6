"""Reduces values over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.finite import FiniteCheck
from undertow.config import SyncConfig
from undertow.errors import require
from undertow.plan import Bucket
from undertow.ranks.comm_hook import CommHook
from undertow.ranks.exchanges import (
    Collectives,
    accumulation_dtype,
    cast_for_wire,
    exchanges_over,
    travels_narrower,
    wire_of,
)
from undertow.ranks.transport import Handle, OwnGroup


@dataclass(frozen=True)
class Reducer:
    """The reduction over all ranks: their mean, or the result of the user's hook."""

    group: OwnGroup
    config: SyncConfig
    wire: torch.dtype | None  # dtype on the wire of values that are wider
    in_order: Collectives | None  # adds in rank order, if the settings ask for it
    hook: CommHook | None = None

    @classmethod
    def of(cls, group: OwnGroup, config: SyncConfig) -> Reducer:
        """Creates the reducer for these settings."""
        is_ordered = config.reduction == "ordered"
        in_order = exchanges_over(group, config, divisor=group.num_ranks) if is_ordered else None
        return cls(group, config, wire_of(config), in_order)

    def __post_init__(self) -> None:
        require(
            self.hook is None or self.wire is None,
            "a communication hook chooses the dtype of sent gradients, and the settings ask for "
            f"{self.wire}.",
            where="register_comm_hook, with wire_dtype=...",
            remedy="Leave wire_dtype out, or cast in the hook.",
        )

    @cached_property
    def is_active(self) -> bool:
        """True if there is work: a single rank has its mean already, unless a hook changes it."""
        return self.group.num_ranks > 1 or self.hook is not None

    @cached_property
    def finite(self) -> FiniteCheck | None:
        """Looks for values that are not finite; None if nobody asks for them."""
        return None if self.config.nonfinite == "ignore" else FiniteCheck()

    def close(self) -> None:
        """Ends the threads of the exchanges and the hook."""
        for owner in (self.in_order, self.hook):
            if owner is not None:
                owner.close()

    def reducing(self, dtype: torch.dtype) -> Callable[[Tensor], Handle]:
        """Returns the call that starts to reduce a dense tensor of `dtype` in place."""
        if self.in_order is not None:
            return self.in_order.all_reduce
        # A sum may not fit 16 bits. NCCL divides each rank's input before it adds.
        may_overflow = dtype is torch.float16 and self.group.is_over_gloo
        can_average = self.config.average_in_collective and self.group.user.can_average
        if can_average and self.wire is None and not may_overflow:
            return partial(self.group.all_reduce_async, op=dist.ReduceOp.AVG)
        return self._divided

    def reduce(self, tensor: Tensor) -> Handle:
        """Starts to reduce `tensor` in place, dense or sparse."""
        return self._divided(tensor) if tensor.is_sparse else self.reducing(tensor.dtype)(tensor)

    def _divided(self, tensor: Tensor) -> Handle:
        tensor.div_(self.group.num_ranks)
        narrow = cast_for_wire(tensor, self.wire)
        finish = None if narrow is tensor else partial(tensor.copy_, narrow)
        return self.group.all_reduce_async(narrow, finish=finish)

    def rounds(self, dtype: torch.dtype) -> bool:
        """Returns True if sums of `dtype` come back narrower than they are added up in shards."""
        return accumulation_dtype(dtype) != dtype or travels_narrower(dtype, self.wire)

    def largest_sent(self, dtype: torch.dtype, exchanges: Collectives | None = None) -> float:
        """Returns the largest number of `dtype` that stays finite when a reduction casts it, by
        `exchanges` if to shards."""
        largest = torch.finfo(dtype).max
        if self.wire is None or not travels_narrower(dtype, self.wire):
            return largest
        by = exchanges or self.in_order
        is_divided = by is None or by.divides_first
        wire = torch.finfo(self.wire)
        rounded_down = wire.max * (
            1 + wire.eps / 4
        )  # the end of the numbers that a cast rounds down
        return min(largest, rounded_down * (self.group.num_ranks if is_divided else 1))

    def wire_bytes(self, bucket: Bucket, *, is_trailer_wide: bool) -> int:
        """Returns the bytes of a bucket that are passed to collectives; 0 if a hook sends it."""
        if self.hook is not None:
            return 0
        if self.wire is None or not travels_narrower(getattr(torch, bucket.dtype), self.wire):
            return bucket.wire_bytes
        num_wide = bucket.storage_numel - bucket.trailer.start if is_trailer_wide else 0
        num_narrow = bucket.storage_numel - num_wide
        return num_narrow * self.wire.itemsize + num_wide * bucket.itemsize
