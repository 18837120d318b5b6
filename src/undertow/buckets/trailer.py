"""Writes and reads the trailer after the gradients of a bucket, as `undertow.plan.facts` lays it
out.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress

import torch
from torch import Tensor

from undertow.device import Accelerator, device_of
from undertow.plan import Bucket
from undertow.plan.facts import (
    DIGEST_BITS,
    FACTS,
    SIGNATURE_BITS,
    STEP_BITS,
    FactKind,
    ranks_differ,
    with_complements,
)

_DIGITS = bytes.maketrans(b"01", b"\0\1")
_LARGEST_NUMBER = 60_000.0  # fp16 ends at 65504, and an infinity would spoil the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one rank, by name; those that are left out say nothing."""

    digests: Mapping[str, int | None] = field(default_factory=dict)  # None as if left out
    flags: Mapping[str, Sequence[int]] = field(default_factory=dict)  # the ranks or buckets to mark
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The contents of a reduced trailer."""

    used: frozenset[int]  # positions of parameters that some rank used
    ranks_differ: bool  # in step, generation or mode
    unlike: tuple[str, ...] = ()  # digests that differ between ranks
    flags: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by fact, ranks or buckets
    nonfinite: frozenset[int] = frozenset()  # positions of gradients that are not finite somewhere
    is_overdue: bool = False  # read in a later synchronization than the one that sent it


class TrailerCodec:
    """The trailer of one bucket on `rank`.

    Its sum over ranks comes back divided by `divisor`.
    """

    def __init__(
        self, spec: Bucket, memory: Tensor, *, divisor: float, rank: int, names: Sequence[int]
    ) -> None:
        trailer, start = spec.trailer, spec.trailer.start
        self._device = device_of(memory.device)
        self._divisor = divisor
        self._rank, self._names = rank, names
        self._used = slice(0, len(trailer.used))
        self._facts = {
            name: slice(place.start - start, place.stop - start) for name, place in trailer.facts
        }
        self._mine = torch.zeros_like(memory)
        self._mine[self._used] = 1
        self._signature = self._mine[self._used.stop :][: 2 * SIGNATURE_BITS]
        self._sent = self._mine[: trailer.numbers.start - start]  # all but the numbers
        self._are_all_used = True
        self._digests: Mapping[str, int | None] = {}
        self.place(memory)

    def place(self, memory: Tensor) -> None:
        """Moves to other memory, of the trailer's size."""
        self._memory = memory

    def write(
        self, *, unused: Sequence[int], signature: int, step: int, facts: Facts | None
    ) -> None:
        """Writes this rank's trailer; the last bucket's has `facts`.

        `signature` comes from `signature_of`, and takes the lowest bits of `step`.
        """
        mine = self._mine
        if unused or not self._are_all_used:
            used = mine[self._used].fill_(1)
            used[list(unused)] = 0
            self._are_all_used = not unused
        # Ranks that differ do so by a few steps. A bit that changes also changes its complement.
        signature ^= step % 2**STEP_BITS * (1 + 2**SIGNATURE_BITS)
        bits = _bits_of(signature, 2 * SIGNATURE_BITS)
        device = self._device
        self._signature.copy_(bits if device.is_host else device.to_device(bits, bits.dtype))
        if facts is None:
            self._memory.copy_(mine)
            return
        for name, value in facts.numbers.items():
            mine[self._facts[name].start + self._rank] = min(value, _LARGEST_NUMBER)
        if facts.digests != self._digests:
            self._digests = facts.digests
            for name, place in self._facts.items():
                if FACTS[name] is FactKind.DIGEST:
                    bits = _bits_of(with_complements(facts.digests.get(name)), 2 * DIGEST_BITS)
                    mine[place].copy_(device.to_device(bits, bits.dtype))
        self._memory.copy_(mine)
        # Not into `mine`: flags that are the same on all ranks must still be read.
        for name, marked in facts.flags.items():
            if marked:
                self._memory[self._facts[name]][list(marked)] = 1

    def mark_nonfinite(self, are_bad: Tensor) -> None:
        """Marks gradients with infinities or NaN, without waiting. [number of slots] bool"""
        self._memory[self._used].masked_fill_(are_bad, math.nan)

    def tell_nonfinite(self, has_any: Tensor) -> None:
        """Tells, with the last bucket, whether this rank has such gradients anywhere. [] bool"""
        self._memory[self._facts["nonfinite"]][self._rank].copy_(has_any)

    def read(self) -> Reading | None:
        """Waits, and reads the reduced trailer.

        None if every rank used the same parameters and none had anything to report.
        """
        # A view of the moment: one that is kept would count as other code's use of the memory.
        told = self._memory[: self._sent.numel()]
        # They are equal in the usual case if the sum was divided.
        return None if torch.equal(told, self._sent) else self.parse(told, self._sent)

    def snapshot(self) -> Snapshot:
        """Starts to copy the reduced trailer to the host, on the current stream."""
        device = self._device
        assert isinstance(device, Accelerator)  # on the host, trailers are read at once
        reduced = device.to_host(self._memory[: self._sent.numel()])
        mine = device.to_host(self._sent)
        return Snapshot(self, reduced, mine, copied=device.record())

    def parse(self, reduced: Tensor, written: Tensor) -> Reading | None:
        """Reads a reduced trailer, without its numbers, on a rank that wrote `written` there.

        Returns None if every rank wrote the same and none had anything to report.
        """
        # Only zeros and ones were written.
        if torch.equal(reduced.bool(), written.bool()) and not reduced.isnan().any():
            return None
        are_set = (reduced != 0).tolist()
        first = self._used.stop
        unlike: list[str] = []
        flags: dict[str, tuple[int, ...]] = {}
        for name, place in self._facts.items():
            if FACTS[name] is FactKind.RANK_FLAGS:
                flags[name] = tuple(compress(self._names, are_set[place]))
            elif FACTS[name] is not FactKind.DIGEST:
                flags[name] = _indices(are_set[place])
            elif ranks_differ(are_set[place]):
                unlike.append(name)
        return Reading(
            used=frozenset(_indices(are_set[self._used])),
            ranks_differ=ranks_differ(are_set[first : first + 2 * SIGNATURE_BITS]),
            unlike=tuple(unlike),
            flags=flags,
            nonfinite=frozenset(_indices(reduced[self._used].isnan().tolist())),
        )

    def numbers(self, name: str) -> tuple[float, ...]:
        """Waits for the device; returns the numbers of all ranks."""
        found: list[float] = []
        for number in self._memory[self._facts[name]].tolist():
            found.append(abs(number) * self._divisor)
        return tuple(found)


@lru_cache(maxsize=512)
def _bits_of(number: int, num_bits: int) -> Tensor:
    """Returns the bits of a number, lowest first. [num_bits] uint8, to be read only"""
    digits = f"{number:0{num_bits}b}"[::-1]
    return torch.frombuffer(bytearray(digits, "ascii").translate(_DIGITS), dtype=torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A reduced trailer on its way from a device to the host, which does not wait for it."""

    codec: TrailerCodec
    reduced: Tensor  # pinned
    mine: Tensor  # pinned
    copied: torch.Event

    def is_there(self) -> bool:
        return self.copied.query()

    def read(self) -> Reading | None:
        """Reads the trailer after the copy is complete."""
        reading = self.codec.parse(self.reduced, self.mine)
        return None if reading is None else replace(reading, is_overdue=True)


def _indices(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(index for index, flag in enumerate(flags) if flag)
