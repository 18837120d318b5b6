"""How values become what all ranks have together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.config import SyncConfig
from undertow.plan import Bucket
from undertow.runtime.comm.backend import exchanges_over
from undertow.runtime.comm.cast import CastBack, cast_for_wire, travels_narrower, wire_dtype_named
from undertow.runtime.comm.comm_hook import CommHook, no_hook_with_wire_dtype
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.handles import Handle
from undertow.runtime.comm.p2p import Collectives


@dataclass(frozen=True)
class Reducer:
    """How values become what all ranks have together: their mean or sum, or what the user's hook makes of them."""

    group: OwnGroup
    average_in_collective: bool
    divisor: float  # of the sum over ranks: how many they are, for the mean; another one for experts
    hook: CommHook | None = None
    in_order: Collectives | None = None  # adds up in rank order, where that is wanted
    shard_exchanges: Collectives | None = None  # where each rank needs its shards only
    wire: torch.dtype | None = None  # in which what is wider travels
    nonfinite: str = "ignore"  # what to do about gradients that are infinite or no number
    overlap: bool = True  # whether buckets leave while backward runs
    mean_divisor: float = 1  # of the mean, also where sums are asked for

    @classmethod
    def of(cls, group: OwnGroup, config: SyncConfig) -> Reducer:
        """As the settings have it."""
        divisor, wire = _divisor(group, config), wire_dtype_named(config.wire_dtype)
        is_ordered = config.reduction == "ordered"
        in_order = exchanges_over(group, in_order=True, divisor=divisor, wire=wire) if is_ordered else None
        how = {"in_order": in_order, "wire": wire, "nonfinite": config.nonfinite, "overlap": config.overlap}
        mean_divisor = _divisor(group, dataclasses.replace(config, op="mean"))
        return cls(group, config.average_in_collective, divisor, mean_divisor=mean_divisor, **how)  # type: ignore[arg-type]

    def factor(self, op: str | None) -> float:
        """What its results are to be multiplied by for that op; None is that of the settings."""
        return 1.0 if op is None else self.divisor / (1 if op == "sum" else self.mean_divisor)

    def __post_init__(self) -> None:
        if self.hook is not None and self.wire is not None:
            raise no_hook_with_wire_dtype(self.wire)

    @property
    def is_active(self) -> bool:
        """Whether there is anything to do: one rank alone has its mean already, unless a hook or a divisor changes it."""
        return self.group.num_ranks > 1 or self.hook is not None or self.divisor != 1

    def averages(self, dtype: torch.dtype) -> bool:
        """Whether the backend divides; else we divide before a sum, which may be too large for 16 bits."""
        is_mean = self.divisor == self.group.num_ranks
        fits = dtype is not torch.float16 or not self.group.is_over_gloo  # NCCL divides what each rank gives
        return is_mean and fits and self.average_in_collective and self.group.user.can_average and self.wire is None

    def trailer_divisor(self, dtype: torch.dtype) -> float:
        """By what trailers of buckets of `dtype` come back divided: those of shards are added up."""
        is_divided = self.shard_exchanges is None and (self.averages(dtype) or self.in_order is not None)
        return self.divisor if is_divided else 1

    def close(self) -> None:
        """Ends threads that hold something of ours."""
        for owner in (self.in_order, self.hook):
            if owner is not None:
                owner.close()

    def reduce(self, tensor: Tensor, *, numel: int) -> Handle:
        """Starts the mean of `tensor`, or its sum, in place; what is behind `numel` elements may come back as a sum anyway."""
        if self.in_order is not None and not tensor.is_sparse:
            return self.in_order.all_reduce(tensor)
        if self.averages(tensor.dtype) and not tensor.is_sparse:
            return self.group.all_reduce_async(tensor, dist.ReduceOp.AVG)
        if self.divisor != 1:
            (tensor if tensor.is_sparse else tensor[:numel]).div_(self.divisor)
        narrow = cast_for_wire(tensor, self.wire)
        handle = self.group.all_reduce_async(narrow)
        return handle if narrow is tensor else CastBack(handle, narrow, into=tensor)

    def as_sent(self, values: Tensor) -> Tensor:
        """A copy of `values` as they travel in a reduction; in their own dtype they are what they are."""
        if not travels_narrower(values.dtype, self.wire):
            return values
        exchanges = self.shard_exchanges or self.in_order
        return cast_for_wire(values / self.divisor if exchanges is None or exchanges.divides_first else values, self.wire)

    def wire_bytes(self, bucket: Bucket) -> int:
        """The bytes of a bucket that collectives are handed; 0 if a communication hook sends it."""
        if self.hook is not None:
            return 0
        dtype = getattr(torch, bucket.dtype)
        if self.wire is None or not travels_narrower(dtype, self.wire):
            return bucket.wire_bytes
        # Of shards the trailer is a message of its own.
        num_wide = 0 if self.shard_exchanges is None else bucket.storage_numel - bucket.trailer.start
        return (bucket.storage_numel - num_wide) * self.wire.itemsize + num_wide * bucket.itemsize


def _divisor(group: OwnGroup, config: SyncConfig) -> float:
    """Of the sum over ranks; the settings of a group of experts have that group, and no other ones have any."""
    if config.op == "sum":
        return 1
    own = config.experts[0].divisor if config.experts else None
    return group.num_ranks if own is None else own
