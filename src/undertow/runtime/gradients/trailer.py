"""Writes and reads the trailer after the gradients of a bucket; undertow/plan/layout.py defines its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from undertow.plan import Bucket, Trailer, ranks_differ
from undertow.plan.layout import ALIKE, DIGEST_BITS, SIGNATURE_BITS, STEP_BITS, with_complements
from undertow.runtime.gradients.binding import BucketStorage

_DIGITS = bytes.maketrans(b"01", b"\0\1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One rank's status at the end of backward, sent with the last bucket."""

    rank: int
    has_failed: bool
    has_changed: bool  # the parameters differ from the plan's
    late_buckets: Sequence[int]
    busy_ms: float  # since this rank finished the previous synchronization
    alike: Sequence[int | None] = ()  # a digest for each of ALIKE, or nothing yet; None accepts the others'
    has_taken: bool = False  # a gradient arrived here and was gone when its bucket left; takes the place of a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The contents of a reduced trailer."""

    used: frozenset[int]  # positions of parameters that some rank used
    ranks_differ: bool
    unlike: tuple[str, ...] = ()  # entries of ALIKE in which ranks differ
    failed_ranks: tuple[int, ...] = ()
    taken_ranks: tuple[int, ...] = ()  # among these, ranks on which a gradient was gone when its bucket left
    changed_ranks: tuple[int, ...] = ()
    late_buckets: tuple[int, ...] = ()
    nonfinite: frozenset[int] = frozenset()  # positions of gradients with an infinity or NaN on some rank
    nonfinite_ranks: tuple[int, ...] = ()
    is_overdue: bool = False  # read in a later synchronization than the one that sent it


class TrailerCodec:
    """The trailer of one bucket, whose sum over ranks comes back divided by `divisor`; verdicts are `rank`'s."""

    def __init__(self, layout: Bucket, storage: BucketStorage, *, divisor: float, rank: int = 0) -> None:
        start, stop = layout.trailer.start, layout.trailer.stop
        self._storage = storage
        self._divisor = divisor
        fields = {name: getattr(layout.trailer, name) for name in Trailer.__slots__}
        self._places = {name: slice(field.start - start, field.stop - start) for name, field in fields.items()}
        self._mine = storage.flat.new_zeros(stop - start)
        self._mine[self._places["used"]] = 1
        self._signature = self._mine[self._places["signature"]]
        self._told = slice(0, self._places["busy"].start)  # without the times
        self._mine_told = self._mine[self._told]
        self._busy = self._mine[self._places["busy"]][rank : rank + 1]
        self._unused: Sequence[int] = ()
        self._alike: Sequence[int | None] = ()
        self._flags: dict[int, Tensor] = {}  # the bits of signatures, lowest first

    def write(self, *, unused: Sequence[int], signature: int, step: int, verdict: Verdict | None) -> None:
        """Writes this rank's trailer; `signature` comes from `signature_of`, and takes the lowest bits of `step`."""
        if self._unused or unused:
            used = self._mine[self._places["used"]].fill_(1)
            used[list(unused)] = 0
            self._unused = unused
        # Ranks that differ do so by a few steps. A bit that changes also changes its complement.
        signature ^= step % 2**STEP_BITS * (1 + 2**SIGNATURE_BITS)
        flags = self._flags.get(signature)
        if flags is None:
            flags = self._flags_of([signature], SIGNATURE_BITS)
            if self._mine.device.type == "cpu":  # on a device, another stream could read them before they are there
                self._flags[signature] = flags
        self._signature.copy_(flags)
        if verdict is not None:
            # fp16 ends at 65504: longer times are clipped, because an infinity would spoil the sum.
            self._busy.fill_(min(verdict.busy_ms, 60_000.0))
            if verdict.alike != self._alike:
                self._alike = verdict.alike
                told = list(map(with_complements, verdict.alike))
                self._mine[self._places["alike"]].copy_(self._flags_of(told, DIGEST_BITS))
        trailer = self._storage.trailer[0].copy_(self._mine)
        if verdict is None:
            return
        if verdict.has_taken or verdict.has_failed or verdict.has_changed or verdict.late_buckets:
            self._report(verdict, trailer)

    def mark_nonfinite(self, are_bad: Tensor) -> None:
        """Marks gradients with infinities or NaN, without waiting. [number of slots] bool"""
        self._storage.trailer[0][self._places["used"]].masked_fill_(are_bad, math.nan)

    def tell_nonfinite(self, has_any: Tensor, *, rank: int) -> None:
        """Tells, with the last bucket, whether this rank has such gradients in any bucket. [] bool"""
        self._storage.trailer[0][self._places["nonfinite"]][rank].copy_(has_any)

    def read(self) -> Reading | None:
        """Waits, and reads the reduced trailer; None if every rank used the same parameters and none had anything to report."""
        trailer, told, _ = self._storage.trailer
        # They are equal in the usual case if the sum was divided.
        return None if torch.equal(told, self._mine_told) else self.parse(trailer, told, self._mine_told)

    def snapshot(self) -> Snapshot:
        """Starts to copy the reduced trailer to the host, on the current stream."""
        reduced, mine = (
            torch.empty_like(part, device="cpu", pin_memory=True).copy_(part, non_blocking=True)
            for part in (self._storage.trailer[0], self._mine_told)
        )
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return Snapshot(self, reduced, mine, copied)

    def parse(self, trailer: Tensor, reduced: Tensor, written: Tensor) -> Reading | None:
        """Reads `trailer` on a rank that wrote `written` there; `reduced` is its part without times.

        Returns None if every rank wrote the same and none had anything to report.
        """
        places = self._places
        # Only zeros and ones were written.
        if torch.equal(reduced.bool(), written.bool()) and not reduced.isnan().any():
            return None
        flags = (reduced != 0).tolist()
        # 1 or 2, which every dtype can tell apart even if the sum over ranks was divided.
        are_taken = trailer[places["failed"]].abs() * self._divisor > 1.5
        return Reading(
            used=frozenset(_indices(flags[places["used"]])),
            ranks_differ=ranks_differ(flags[places["signature"]]),
            unlike=_unlike(flags[places["alike"]]),
            failed_ranks=_indices(flags[places["failed"]]),
            taken_ranks=_indices(are_taken.tolist()),
            changed_ranks=_indices(flags[places["changed"]]),
            late_buckets=_indices(flags[places["late"]]),
            nonfinite=frozenset(_indices(trailer[places["used"]].isnan().tolist())),
            nonfinite_ranks=_indices(flags[places["nonfinite"]]),
        )

    def busy_ms(self) -> tuple[float, ...]:
        """Waits for the device; returns how long each rank was busy since the previous synchronization."""
        busy: list[float] = self._storage.trailer[2].tolist()
        return tuple([abs(of_rank) * self._divisor for of_rank in busy])

    def _flags_of(self, told: Sequence[int], num_bits: int) -> Tensor:
        """Returns the bits of these integers as zeros and ones, the lowest first; each has `num_bits`, and their complements."""
        digits = "".join(f"{bits:0{2 * num_bits}b}"[::-1] for bits in told)
        flags = torch.frombuffer(bytearray(digits, "ascii").translate(_DIGITS), dtype=torch.uint8)
        return to_device(flags, flags.dtype, self._mine.device)

    def _report(self, verdict: Verdict, trailer: Tensor) -> None:
        places, rank = self._places, verdict.rank
        # Not into `_mine`: reports that are the same on all ranks must still be read.
        trailer[places["failed"]][rank] = 2 if verdict.has_taken else verdict.has_failed
        trailer[places["changed"]][rank] = verdict.has_changed
        trailer[places["late"]][list(verdict.late_buckets)] = 1


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
        reading = self.codec.parse(self.reduced, self.reduced[: len(self.mine)], self.mine)
        return None if reading is None else replace(reading, is_overdue=True)


def to_device(values: Sequence[float] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a small tensor on `device` without waiting for the copy."""
    on_host = torch.as_tensor(values, dtype=dtype)
    # The caching allocator reuses pinned memory only after the copy has run.
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


def _unlike(flags: Sequence[bool]) -> tuple[str, ...]:
    size = len(flags) // len(ALIKE)
    return tuple(fact for place, fact in enumerate(ALIKE) if ranks_differ(flags[place * size : (place + 1) * size]))


def _indices(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(index for index, flag in enumerate(flags) if flag)
