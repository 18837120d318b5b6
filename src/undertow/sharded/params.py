"""The parameters of a bucket under a sharded optimizer: their memory, and this rank's part of each.

flat        | parameter | parameter | parameter | padding |      one allocation for all
own                     |   own shard   |                        a rank's part, gathered in place
parts                   | part  | part  |                        a parameter's elements in it
exact                   |   own shard   |                        in fp32, if `own` is rounded

Reasons: docs/design/sharded-optimizer.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.dlpack import from_dlpack

from undertow.buckets.gradients import strides_of_gradient
from undertow.device import device_of
from undertow.mesh.local_tensors import distributed, local_tensor, local_tensors
from undertow.plan import Bucket, Slot
from undertow.ranks.exchanges import accumulation_dtype
from undertow.ranks.parcels import Encoded
from undertow.torch_private import private
from undertow.wire import wire_for


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """A rank's part of one parameter in one bucket.

    Elements [start, stop) of the parameter in memory order.
    """

    param: int  # index into Plan.params
    bucket: int
    owner: int | None  # the rank that has all of the parameter; None: each rank has a part
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
class _ParamMemory:
    """One parameter in `flat`."""

    part: ShardPart
    held: Tensor  # as the user holds it
    memory: Tensor  # [numel] of `flat`
    strides: tuple[int, ...]  # of the parameter's memory order

    @property
    def param(self) -> Tensor:
        """The tensor on this rank; on a mesh it may be replaced."""
        return local_tensor(self.held)

    def read(self, elements: slice) -> None:
        """Copies elements from the parameter, which has separate memory."""
        self.memory[elements].copy_(in_memory_order(self.param, self.strides)[elements])

    def write(self) -> None:
        """Copies all of it to the parameter, which has separate memory."""
        param = self.param
        values = in_memory_order(param, self.strides)
        values.copy_(self.memory)
        if param.stride() != self.strides:  # `values` is a copy
            param.copy_(values.as_strided(param.shape, self.strides))

    def is_in_flat(self) -> bool:
        """Returns True if the parameter lies in `flat`."""
        return self.param.data_ptr() == self.memory.data_ptr()

    def move(self) -> None:
        """Moves the whole parameter to its place in `flat`, unless other code refers to its
        memory."""
        param = self.param
        storage = param.untyped_storage()
        # on GPUs this is always True
        is_of_processes = param.device.type == "cpu" and storage.is_shared()
        if is_of_processes or private.are_shared(private.addresses_of([storage])):
            return
        self.memory.as_strided(param.shape, self.strides).copy_(device_of(param.device).keep(param))
        # A storage of exactly its size over the same memory, which it keeps alive: savers write
        # whole storages, and safetensors refuses tensors that cover only part of theirs. As bytes,
        # because DLPack does not support every dtype.
        memory = from_dlpack(self.memory.view(torch.uint8)).view(self.memory.dtype)
        # This keeps the version counter: the values have not changed, and autograd must not see a
        # change.
        param.data = memory.as_strided(param.shape, self.strides)


class FlatParams:
    """Moves the parameters of one bucket into one allocation.

    Parameters keep their memory if other code refers to it (a kept `state_dict()`, `param.data`,
    another process), because that code must see every step. Gathered values are copied to it.

    `exact` has the values of this rank's shard that an optimizer updates, if all ranks hold rounded
    ones: of 16-bit parameters, and of parameters that travel in a format. It is None if the
    optimizer updates the parameters in place. In a format the differences `exact` - `own` travel,
    and every rank adds them as they arrive, the owner too. So all ranks hold the same, and the
    next difference contains the error of the one before.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[Tensor],
        *,
        rank: int,
        num_ranks: int,
        num_shards: int,
        param_wire: str | None = None,
    ) -> None:
        self.params = tuple(params)
        self._distributed = distributed(params)
        # The parameters' dtype; the bucket has the gradients' dtype.
        dtype = params[0].dtype if params else getattr(torch, bucket.dtype)
        # [ranks * shard]
        self.flat = torch.zeros(num_ranks * bucket.shard_numel, dtype=dtype, device=bucket.device)
        parts = bucket.parts(num_shards, num_ranks=num_ranks)
        shard = parts[rank]
        owners = bucket.owners or [None] * len(params)
        self._slots = [
            _ParamMemory(
                _part_of(bucket, slot, shard, owner),
                param,
                self.flat[slot.start : slot.stop],
                strides_of_gradient(local_tensor(param)),
            )
            for slot, param, owner in zip(bucket.slots, params, owners, strict=True)
        ]
        self.parts = tuple(slot.part for slot in self._slots)  # empty ones too
        self._apart = self._slots  # parameters with separate memory
        self._pointers: list[int] = []  # of the parameters, at the last look
        self._storages: list[torch.UntypedStorage] = []  # held, so that their addresses stay valid
        # The addresses of the parameters' memory, for `private.are_shared`; `copy_out` shares it
        # too.
        self.addresses: list[int] = []
        wide = accumulation_dtype(dtype)
        wire = wire_for(param_wire, str(dtype).removeprefix("torch."), dtype.itemsize)
        self.parcel: Encoded | None = None
        if wire is not None and num_shards > 1:
            is_host = device_of(self.flat.device).is_host
            self.parcel = Encoded(wire, wide, bucket.narrow_numel, parts, is_host=is_host)
        self.follow()
        self._own = self.flat[shard.start : shard.stop]
        self.exact: Tensor | None = None
        if dtype != wide or self.parcel is not None:
            self.exact = self._own.to(wide, copy=True)
        # the shard as all ranks have it, if differences travel
        self._common = None if self.parcel is None else self._own.clone()
        self._gaps = [] if self.parcel is None else _gaps_in(self.flat, bucket.slots, shard)

    def follow(self) -> None:
        """Takes over values written from outside, in new memory (`param.data = ...`) or in the
        separate memory of parameters."""
        # Other code may have released the memory of those that are apart.
        if self._apart or self._pointers_now() != self._pointers:
            self._take_over()

    @torch.no_grad()
    def _take_over(self) -> None:
        outside = [slot for slot in self._slots if not slot.is_in_flat()]
        for slot in outside:
            slot.move()
        self._apart = [slot for slot in outside if not slot.is_in_flat()]
        self._pointers = self._pointers_now()
        self._storages = [param.untyped_storage() for param in self._on_this_rank()]
        self.addresses = private.addresses_of(self._storages)
        for slot in self._apart:
            # The next gather brings the other ranks' parts, or differences to add to these.
            own = slice(slot.part.start, slot.part.stop)
            slot.read(own if self.parcel is None else slice(None))

    def _on_this_rank(self) -> Sequence[Tensor]:
        """Returns the parameters' tensors on this rank; on a mesh they may be replaced."""
        return local_tensors(self.params) if self._distributed else self.params

    def _pointers_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._on_this_rank()))

    def count_write(self) -> None:
        """Makes autograd detect a parameter that was saved for a backward before this."""
        increment_version(self.params)
        if self._distributed:
            # a forward may have read the parts by themselves
            increment_version(local_tensors(self._distributed))

    @torch.no_grad()
    def read_moved(self) -> None:
        """Reads this rank's part of parameters that lie in other memory now, and leaves them
        there."""
        for slot in self._slots:
            param, part = slot.param, slot.part
            if not slot.is_in_flat() and param.numel() == slot.memory.numel():
                slot.read(slice(part.start, part.stop))

    def follow_writes(self) -> None:
        """Takes values over into `exact` that were written into this rank's shard from outside,
        such as by a load."""
        assert self.exact is not None  # else the shard itself is exact
        common = self.exact.to(self._own.dtype) if self._common is None else self._common
        # Mostly nothing was written. One comparison takes a third of the time of the copies below,
        # between backward and the first gather; a device's host would have to wait for it.
        if device_of(self.flat.device).is_host and torch.equal(self._own, common):
            return
        is_written = self._own != common
        self.exact.copy_(torch.where(is_written, self._own.to(self.exact.dtype), self.exact))
        if self._common is not None:
            self._common.copy_(self._own)

    def accept(self, part: ShardPart, exact: Tensor) -> None:
        """Takes over loaded values of a part of `exact`, which belong to the parameter's values."""
        assert self.exact is not None  # else there is nothing to load
        part.of_shard(self.exact).copy_(exact)
        if self._common is not None:
            part.of_shard(self._common).copy_(part.of_shard(self._own))

    def publish(self) -> None:
        """Rounds `exact` into this rank's shard, if no differences travel."""
        assert self.exact is not None  # else the shard itself is exact
        self._own.copy_(self.exact)

    def write_difference(self, into: Tensor) -> None:
        """Writes `exact` minus the shard as all ranks have it. [elements] of the wide dtype"""
        # differences travel
        assert self.exact is not None
        assert self._common is not None
        torch.sub(self.exact, self._common, out=into)

    def copy_out(self) -> None:
        """Copies gathered values to parameters with separate memory, maybe from another thread.

        All of `flat` must be there.
        """
        if self._common is not None:
            for gap in self._gaps:
                gap.zero_()
            self._common.copy_(self._own)
        with private.as_plain_tensors():  # the parameters are in flight until this returns
            for slot in self._apart:
                slot.write()


def _gaps_in(flat: Tensor, slots: Sequence[Slot], shard: range) -> list[Tensor]:
    """Returns views of the elements of a shard that belong to no parameter.

    A format leaves NaN there after a block with NaN, and the next scale would be NaN too.
    """
    starts = [shard.start, *(slot.stop for slot in slots)]
    stops = [*(slot.start for slot in slots), shard.stop]
    gaps = []
    for start, stop in zip(starts, stops, strict=True):
        first, last = max(start, shard.start), min(stop, shard.stop)
        if first < last:
            gaps.append(flat[first:last])
    return gaps


def _part_of(bucket: Bucket, slot: Slot, shard: range, owner: int | None) -> ShardPart:
    """Returns the part of a slot within a rank's shard, which may be empty."""
    first = min(max(slot.start, shard.start), slot.stop)
    last = max(first, min(slot.stop, shard.stop))
    return ShardPart(
        param=slot.param,
        bucket=bucket.index,
        owner=owner,
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
