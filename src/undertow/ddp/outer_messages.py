"""What `outer_axis` sends for the shards of a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from undertow.plan.layout import ParamSpec, equal_parts, round_up, slots_of
from undertow.ranks.parcels import Encoded, FullWidth, Parcel
from undertow.ranks.transport import OwnGroup
from undertow.wire import WIRES


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Message:
    """How shards travel: as they are, or in a format, whose blocks end at borders of parameters."""

    parcel: Parcel
    numel: int
    places: tuple[tuple[slice, slice], ...] = ()  # of each parameter: in the shards, and as sent

    @classmethod
    def of(
        cls, numels: Sequence[int], dtype: torch.dtype, wire: str | None, group: OwnGroup
    ) -> Message:
        """Returns the message of parameters with so many elements each."""
        num_ranks = group.num_ranks
        if wire is None:
            numel = sum(numels)
            return cls(FullWidth(equal_parts(num_ranks, -(-numel // num_ranks), stop=numel)), numel)
        block = WIRES[wire].block
        specs = [
            ParamSpec(name=str(at), shape=(numel,), dtype="float32", itemsize=4)
            for at, numel in enumerate(numels)
        ]
        slots, narrow_numel = slots_of(specs, range(len(specs)), block=block)
        starts = list(accumulate(numels, initial=0))
        places = tuple(
            (slice(starts[slot.param], starts[slot.param + 1]), slice(slot.start, slot.stop))
            for slot in slots
        )
        numel = max([narrow_numel, *(slot.stop for slot in slots)])
        parts = equal_parts(num_ranks, round_up(-(-numel // num_ranks), block), stop=numel)
        is_host = group.hardware.is_host
        return cls(Encoded(WIRES[wire], dtype, narrow_numel, parts, is_host=is_host), numel, places)

    def packed(self, values: Tensor) -> Tensor:
        """Returns the tensor that is sent and received; the shards themselves in full width."""
        if not self.places:
            return values
        sent = values.new_zeros(self.numel)
        for own, place in self.places:
            sent[place].copy_(values[own])
        return sent

    def unpack(self, sent: Tensor, values: Tensor) -> None:
        """Writes what was received into the shards."""
        for own, place in self.places:
            values[own].copy_(sent[place])


def sent_bytes(parcel: Parcel, group: OwnGroup, values: Tensor) -> int:
    """Returns the bytes that this rank sends: the others' parts, and the mean of its own to all."""
    rank, others = group.rank, group.num_ranks - 1
    sizes = (
        parcel.sizes
        if isinstance(parcel, Encoded)
        else [len(part) * values.itemsize for part in parcel.parts]
    )
    return sum(sizes) - sizes[rank] + others * sizes[rank]
