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

from undertow.buckets.facts import FactCodec, Facts, indices, write_bits
from undertow.device import Accelerator, device_of
from undertow.plan import Bucket
from undertow.plan.facts import FACTS, SIGNATURE_BITS, STEP_BITS, ranks_differ

_LARGEST_NUMBER = 60_000.0  # fp16 ends at 65504, and an infinity would spoil the sum


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
        self._rank = rank
        self._used = slice(0, len(trailer.used))
        places = {
            name: range(place.start - start, place.stop - start) for name, place in trailer.facts
        }
        self._facts = FactCodec(FACTS, places, rank=rank, names=names, divisor=divisor)
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
        write_bits(self._signature, signature, 2 * SIGNATURE_BITS, self._device)
        if facts is None:
            self._memory.copy_(mine)
            return
        numbers = {name: min(value, _LARGEST_NUMBER) for name, value in facts.numbers.items()}
        self._facts.write_numbers(mine, numbers)
        if facts.digests != self._digests:
            self._digests = facts.digests
            self._facts.write_digests(mine, facts.digests)
        self._memory.copy_(mine)
        # Not into `mine`: flags that are the same on all ranks must still be read.
        self._facts.write_flags(self._memory, facts.flags)

    def mark_nonfinite(self, are_bad: Tensor) -> None:
        """Marks gradients with infinities or NaN, without waiting. [number of slots] bool"""
        self._memory[self._used].masked_fill_(are_bad, math.nan)

    def tell_nonfinite(self, has_any: Tensor) -> None:
        """Tells, with the last bucket, whether this rank has such gradients anywhere. [] bool"""
        self._facts.of(self._memory, "nonfinite")[self._rank].copy_(has_any)

    def read(self) -> Reading | None:
        """Waits, and reads the reduced trailer.

        None if every rank used the same parameters and none had anything to report.
        """
        # A new view each time: a view that is kept would count as other code's use of the memory.
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
        return Reading(
            used=frozenset(indices(are_set[self._used])),
            ranks_differ=ranks_differ(are_set[first : first + 2 * SIGNATURE_BITS]),
            unlike=self._facts.unlike(are_set),
            flags=self._facts.flags(are_set),
            nonfinite=frozenset(indices(reduced[self._used].isnan().tolist())),
        )

    def numbers(self, name: str) -> tuple[float, ...]:
        """Waits for the device; returns the numbers of all ranks."""
        return self._facts.numbers(self._memory, name)


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
