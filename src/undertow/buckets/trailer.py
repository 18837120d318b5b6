"""Writes and reads the trailer after the gradients of a bucket, as `undertow.plan.facts` lays it
out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from undertow.buckets.binding import BucketStorage
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
_FLAGS = (FactKind.RANK_FLAGS, FactKind.BUCKET_FLAGS)
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
    """The trailer of one bucket on `rank`. Its sum over ranks comes back divided by `divisor`."""

    def __init__(
        self, layout: Bucket, storage: BucketStorage, *, divisor: float, rank: int = 0
    ) -> None:
        trailer, start = layout.trailer, layout.trailer.start
        self._storage, self._divisor, self._rank = storage, divisor, rank
        self._used = slice(0, len(trailer.used))
        self._facts = {
            name: slice(place.start - start, place.stop - start) for name, place in trailer.facts
        }
        self._mine = storage.flat.new_zeros(trailer.stop - start)
        self._mine[self._used] = 1
        self._signature = self._mine[trailer.signature.start - start :][: 2 * SIGNATURE_BITS]
        self._told = self._mine[: trailer.numbers.start - start]  # all but the numbers
        self._numbers = {
            name: self._mine[at][rank : rank + 1]
            for name, at in self._facts.items()
            if FACTS[name] is FactKind.NUMBERS
        }
        self._unused: Sequence[int] = ()
        self._digests: Mapping[str, int | None] = {}
        self._bits: dict[int, Tensor] = {}  # of signatures, lowest first

    def write(
        self, *, unused: Sequence[int], signature: int, step: int, facts: Facts | None
    ) -> None:
        """Writes this rank's trailer; the last bucket's has `facts`.

        `signature` comes from `signature_of`, and takes the lowest bits of `step`.
        """
        mine = self._mine
        if self._unused or unused:
            used = mine[self._used].fill_(1)
            used[list(unused)] = 0
            self._unused = unused
        # Ranks that differ do so by a few steps. A bit that changes also changes its complement.
        signature ^= step % 2**STEP_BITS * (1 + 2**SIGNATURE_BITS)
        bits = self._bits.get(signature)
        if bits is None:
            bits = self._bits_of(signature, SIGNATURE_BITS)
            if mine.is_cpu:  # on a device, another stream could read them before they are there
                self._bits[signature] = bits
        self._signature.copy_(bits)
        if facts is None:
            self._storage.trailer[0].copy_(mine)
            return
        for name, value in facts.numbers.items():
            self._numbers[name].fill_(min(value, _LARGEST_NUMBER))
        if facts.digests != self._digests:
            self._write_digests(facts.digests)
        trailer = self._storage.trailer[0].copy_(mine)
        # Not into `mine`: flags that are the same on all ranks must still be read.
        for name, marked in facts.flags.items():
            if marked:
                trailer[self._facts[name]][list(marked)] = 1

    def _write_digests(self, digests: Mapping[str, int | None]) -> None:
        self._digests = digests
        for name, at in self._facts.items():
            if FACTS[name] is FactKind.DIGEST:
                bits = self._bits_of(with_complements(digests.get(name)), DIGEST_BITS)
                self._mine[at].copy_(bits)

    def mark_nonfinite(self, are_bad: Tensor) -> None:
        """Marks gradients with infinities or NaN, without waiting. [number of slots] bool"""
        self._storage.trailer[0][self._used].masked_fill_(are_bad, math.nan)

    def tell_nonfinite(self, has_any: Tensor) -> None:
        """Tells, with the last bucket, whether this rank has such gradients anywhere. [] bool"""
        self._storage.trailer[0][self._facts["nonfinite"]][self._rank].copy_(has_any)

    def read(self) -> Reading | None:
        """Waits, and reads the reduced trailer.

        None if every rank used the same parameters and none had anything to report.
        """
        trailer, told = self._storage.trailer
        # They are equal in the usual case if the sum was divided.
        return None if torch.equal(told, self._told) else self.parse(trailer, self._told)

    def snapshot(self) -> Snapshot:
        """Starts to copy the reduced trailer to the host, on the current stream."""
        reduced, mine = (
            torch.empty_like(part, device="cpu", pin_memory=True).copy_(part, non_blocking=True)
            for part in (self._storage.trailer[0], self._told)
        )
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return Snapshot(self, reduced, mine, copied)

    def parse(self, trailer: Tensor, written: Tensor) -> Reading | None:
        """Reads `trailer` on a rank that wrote `written` there, up to the numbers.

        Returns None if every rank wrote the same and none had anything to report.
        """
        reduced = trailer[: len(written)]
        # Only zeros and ones were written.
        if torch.equal(reduced.bool(), written.bool()) and not reduced.isnan().any():
            return None
        are_set = (reduced != 0).tolist()
        first = self._used.stop
        digests = {name: at for name, at in self._facts.items() if FACTS[name] is FactKind.DIGEST}
        flags = {name: at for name, at in self._facts.items() if FACTS[name] in _FLAGS}
        return Reading(
            used=frozenset(_indices(are_set[self._used])),
            ranks_differ=ranks_differ(are_set[first : first + 2 * SIGNATURE_BITS]),
            unlike=tuple(name for name, at in digests.items() if ranks_differ(are_set[at])),
            flags={name: _indices(are_set[at]) for name, at in flags.items()},
            nonfinite=frozenset(_indices(trailer[self._used].isnan().tolist())),
        )

    def numbers(self, name: str) -> tuple[float, ...]:
        """Waits for the device; returns the numbers of all ranks."""
        of_ranks: list[float] = self._storage.trailer[0][self._facts[name]].tolist()
        return tuple([abs(number) * self._divisor for number in of_ranks])

    def _bits_of(self, number: int, num_bits: int) -> Tensor:
        """Returns these bits and their complements as zeros and ones, lowest first."""
        digits = f"{number:0{2 * num_bits}b}"[::-1]
        bits = torch.frombuffer(bytearray(digits, "ascii").translate(_DIGITS), dtype=torch.uint8)
        return to_device(bits, bits.dtype, self._mine.device)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A reduced trailer on its way from a device to the host, which does not wait for it."""

    codec: TrailerCodec
    reduced: Tensor  # pinned
    mine: Tensor  # pinned
    copied: torch.cuda.Event

    def is_there(self) -> bool:
        return bool(self.copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> Reading | None:
        """Reads the trailer after the copy is complete."""
        reading = self.codec.parse(self.reduced, self.mine)
        return None if reading is None else replace(reading, is_overdue=True)


def to_device(values: Sequence[float] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a small tensor on `device` without waiting for the copy."""
    on_host = torch.as_tensor(values, dtype=dtype)
    # The caching allocator reuses pinned memory only after the copy has run.
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


def _indices(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(index for index, flag in enumerate(flags) if flag)
