"""What a rank owns of a bucket: its shard of the parameters, in the memory where the whole of them is used.

flat        | parameter | parameter | parameter | padding |      one allocation; each parameter is a view of it
own                     |   own shard   |                        a rank's equal part of it, gathered in place
parts                   | part  | part  |                        of each parameter what lies in that, 1-D; may be empty
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.plan import Bucket, Slot
from undertow.runtime.buckets import strides_of_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """What a rank owns of one parameter in one bucket: elements [start, stop) of the parameter as it lies in memory."""

    param: int  # index into Plan.params
    bucket: int
    start: int
    stop: int
    in_bucket: int  # where it starts in the bucket
    in_shard: int  # where it starts in the rank's shard

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of_shard(self, shard: Tensor) -> Tensor:
        return shard[self.in_shard : self.in_shard + self.numel]

    def of_bucket(self, flat: Tensor) -> Tensor:
        return flat[self.in_bucket : self.in_bucket + self.numel]


def shard_parts(bucket: Bucket, *, rank: int, num_replicas: int = 1) -> list[ShardPart]:
    """One for each slot; of a slot that lies outside of the rank's shard it is empty."""
    own, parts = bucket.shard_range(rank, num_replicas=num_replicas), []
    for slot in bucket.slots:
        first = min(max(slot.start, own.start), slot.stop)
        last = max(first, min(slot.stop, own.stop))
        parts.append(
            ShardPart(
                param=slot.param,
                bucket=bucket.index,
                start=slot.first + first - slot.start,
                stop=slot.first + last - slot.start,
                in_bucket=first,
                in_shard=max(0, first - own.start),
            )
        )
    return parts


class FlatParams:
    """Moves the parameters of one bucket into one piece of memory."""

    def __init__(self, bucket: Bucket, params: Sequence[Tensor], parts: Sequence[ShardPart], *, num_ranks: int) -> None:
        self.params = tuple(params)
        # The parameters' own; that of the bucket is their gradients'.
        dtype = params[0].dtype if params else getattr(torch, bucket.dtype)
        device = torch.device(bucket.device)
        self.flat = torch.zeros(num_ranks * bucket.shard_numel, dtype=dtype, device=device)  # [ranks * shard], padded
        # Of parameters in several buckets, which keep memory of their own; with the strides that they are to have.
        self._pieces: list[tuple[Slot, ShardPart, Tensor, tuple[int, ...]]] = []
        self._places: list[tuple[Tensor, Tensor]] = []  # the others, and the views that they are
        with torch.no_grad():
            for slot, part, param in zip(bucket.slots, parts, params, strict=True):
                strides = strides_of_gradient(param)
                if slot.numel != param.numel():
                    self._pieces.append((slot, part, param, strides))
                    continue
                place = self.flat.as_strided(param.shape, strides, slot.start)
                self._places.append((param, place))
                _put(param, place)
        self._pointers = self._present_pointers()
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over what somebody else has written: into other memory (`param.data = ...`), or where pieces come from."""
        if self._present_pointers() != self._pointers:
            for param, place in self._places:
                if param.data_ptr() != place.data_ptr():
                    _put(param, place)
        for _, part, param, strides in self._pieces:  # of which the other ranks' parts come with the next gather
            part.of_bucket(self.flat).copy_(_in_memory(param, strides)[part.start : part.stop])

    def copy_out(self) -> None:
        """What is in pieces gets its own: called when all of `flat` is there, maybe from another thread."""
        for slot, _, param, strides in self._pieces:
            _in_memory(param, strides)[slot.first : slot.first + slot.numel] = self.flat[slot.start : slot.stop]

    def mark_written(self) -> None:
        """Has autograd know that the parameters have other values now."""
        if self.params:
            torch.autograd.graph.increment_version(self.params)

    def _present_pointers(self) -> list[int]:
        return [param.data_ptr() for param, _ in self._places]


def in_memory_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The elements of `tensor` in the order in which something dense of its shape with these strides has them. [numel]"""
    if tensor.layout is torch.strided and tensor.stride() == strides:
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(tensor.shape, strides).copy_(tensor.detach())
    return flat


def _put(param: Tensor, place: Tensor) -> None:
    """Moves a parameter; torch keeps its version, so that autograd sees no change where there is none."""
    place.copy_(param)
    param.data = place


def _in_memory(param: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The elements of a parameter as they lie, in place; it gets these strides. [numel]"""
    if param.stride() != strides:
        param.data = torch.empty_strided(param.shape, strides, dtype=param.dtype, device=param.device).copy_(param.data)
    return param.detach().as_strided((param.numel(),), (1,))
