"""Reduces values over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.comm_hook import CommHook
from undertow.buckets.finite import FiniteCheck
from undertow.buckets.lost import LostValues
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
        """Looks for values that are not finite; None if nobody asks for them."""
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

    def reducing(self, dtype: torch.dtype) -> Callable[[Tensor], Handle]:
        """Returns the call that starts to reduce a dense tensor of `dtype` in place, in full
        width."""
        if self.exchanges is not None and self.config.reduction == "ordered":
            return self.exchanges.all_reduce
        can = self.group.can
        may_overflow = dtype is torch.float16 and not can.divide_first
        if self.config.average_in_collective and can.average and not may_overflow:
            return partial(self.group.all_reduce_async, op=dist.ReduceOp.AVG)
        return self._divided

    def reduce(self, tensor: Tensor) -> Handle:
        """Starts to reduce `tensor` in place, dense or sparse, in full width."""
        return self._divided(tensor) if tensor.is_sparse else self.reducing(tensor.dtype)(tensor)

    def _divided(self, tensor: Tensor) -> Handle:
        tensor.div_(self.group.num_ranks)
        return self.group.all_reduce_async(tensor)
