"""Writes and reads the trailer after the gradients of a bucket, as `undertow.plan.facts` lays it
out.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from undertow.buckets.facts import FactCodec, Facts, bits_of, indices
from undertow.buckets.memory import WIDER_IN_NUMPY, BucketMemory
from undertow.device import Accelerator, device_of
from undertow.plan import Bucket
from undertow.plan.facts import FACTS, SIGNATURE_BITS, STEP_BITS, Fact, plans_differ, ranks_differ

_LARGEST_NUMBER = 60_000.0  # fp16 ends at 65504, and an infinity would spoil the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The contents of a reduced trailer."""

    used: frozenset[int]  # positions of parameters that some rank used
    ranks_differ: bool  # in step, generation or mode
    plans_differ: bool = False  # in generation
    unlike: tuple[str, ...] = ()  # digests that differ between ranks
    flags: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by fact, ranks or buckets
    nonfinite: frozenset[int] = frozenset()  # positions of gradients that are not finite somewhere
    is_overdue: bool = False  # read in a later synchronization than the one that sent it


class TrailerCodec:
    """The trailer of one bucket on `rank`.

    It is built on the host and, except flags, copied into the bucket in one piece. Its sum over
    ranks comes back divided by `divisor`.
    """

    def __init__(
        self, spec: Bucket, memory: BucketMemory, *, divisor: float, rank: int, names: Sequence[int]
    ) -> None:
        trailer, start = spec.trailer, spec.trailer.start
        num_slots, num_flags = len(trailer.used), trailer.numbers.start - start
        self._memory = memory
        self._device = device_of(memory.trailer.device)
        self._rank = rank
        self._used = slice(0, num_slots)
        self._signature = slice(num_slots, num_slots + 2 * SIGNATURE_BITS)
        self._flags = slice(0, num_flags)  # all but the numbers
        places = {
            name: range(place.start - start, place.stop - start) for name, place in trailer.facts
        }
        self._facts = FactCodec(FACTS, places, rank=rank, names=names, divisor=divisor)
        dtype = memory.trailer.dtype
        wide = WIDER_IN_NUMPY.get(dtype, dtype)
        self._mine = torch.zeros(trailer.stop - start, dtype=wide, device="cpu")
        # The same memory: numpy writes a few elements faster than torch.
        self._values = self._mine.numpy()
        self._values[self._used] = 1
        # The flags that come back if every rank has sent the same. A dtype in which they do not
        # come back exactly makes a trailer unusual, which is parsed.
        self._factor = len(names) / divisor
        self._usual = self._values[self._flags]
        self._are_all_used = True
        self._digests: Mapping[str, int | None] = {}

    def write(
        self, *, unused: Sequence[int], signature: int, step: int, facts: Facts | None
    ) -> None:
        """Writes this rank's trailer; the last bucket's has `facts`.

        `signature` comes from `signature_of`, and takes the lowest bits of `step`.
        """
        values = self._values
        if unused or not self._are_all_used:
            values[self._used] = 1
            values[list(unused)] = 0
            self._are_all_used = not unused
        # Ranks that differ do so by a few steps. A bit that changes also changes its complement.
        signature ^= step % 2**STEP_BITS * (1 + 2**SIGNATURE_BITS)
        values[self._signature] = bits_of(signature, 2 * SIGNATURE_BITS)
        if facts is not None:
            numbers = {name: min(number, _LARGEST_NUMBER) for name, number in facts.numbers.items()}
            self._facts.write_numbers(values, numbers)
            if facts.digests != self._digests:
                self._digests = facts.digests
                self._facts.write_digests(self._mine, facts.digests)
        if self._factor != 1:
            self._usual = values[self._flags] * values.dtype.type(self._factor)
        memory, mine, device = self._memory, self._mine, self._device
        if memory.trailer_array is not None:
            memory.trailer_array[:] = values
        else:
            memory.trailer.copy_(mine if device.is_host else device.to_device(mine, mine.dtype))
        if facts is not None and facts.flags:
            # Not into `mine`: flags that are the same on all ranks must still be read.
            self._facts.write_flags(memory.trailer, facts.flags)

    def mark_nonfinite(self, are_bad: Tensor) -> None:
        """Marks gradients with infinities or NaN, without waiting. [number of slots] bool"""
        self._memory.trailer[self._used].masked_fill_(are_bad, math.nan)

    def tell_nonfinite(self, has_any: Tensor) -> None:
        """Tells, with the last bucket, whether this rank has such gradients anywhere. [] bool"""
        self._facts.of(self._memory.trailer, Fact.NONFINITE)[self._rank].copy_(has_any)

    def read(self) -> Reading | None:
        """Waits, and reads the reduced trailer.

        None if every rank used the same parameters and none had anything to report.
        """
        array = self._memory.trailer_array
        if array is not None and array[self._flags].tobytes() == self._usual.tobytes():
            return None  # the usual case
        flags, usual = self._memory.trailer[self._flags].cpu(), torch.from_numpy(self._usual)
        return None if torch.equal(flags.to(usual.dtype), usual) else self.parse(flags, usual)

    def snapshot(self) -> Snapshot:
        """Starts to copy the reduced trailer to the host, on the current stream."""
        device = self._device
        assert isinstance(device, Accelerator)  # on the host, trailers are read at once
        reduced = device.to_host(self._memory.trailer[self._flags])
        usual = torch.from_numpy(self._usual.copy())
        return Snapshot(self, reduced, usual, copied=device.record())

    def parse(self, reduced: Tensor, usual: Tensor) -> Reading | None:
        """Reads a reduced trailer, without its numbers, on the host. `usual` would have come back
        if every rank had sent the same as this one.

        Returns None if every rank did, and none had anything to report.
        """
        # Only zeros and ones were written.
        if torch.equal(reduced.bool(), usual.bool()) and not reduced.isnan().any():
            return None
        are_set = (reduced != 0).tolist()
        return Reading(
            used=frozenset(indices(are_set[self._used])),
            ranks_differ=ranks_differ(are_set[self._signature]),
            plans_differ=plans_differ(are_set[self._signature]),
            unlike=self._facts.unlike(are_set),
            flags=self._facts.flags(are_set),
            nonfinite=frozenset(indices(reduced[self._used].isnan().tolist())),
        )

    def numbers(self, name: str) -> tuple[float, ...]:
        """Waits for the device; returns the number of each rank, if none is negative."""
        array = self._memory.trailer_array
        return self._facts.numbers(self._memory.trailer if array is None else array, name)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A reduced trailer on its way from a device to the host, which does not wait for it."""

    codec: TrailerCodec
    reduced: Tensor  # pinned
    usual: Tensor
    copied: torch.Event

    def is_there(self) -> bool:
        return self.copied.query()

    def read(self) -> Reading | None:
        """Reads the trailer after the copy is complete."""
        reading = self.codec.parse(self.reduced, self.usual)
        return None if reading is None else replace(reading, is_overdue=True)
