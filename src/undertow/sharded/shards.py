"""A rank's shard of a bucket's parameters, in the memory that also holds the whole parameters.

flat        | parameter | parameter | parameter | padding |      one allocation for all
own                     |   own shard   |                        a rank's part, gathered in place
parts                   | part  | part  |                        a parameter's elements in it
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from undertow.buckets.binding import strides_of_gradient
from undertow.plan import Bucket, Slot
from undertow.torch_private import private


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """A rank's part of one parameter in one bucket.

    Elements [start, stop) of the parameter in memory order.
    """

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


@dataclass(frozen=True, slots=True, eq=False)
class _FlatParam:
    """One parameter in `flat`."""

    part: ShardPart
    param: Tensor
    memory: Tensor  # [param.numel()] of `flat`
    strides: tuple[int, ...]  # of the parameter's memory order

    def read_part(self) -> None:
        """Copies this rank's part from the parameter, which has separate memory."""
        own = slice(self.part.start, self.part.stop)
        self.memory[own].copy_(in_memory_order(self.param, self.strides)[own])

    def write(self) -> None:
        """Copies all of it to the parameter, which has separate memory."""
        values = in_memory_order(self.param, self.strides)
        values.copy_(self.memory)
        if self.param.stride() != self.strides:  # `values` is a copy
            self.param.copy_(values.as_strided(self.param.shape, self.strides))

    def moves_in(self) -> bool:
        """Gives the whole parameter its place in `flat`, unless other code refers to its memory.

        Returns True if it is there.
        """
        param = self.param
        if param.data_ptr() == self.memory.data_ptr():
            return True
        storage = param.untyped_storage()
        # on GPUs this is always True
        is_of_processes = param.device.type == "cpu" and storage.is_shared()
        if is_of_processes or private.are_shared(private.addresses_of([storage])):
            return False
        self.memory.as_strided(param.shape, self.strides).copy_(param)
        # A storage of exactly its size over the same memory, which it keeps alive: savers write
        # whole storages, and safetensors refuses tensors that cover only part of theirs. As bytes,
        # because DLPack does not support every dtype.
        memory = from_dlpack(self.memory.view(torch.uint8)).view(self.memory.dtype)
        # This keeps the version counter: the values have not changed, and autograd must not see a
        # change.
        param.data = memory.as_strided(param.shape, self.strides)
        return True


class FlatParams:
    """Moves the parameters of one bucket into one allocation.

    Parameters keep their memory if other code refers to it (a kept `state_dict()`, `param.data`,
    another process), because that code must see every step. Gathered values are copied to it.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[Tensor],
        *,
        rank: int,
        num_ranks: int,
        num_replicas: int = 1,
    ) -> None:
        self.params = tuple(params)
        # The parameters' dtype; the bucket has the gradients' dtype.
        dtype = params[0].dtype if params else getattr(torch, bucket.dtype)
        # [ranks * shard]
        self.flat = torch.empty(num_ranks * bucket.shard_numel, dtype=dtype, device=bucket.device)
        self.flat[bucket.numel :].zero_()  # padding
        shard = bucket.shard_range(rank, num_replicas=num_replicas)
        self._slots = [
            _FlatParam(
                _part_of(bucket, slot, shard),
                param,
                self.flat[slot.start : slot.stop],
                strides_of_gradient(param),
            )
            for slot, param in zip(bucket.slots, params, strict=True)
        ]
        self.parts = tuple(slot.part for slot in self._slots)  # empty ones too
        self._apart = self._slots  # parameters with separate memory
        self._pointers: list[int] = []  # of the parameters, at the last look
        self._storages: list[torch.UntypedStorage] = []  # held, so that their addresses stay valid
        # Of the parameters' memory, for `private.are_shared`; `copy_out` shares it too.
        self.addresses: list[int] = []
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over values written from outside, in new memory (`param.data = ...`) or in the
        separate memory of parameters."""
        # Other code may have released the memory of those that are apart.
        if self._apart or list(map(Tensor.data_ptr, self.params)) != self._pointers:
            self._apart = [slot for slot in self._slots if not slot.moves_in()]
            self._pointers = list(map(Tensor.data_ptr, self.params))
            self._storages = [param.untyped_storage() for param in self.params]
            self.addresses = private.addresses_of(self._storages)
        for slot in self._apart:  # the other ranks' parts of these come with the next gather
            slot.read_part()

    def copy_out(self) -> None:
        """Copies gathered values to parameters with separate memory, maybe from another thread.

        All of `flat` must be there.
        """
        with private.as_plain_tensors():  # the parameters are in flight until this returns
            for slot in self._apart:
                slot.write()


def _part_of(bucket: Bucket, slot: Slot, shard: range) -> ShardPart:
    """Returns the part of a slot within a rank's shard, which may be empty."""
    first = min(max(slot.start, shard.start), slot.stop)
    last = max(first, min(slot.stop, shard.stop))
    return ShardPart(
        param=slot.param,
        bucket=bucket.index,
        start=first - slot.start,
        stop=last - slot.start,
        in_bucket=first,
        in_shard=max(0, first - shard.start),
    )


def in_memory_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Returns the elements of `tensor` in the memory order of a dense tensor with these strides.

    [numel]
    """
    if tensor.layout is torch.strided and tensor.stride() == strides:
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(tensor.shape, strides).copy_(tensor.detach())
    return flat
