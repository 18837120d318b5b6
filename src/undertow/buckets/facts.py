"""The facts that ranks tell each other: a rank writes its own into memory, and every rank reads the
facts of all in the sum over ranks.

    digest       bits and complements     do ranks differ?
    rank flags   a flag for each rank     which ranks have set it?
    item flags   a flag for each item     which items has any rank marked?
    numbers      a number for each rank   which number has each rank?

`FactCodec` is the one codec of facts. Exchanges of replicas, reductions by hand and `join` use it,
and so does `TrailerCodec`, for the trailer after the gradients of a bucket. Everything except
numbers is read as "not zero", which is exact in any dtype, after a sum or a mean.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undertow.buckets.gradients import WIDER_IN_NUMPY, FlatGradients
from undertow.buckets.sparse import SparseGradients
from undertow.device import Accelerator, device_of
from undertow.plan import Bucket
from undertow.plan.facts import (
    DIGEST_BITS,
    FACTS,
    SIGNATURE_BITS,
    STEP_BITS,
    Fact,
    FactKind,
    places_of,
    plans_differ,
    ranks_differ,
    with_complements,
)

_T = TypeVar("_T", bound=Hashable)
_LARGEST_NUMBER = 60_000.0  # fp16 ends at 65504, and an infinity would spoil the sum
_DIGITS = bytes.maketrans(b"01", b"\0\1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one rank, by name; those that are left out say nothing."""

    digests: Mapping[str, int | None] = field(default_factory=dict)  # None equals leaving it out
    flags: Mapping[str, Sequence[int]] = field(default_factory=dict)  # the ranks or items to mark
    numbers: Mapping[str, float] = field(default_factory=dict)


class FactCodec:
    """The facts of `kinds` of rank `rank` of a group, and of all its ranks.

    Args:
        kinds: The kind of each fact.
        places: The elements of each fact in the memory.
        rank: This rank's place in the group.
        names: The group's ranks as they are reported.
        divisor: The sum over ranks was divided by it.
    """

    def __init__(
        self,
        kinds: Mapping[str, FactKind],
        places: Mapping[str, range],
        *,
        rank: int,
        names: Sequence[int],
        divisor: float = 1,
    ) -> None:
        self._kinds, self._rank, self._names, self._divisor = kinds, rank, names, divisor
        self._places = {name: slice(place.start, place.stop) for name, place in places.items()}
        self.numel = max((place.stop for place in places.values()), default=0)

    @classmethod
    def alone(
        cls, kinds: Mapping[str, FactKind], *, rank: int, num_ranks: int, num_items: int = 0
    ) -> FactCodec:
        """Returns the codec of facts that have memory for themselves."""
        places = places_of(kinds, 0, num_ranks=num_ranks, num_items=num_items)
        return cls(kinds, places, rank=rank, names=range(num_ranks))

    def of(self, memory: Tensor, name: str) -> Tensor:
        """Returns the elements of a fact, a view."""
        return memory[self._places[name]]

    def write(self, memory: Tensor, facts: Facts) -> None:
        """Writes this rank's facts into memory that is zero elsewhere."""
        self.write_numbers(memory, facts.numbers)
        self.write_digests(memory, facts.digests)
        self.write_flags(memory, facts.flags)

    def write_numbers(
        self, memory: Tensor | NDArray[Any], numbers: Mapping[str, float | Tensor]
    ) -> None:
        """Writes this rank's numbers; those in tensors may be on a device. Does not wait."""
        for name, number in numbers.items():
            memory[self._places[name].start + self._rank] = number

    def write_digests(self, memory: Tensor, digests: Mapping[str, int | None]) -> None:
        """Writes every digest; one that is left out accepts the digests of the others."""
        device = device_of(memory.device)
        for name in self._places:
            if self._kinds[name] is FactKind.DIGEST:
                bits = torch.from_numpy(
                    _bits_of(with_complements(digests.get(name)), 2 * DIGEST_BITS)
                )
                on_device = bits if device.is_host else device.to_device(bits, bits.dtype)
                self.of(memory, name).copy_(on_device)

    def write_flags(self, memory: Tensor, flags: Mapping[str, Sequence[int]]) -> None:
        for name, marked in flags.items():
            if marked:
                self.of(memory, name)[list(marked)] = 1

    def unlike(self, are_set: Sequence[bool]) -> tuple[str, ...]:
        """Returns the digests that differ between ranks; `are_set` is True for each nonzero
        element."""
        found: list[str] = []
        for name, place in self._places.items():
            if self._kinds[name] is FactKind.DIGEST and ranks_differ(are_set[place]):
                found.append(name)
        return tuple(found)

    def flags(self, are_set: Sequence[bool]) -> dict[str, tuple[int, ...]]:
        """Returns the ranks or items with a flag, by fact; `are_set` is True for each nonzero
        element."""
        found: dict[str, tuple[int, ...]] = {}
        for name, place in self._places.items():
            if self._kinds[name] is FactKind.RANK_FLAGS:
                found[name] = tuple(compress(self._names, are_set[place]))
            elif self._kinds[name] is FactKind.ITEM_FLAGS:
                found[name] = indices(are_set[place])
        return found

    def numbers(self, memory: Tensor | NDArray[Any], name: str) -> tuple[float, ...]:
        """Waits for the device; returns the number of each rank, if none is negative."""
        found: list[float] = []
        for number in memory[self._places[name]].tolist():
            found.append(abs(number) * self._divisor)
        return tuple(found)


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
    """The trailer of one bucket on `rank`, as `undertow.plan.facts` lays it out.

    It is built on the host and, except flags, copied into the bucket in one piece. Its sum over
    ranks comes back divided by `divisor`.
    """

    def __init__(
        self,
        spec: Bucket,
        memory: FlatGradients | SparseGradients,
        *,
        divisor: float,
        rank: int,
        names: Sequence[int],
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
        values[self._signature] = _bits_of(signature, 2 * SIGNATURE_BITS)
        if facts is not None:
            numbers: dict[str, float] = {}
            for name, number in facts.numbers.items():
                numbers[name] = min(number, _LARGEST_NUMBER)
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


@lru_cache(maxsize=512)
def _bits_of(number: int, num_bits: int) -> NDArray[np.uint8]:
    """Returns the bits of a number, lowest first. [num_bits], to be read only"""
    digits = f"{number:0{num_bits}b}"[::-1]
    return np.frombuffer(bytearray(digits, "ascii").translate(_DIGITS), dtype=np.uint8)


def indices(flags: Sequence[bool]) -> tuple[int, ...]:
    """Returns the places that are True."""
    return tuple(index for index, flag in enumerate(flags) if flag)


def majority(values: Iterable[_T]) -> _T:
    """Returns the most frequent value, the first of those that are equally frequent."""
    ((value, _number),) = Counter(values).most_common(1)
    return value


def differing(of_ranks: Mapping[int, Hashable]) -> list[int]:
    """Returns the ranks whose value differs from the most frequent one."""
    common = majority(of_ranks.values())
    return [rank for rank, said in of_ranks.items() if said != common]
