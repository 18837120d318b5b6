"""A rank's shard of a bucket's parameters, in the memory that also holds the whole parameters.

flat        | parameter | parameter | parameter | padding |      one allocation; each parameter is a tensor over its part
own                     |   own shard   |                        a rank's equal part of it, gathered in place
parts                   | part  | part  |                        the part of each parameter within it, 1-D; may be empty
"""

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
    """A rank's part of one parameter in one bucket: elements [start, stop) of the parameter in memory order."""

    param: int  # index into Plan.params
    bucket: int
    start: int
    stop: int
    in_bucket: int  # its start in the bucket
    in_shard: int  # its start in the rank's shard

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of_shard(self, shard: Tensor) -> Tensor:
        return shard[self.in_shard : self.in_shard + self.numel]

    def of_bucket(self, flat: Tensor) -> Tensor:
        return flat[self.in_bucket : self.in_bucket + self.numel]


def shard_parts(bucket: Bucket, *, rank: int, num_replicas: int = 1) -> list[ShardPart]:
    """Returns one part for each slot, empty if the slot lies outside of the rank's shard."""
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


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    piece: Slot
    part: ShardPart
    param: Tensor
    memory: Tensor  # [piece.numel] of `flat`
    strides: tuple[int, ...]  # the strides to give it
    is_whole: bool  # no other bucket has a piece of it

    @property
    def place(self) -> Tensor:
        return self.memory.as_strided(self.param.shape, self.strides)

    def in_memory(self) -> Tensor:
        """Returns the parameter's elements in memory order, in place, and gives it its strides. [numel]"""
        param, strides = self.param, self.strides
        if param.stride() != strides:
            param.data = torch.empty_strided(param.shape, strides, dtype=param.dtype, device=param.device).copy_(param.data)
        return param.detach().as_strided((param.numel(),), (1,))


class FlatParams:
    """Moves the parameters of one bucket into one allocation.

    Parameters that also lie in other buckets keep their memory, and gathered pieces are copied to it. So do parameters whose
    memory other code refers to (a kept `state_dict()`, `param.data`, another process), because that code must see every step.
    """

    def __init__(self, bucket: Bucket, params: Sequence[Tensor], parts: Sequence[ShardPart], *, num_ranks: int) -> None:
        self.params, self.parts = tuple(params), tuple(parts)
        # The parameters' dtype; the bucket has the gradients' dtype.
        dtype = params[0].dtype if params else getattr(torch, bucket.dtype)
        self.flat = torch.empty(num_ranks * bucket.shard_numel, dtype=dtype, device=bucket.device)  # [ranks * shard]
        self.flat[bucket.numel :].zero_()  # padding
        self._slots = [
            _Slot(slot, part, param, self.flat[slot.start : slot.stop], strides_of_gradient(param), slot.numel == param.numel())
            for slot, part, param in zip(bucket.slots, parts, params, strict=True)
        ]
        self.split_params = tuple(slot.param for slot in self._slots if not slot.is_whole)
        self._apart: dict[int, _Slot] = {}  # by position, parameters with separate memory
        self._pointers = [-1] * len(params)  # data pointers at the last look
        self._storages: list[torch.UntypedStorage] = []  # held, so that their addresses stay valid
        # Of these, for `private.are_shared`; parameters with separate memory are apart.
        self.addresses: list[int] = []
        self._addresses_apart: list[int] = []
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over values written from outside, in new memory (`param.data = ...`) or in the separate memory of parameters."""
        # Other code may have released these.
        moved = {position for position, slot in self._apart.items() if slot.is_whole} if self._apart else set()
        if moved or list(map(Tensor.data_ptr, self.params)) != self._pointers:
            for position, slot in enumerate(self._slots):
                if position in moved or slot.param.data_ptr() != self._pointers[position]:
                    self._take_over(position, slot)
            self._pointers = list(map(Tensor.data_ptr, self.params))
            self._storages = [param.untyped_storage() for param in self.params]
            addresses = private.addresses_of(self._storages)
            self.addresses = [each for at, each in enumerate(addresses) if at not in self._apart]
            self._addresses_apart = list(map(addresses.__getitem__, self._apart))
        # True if other tensors share that memory. Later, a thread that copies out refers to it too.
        apart = self._addresses_apart
        self.is_shared_apart = bool(apart) and private.are_shared(apart)
        for slot in self._apart.values():  # the other ranks' parts of these come with the next gather
            values = in_memory_order(slot.param, slot.strides) if slot.is_whole else slot.in_memory()
            slot.part.of_bucket(self.flat).copy_(values[slot.part.start : slot.part.stop])

    def copy_out(self) -> None:
        """Copies gathered values to parameters with separate memory, maybe from another thread; all of `flat` must be there."""
        with private.as_plain_tensors():  # the parameters are in flight until this returns
            for slot in self._apart.values():
                if slot.is_whole:
                    slot.param.copy_(slot.place)
                else:
                    slot.in_memory()[slot.piece.first : slot.piece.first + slot.piece.numel] = slot.memory

    def _take_over(self, position: int, slot: _Slot) -> None:
        param, storage = slot.param, slot.param.untyped_storage()
        is_of_processes = param.device.type == "cpu" and storage.is_shared()  # on GPUs this is always True
        if is_of_processes or private.are_shared(private.addresses_of([storage])) or not slot.is_whole:
            self._apart[position] = slot
            return
        self._apart.pop(position, None)
        slot.place.copy_(param)
        # A storage of exactly its size over the same memory, which it keeps alive: savers write whole storages, and safetensors
        # refuses tensors that cover only part of theirs. As bytes, because DLPack does not support every dtype.
        memory = from_dlpack(slot.memory.view(torch.uint8)).view(slot.memory.dtype)
        # This keeps the version counter: the values have not changed, and autograd must not see a change.
        param.data = memory.as_strided(param.shape, slot.strides)


def in_memory_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Returns the elements of `tensor` in the memory order of a dense tensor with these strides. [numel]"""
    if tensor.layout is torch.strided and tensor.stride() == strides:
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(tensor.shape, strides).copy_(tensor.detach())
    return flat
