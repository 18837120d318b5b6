"""One codec for the facts that ranks tell each other: a rank writes its own into memory, and every
rank reads the facts of all in the sum over ranks.

    digest       bits and complements     do ranks differ?
    rank flags   a flag for each rank     which ranks have set it?
    item flags   a flag for each item     which items has any rank marked?
    numbers      a number for each rank   which number has each rank?

Trailers of buckets, exchanges of replicas, reductions by hand and `join` use it. Everything except
numbers is read as "not zero", which is exact in any dtype, after a sum or a mean.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undertow.device import Device, device_of
from undertow.plan.facts import DIGEST_BITS, FactKind, places_of, ranks_differ, with_complements

_T = TypeVar("_T", bound=Hashable)
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
                bits = with_complements(digests.get(name))
                write_bits(self.of(memory, name), bits, 2 * DIGEST_BITS, device)

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


def write_bits(into: Tensor, number: int, num_bits: int, device: Device) -> None:
    """Writes the bits of a number, lowest first."""
    bits = torch.from_numpy(bits_of(number, num_bits))
    into.copy_(bits if device.is_host else device.to_device(bits, bits.dtype))


@lru_cache(maxsize=512)
def bits_of(number: int, num_bits: int) -> NDArray[np.uint8]:
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
