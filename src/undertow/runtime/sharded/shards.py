"""What a rank owns of a bucket: its shard of the parameters, in the memory where the whole of them is used.

flat        | parameter | parameter | parameter | padding |      one allocation; each parameter is a tensor over its part
own                     |   own shard   |                        a rank's equal part of it, gathered in place
parts                   | part  | part  |                        of each parameter what lies in that, 1-D; may be empty
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from undertow.plan import Bucket, Slot
from undertow.runtime.gradients.storage import strides_of_gradient
from undertow.runtime.torch_private import private


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
    """Moves the parameters of one bucket into one piece of memory.

    Those that lie in other buckets too keep memory of their own, into which the gathered pieces are copied. So do those whose
    memory something else refers to (a `state_dict()` that is kept, `param.data`, another process), which is to see every step.
    """

    def __init__(self, bucket: Bucket, params: Sequence[Tensor], parts: Sequence[ShardPart], *, num_ranks: int) -> None:
        self.params = tuple(params)
        # The parameters' own; that of the bucket is their gradients'.
        dtype = params[0].dtype if params else getattr(torch, bucket.dtype)
        device = torch.device(bucket.device)
        self.flat = torch.zeros(num_ranks * bucket.shard_numel, dtype=dtype, device=device)  # [ranks * shard], padded
        self._slots = [
            _Slot(slot, part, param, strides_of_gradient(param), is_whole=slot.numel == param.numel())
            for slot, part, param in zip(bucket.slots, parts, params, strict=True)
        ]
        self.whole_params = tuple(slot.param for slot in self._slots if slot.is_whole)
        self.split_params = tuple(slot.param for slot in self._slots if not slot.is_whole)
        self._apart: dict[int, _Slot] = {}  # by position, those with memory of their own
        self._pointers = [-1] * len(params)  # where each was when we last looked
        self._storages: list[torch.UntypedStorage] = []  # held, so that their addresses stay theirs
        self._addresses: list[int] = []
        self._copying = threading.Lock()
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over what somebody else has written: into other memory (`param.data = ...`), or where pieces come from."""
        moved = {position for position, slot in self._apart.items() if slot.is_whole}  # nobody may refer to them any more
        if moved or self._present_pointers() != self._pointers:
            for position, slot in enumerate(self._slots):
                if position in moved or slot.param.data_ptr() != self._pointers[position]:
                    self._take_over(position, slot)
            self._pointers = self._present_pointers()
            self._storages = [param.untyped_storage() for param in self.params]
            self._addresses = private.addresses_of(self._storages)
        for slot in self._apart.values():  # of which the other ranks' parts come with the next gather
            if slot.is_whole:
                self._place(slot).copy_(slot.param)
            else:
                slot.part.of_bucket(self.flat).copy_(slot.in_memory()[slot.part.start : slot.part.stop])

    def copy_out(self) -> None:
        """What has memory of its own gets its piece: called when all of `flat` is there, maybe from another thread."""
        with self._copying, private.as_plain_tensors():  # which are on their way until this returns
            for slot in self._apart.values():
                if slot.is_whole:
                    slot.param.copy_(self._place(slot))
                else:
                    slot.in_memory()[slot.piece.first : slot.piece.first + slot.piece.numel] = self._of(slot)

    @property
    def is_referred_to(self) -> bool:
        """Whether anything but a parameter refers to its memory, so that nobody knows when that is read."""
        if not private.are_shared(self._addresses):
            return False
        with self._copying:  # while another thread copies out, it refers to that memory too
            return private.are_shared(self._addresses)

    def mark_written(self) -> None:
        """Has autograd know that the parameters have other values now."""
        if self.params:
            torch.autograd.graph.increment_version(self.params)

    def _take_over(self, position: int, slot: _Slot) -> None:
        param, storage = slot.param, slot.param.untyped_storage()
        is_of_processes = param.device.type == "cpu" and storage.is_shared()  # on GPUs all say so
        if is_of_processes or private.are_shared(private.addresses_of([storage])) or not slot.is_whole:
            self._apart[position] = slot
            return
        self._apart.pop(position, None)
        self._place(slot).copy_(param)
        # Torch keeps its version, so that autograd sees no change where there is none.
        param.data = _over(self._of(slot)).as_strided(param.shape, slot.strides)

    def _of(self, slot: _Slot) -> Tensor:
        """[piece.numel]"""
        return self.flat[slot.piece.start : slot.piece.stop]

    def _place(self, slot: _Slot) -> Tensor:
        """The same of a whole parameter, of its shape."""
        return self._of(slot).as_strided(slot.param.shape, slot.strides)

    def _present_pointers(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.params))


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """One parameter of a bucket."""

    piece: Slot
    part: ShardPart
    param: Tensor
    strides: tuple[int, ...]  # that it is to have
    is_whole: bool  # no other bucket has a piece of it

    def in_memory(self) -> Tensor:
        """The elements of the parameter as they lie, in place; it gets its strides. [numel]"""
        param, strides = self.param, self.strides
        if param.stride() != strides:
            param.data = torch.empty_strided(param.shape, strides, dtype=param.dtype, device=param.device).copy_(param.data)
        return param.detach().as_strided((param.numel(),), (1,))


def in_memory_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The elements of `tensor` in the order in which something dense of its shape with these strides has them. [numel]"""
    if tensor.layout is torch.strided and tensor.stride() == strides:
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(tensor.shape, strides).copy_(tensor.detach())
    return flat


def _over(part: Tensor) -> Tensor:
    """Returns a tensor over the memory of `part`, with a storage of just that size; it keeps the whole memory alive.

    Savers write storages whole, and safetensors refuses tensors that cover theirs only in part.
    """
    return from_dlpack(part.view(torch.uint8)).view(part.dtype)  # as bytes, because DLPack does not know every dtype
