"""How the values of one bucket travel, chosen when the bucket is made.

AllReduce         in full width, with the trailer in the same message
EncodedExchange   in a format: ranks exchange parts; the trailer stays in full width
HookedReduction   by the user's communication hook; a small all-reduce has the trailer
SparseReduction   one all-reduce for each sparse gradient, and a small one for the trailer

`sharded/gradients.py` has the transfer of shards. Tensors in full width are reduced by the
`Reducer`, which all buckets of a plan share.

Reasons: docs/design/exchanges.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.comm_hook import CommHook, HookedBucket
from undertow.buckets.facts import TrailerCodec
from undertow.buckets.finite import FiniteCheck
from undertow.buckets.gradients import FlatGradients
from undertow.buckets.lost import LostValues
from undertow.buckets.sparse import SparseGradients
from undertow.config import SyncConfig, refused
from undertow.plan import Bucket, Plan
from undertow.plan.layout import equal_parts
from undertow.ranks.dither import Rounding, Turn
from undertow.ranks.exchanges import Exchanges, exchanges_over
from undertow.ranks.handle import Handle
from undertow.ranks.parcels import Encoded
from undertow.ranks.transport import OwnGroup
from undertow.schedule import OpKind
from undertow.wire import WIRES


class BucketTransfer(ABC):
    """Reduces the packed values of one bucket, and its trailer, over all ranks. `LiveBucket` calls
    it.

        start ──> [start_across ──>] handles to wait for
        start_late ──> handles to wait for          gradients that arrived after `start`

    `memory` holds the trailer, which `trailer` writes and reads. `wire_bytes` are passed to
    collectives in a reduction, 0 if a hook passes them. `encoded` are the messages in a format,
    which note how long coding took.
    """

    kind: ClassVar = OpKind.ALL_REDUCE  # of `start`, in the schedule
    sums_trailer: ClassVar = False  # the trailer becomes its sum over ranks, and not its mean

    def __init__(
        self,
        spec: Bucket,
        reducer: Reducer,
        memory: FlatGradients | SparseGradients,
        *,
        wire_bytes: int,
        encoded: Sequence[Encoded] = (),
    ) -> None:
        self.spec, self.reducer = spec, reducer
        self.wire_bytes, self.encoded = wire_bytes, encoded
        group = reducer.group
        divisor = 1 if self.sums_trailer else group.num_ranks
        self.trailer = TrailerCodec(
            spec, memory, divisor=divisor, rank=group.rank, names=group.names
        )

    @abstractmethod
    def start(self, turn: Turn) -> Sequence[Handle]:
        """Sends the packed values and the trailer; before, it may mark values that are not finite.

        `turn` has the offsets of this synchronization, for formats that take them.
        """

    def start_across(self, inside: Sequence[Handle], turn: Turn) -> Sequence[Handle]:
        """Continues after `inside`, which `start` has returned, over the second axis of a mesh, if
        the strategy has one."""
        raise NotImplementedError

    def start_late(self, values: Sequence[Tensor]) -> Sequence[Handle]:
        """Starts to reduce values that lie outside of the bucket, in place and in full width."""
        return self.reducer.reduce_each(values)

    def _mark_nonfinite(self, values: Sequence[Tensor], parcel: Encoded | None = None) -> None:
        """Marks values to be sent in the trailer that are not finite, or would not be in the format
        of `parcel`, unless nonfinite="ignore"."""
        finite = self.reducer.finite
        if finite is None:
            return
        largest = torch.finfo(getattr(torch, self.spec.dtype)).max
        if parcel is not None:
            largest = min(largest, parcel.wire.largest)
        finite.check(values, self.spec, self.trailer, largest)


def transfer_of(
    spec: Bucket, plan: Plan, gradients: FlatGradients | SparseGradients, reducer: Reducer
) -> BucketTransfer:
    """Returns the transfer of a bucket whose gradients are whole on every rank."""
    if reducer.hook is not None and spec.slots:
        return HookedReduction(spec, gradients, reducer, reducer.hook)
    if isinstance(gradients, SparseGradients):
        return SparseReduction(spec, gradients, reducer)
    parcel = reducer.parcel_of(spec)
    if parcel is not None:
        return EncodedExchange(spec, plan, gradients, reducer, parcel)
    return AllReduce(spec, gradients, reducer)


class AllReduce(BucketTransfer):
    """An all-reduce in full width, by the backend or added in rank order."""

    def __init__(self, spec: Bucket, gradients: FlatGradients, reducer: Reducer) -> None:
        super().__init__(spec, reducer, gradients, wire_bytes=spec.wire_bytes)
        self._gradients = gradients

    def start(self, turn: Turn) -> Sequence[Handle]:
        if self.reducer.finite is not None:
            self._mark_nonfinite(self._gradients.values())
        return (self.reducer.reduce(self._gradients.flat),)


class EncodedExchange(BucketTransfer):
    """An exchange of parts in a format."""

    sums_trailer = True

    def __init__(
        self, spec: Bucket, plan: Plan, gradients: FlatGradients, reducer: Reducer, parcel: Encoded
    ) -> None:
        wire_bytes = sum(parcel.sizes) + spec.trailer_bytes
        super().__init__(spec, reducer, gradients, wire_bytes=wire_bytes, encoded=(parcel,))
        self._plan, self._gradients, self._parcel = plan, gradients, parcel

    def start(self, turn: Turn) -> Sequence[Handle]:
        reducer, gradients = self.reducer, self._gradients
        if reducer.finite is not None:
            self._mark_nonfinite(gradients.values(), self._parcel)
        flat = gradients.flat
        parcel = self._parcel.dithered(
            turn, Rounding.OWN, rank=reducer.group.rank, device=flat.device
        )
        if reducer.lost.is_counting:
            reducer.lost.count(flat, self.spec, self._plan, parcel)
        assert reducer.exchanges is not None  # a parcel is theirs
        return (reducer.exchanges.all_reduce(flat, parcel, trailer=gradients.trailer),)


class HookedReduction(BucketTransfer):
    """The user's communication hook, once for a dense bucket or for each sparse gradient."""

    def __init__(
        self,
        spec: Bucket,
        gradients: FlatGradients | SparseGradients,
        reducer: Reducer,
        hook: CommHook,
    ) -> None:
        super().__init__(spec, reducer, gradients, wire_bytes=0)
        self._gradients, self._hook = gradients, hook
        params = gradients.params
        # the parameters of each call
        self._params = [[param] for param in params] if spec.is_sparse else [params]

    def start(self, turn: Turn) -> Sequence[Handle]:
        values = self._gradients.values()
        self._mark_nonfinite(values)
        return (*self._call_hook(values), self.reducer.reduce(self._gradients.trailer))

    def start_late(self, values: Sequence[Tensor]) -> Sequence[Handle]:
        return self._call_hook(values)

    def _call_hook(self, values: Sequence[Tensor]) -> Sequence[Handle]:
        index, group = self.spec.index, self.reducer.group
        last = len(values) - 1 if self.spec.trailer.facts else None
        handles: list[Handle] = []
        for place, (value, params) in enumerate(zip(values, self._params, strict=True)):
            bucket = HookedBucket(index, value, params, is_last=place == last)
            handles.append(self._hook.start(bucket, group))
        return handles


class SparseReduction(BucketTransfer):
    """An all-reduce for each sparse gradient."""

    def __init__(self, spec: Bucket, gradients: SparseGradients, reducer: Reducer) -> None:
        super().__init__(spec, reducer, gradients, wire_bytes=spec.wire_bytes)
        self._gradients = gradients

    def start(self, turn: Turn) -> Sequence[Handle]:
        values = self._gradients.values()
        self._mark_nonfinite(values)
        return self.reducer.reduce_each([*values, self._gradients.trailer])


@dataclass(frozen=True)
class Reducer:
    """The reduction over all ranks, in full width. It also has what all transfers share: the ranks,
    the settings, and the user's hook, which `HookedReduction` calls."""

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

    def reduce_each(self, tensors: Sequence[Tensor]) -> Sequence[Handle]:
        return [self.reduce(tensor) for tensor in tensors]

    def reduce(self, tensor: Tensor) -> Handle:
        """Starts to reduce `tensor` in place, dense or sparse, in full width."""
        if not tensor.is_sparse:
            if self._ordered is not None:
                return self._ordered.all_reduce(tensor)
            # A backend that divides last may overflow in fp16.
            may_overflow = tensor.dtype is torch.float16 and not self.group.can.divide_first
            if self._averages and not may_overflow:
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

    @cached_property
    def _averages(self) -> bool:
        """True if the backend divides dense tensors."""
        return self.config.average_in_collective and self.group.can.average
