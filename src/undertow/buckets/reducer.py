"""Reduces values over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.comm_hook import CommHook
from undertow.buckets.finite import FiniteCheck
from undertow.buckets.lost import LostValues
from undertow.buckets.trailer import TrailerCodec
from undertow.config import SyncConfig, refused
from undertow.plan import Bucket
from undertow.plan.layout import equal_parts
from undertow.ranks.exchanges import Exchanges, exchanges_over
from undertow.ranks.handle import Handle
from undertow.ranks.parcels import Encoded
from undertow.ranks.transport import OwnGroup
from undertow.wire import WIRES


@dataclass(frozen=True)
class Reducer:
    """The reduction over all ranks: their mean, or the result of the user's hook."""

    group: OwnGroup
    config: SyncConfig
    # adds in rank order, if the settings ask for it, and exchanges gradients in a format
    exchanges: Exchanges | None
    hook: CommHook | None = None

    @classmethod
    def of(cls, group: OwnGroup, config: SyncConfig) -> Reducer:
        """Creates the reducer for these settings."""
        exchanges = None
        if config.reduction == "ordered" or config.wire is not None:
            exchanges = exchanges_over(group, config, divisor=group.num_ranks)
        return cls(group, config, exchanges)

    def __post_init__(self) -> None:
        has_format = (self.config.wire, self.config.param_wire) != (None, None)
        if self.hook is not None and has_format:
            raise refused("hook", "wire", where="register_comm_hook, with wire=...")

    @cached_property
    def is_active(self) -> bool:
        """True if there is work: a single rank has its mean already, unless a hook changes it."""
        return self.group.num_ranks > 1 or self.hook is not None

    @cached_property
    def finite(self) -> FiniteCheck | None:
        """Looks for values that are not finite; None with nonfinite="ignore"."""
        is_off = self.config.nonfinite == "ignore"
        return None if is_off else FiniteCheck(is_host=self.group.hardware.is_host)

    @cached_property
    def lost(self) -> LostValues:
        """Counts the values that formats lose."""
        return LostValues(self.group.hardware)

    def close(self) -> None:
        """Ends the threads of the exchanges and the hook."""
        for owner in (self.exchanges, self.hook):
            if owner is not None:
                owner.close()

    def parcel_of(self, spec: Bucket) -> Encoded | None:
        """Returns how a dense bucket travels in a format; None in full width."""
        if spec.wire is None or self.exchanges is None:
            return None
        parts = equal_parts(self.group.num_ranks, spec.shard_numel, stop=spec.numel)
        dtype, is_host = getattr(torch, spec.dtype), self.group.hardware.is_host
        return Encoded(WIRES[spec.wire], dtype, spec.narrow_numel, parts, is_host=is_host)

    def mark_nonfinite(
        self,
        values: Sequence[Tensor],
        spec: Bucket,
        trailer: TrailerCodec,
        parcel: Encoded | None = None,
    ) -> None:
        """Marks values to be sent in the trailer that are not finite, or would not be in the format
        of `parcel`, unless nonfinite="ignore"."""
        if self.finite is None:
            return
        largest = torch.finfo(getattr(torch, spec.dtype)).max
        if parcel is not None:
            largest = min(largest, parcel.wire.largest)
        self.finite.check(values, spec, trailer, largest)

    def reduce_each(self, tensors: Sequence[Tensor]) -> Sequence[Handle]:
        return [self.reduce(tensor) for tensor in tensors]

    def reduce(self, tensor: Tensor) -> Handle:
        """Starts to reduce `tensor` in place, dense or sparse, in full width."""
        if not tensor.is_sparse:
            if self._ordered is not None:
                return self._ordered.all_reduce(tensor)
            if self.averages(tensor.dtype):
                return self.group.all_reduce_unnamed(tensor, dist.ReduceOp.AVG)
        tensor.div_(self._num_ranks)
        return self.group.all_reduce_unnamed(tensor)

    @cached_property
    def _num_ranks(self) -> Tensor:
        """The number of ranks. [] float32 on the host

        A division by a number makes a tensor of it each time, and casts it: for a small bucket this
        takes as long as the division. The bits are the same.
        """
        return torch.tensor(self.group.num_ranks, dtype=torch.float32, device="cpu")

    @cached_property
    def _ordered(self) -> Exchanges | None:
        """The exchanges, if they add whole values in rank order."""
        return self.exchanges if self.config.reduction == "ordered" else None

    def averages(self, dtype: torch.dtype) -> bool:
        """Returns True if the backend divides dense tensors; one that divides last may overflow in
        fp16."""
        if self._ordered is not None:
            return False
        can = self.group.can
        may_overflow = dtype is torch.float16 and not can.divide_first
        return self.config.average_in_collective and can.average and not may_overflow
