"""Writes and reads what travels behind the gradients of a bucket; undertow/plan/layout.py says where it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from undertow.plan import Bucket, ranks_differ
from undertow.runtime.gradients.storage import GradientBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one rank knows when backward is over; it leaves with the last bucket."""

    rank: int
    has_failed: bool
    has_changed: bool  # the parameters are no longer those of the plan
    has_other_buffers: bool  # than those that were compared
    late_buckets: Sequence[int]
    busy_ms: float  # since this rank left the previous round
    misuse: int = 0  # why a reduction by hand cannot be right here, if not 0: in place of a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a reduced trailer says."""

    used: frozenset[int]  # positions of parameters that some rank used
    ranks_differ: bool
    failed_ranks: tuple[int, ...] = ()
    misuses: tuple[tuple[int, int], ...] = ()  # of those, the ranks with a reduction by hand that cannot be right, and why
    changed_ranks: tuple[int, ...] = ()
    other_buffers_ranks: tuple[int, ...] = ()
    late_buckets: tuple[int, ...] = ()
    nonfinite: frozenset[int] = frozenset()  # positions of gradients that are infinite or no number on some rank
    nonfinite_ranks: tuple[int, ...] = ()
    is_overdue: bool = False  # read in a later round than the one it was sent in


class TrailerCodec:
    """The trailer of one bucket, whose sum over ranks comes back divided by `divisor`."""

    def __init__(self, layout: Bucket, bucket: GradientBucket, *, divisor: float) -> None:
        self._fields = layout.trailer
        self._bucket = bucket
        self._divisor = divisor
        self._mine = bucket.storage.new_zeros(self._fields.stop - self._fields.start)
        self._used, self._signature = (self._part(field) for field in (self._fields.used, self._fields.signature))
        self._used.fill_(1)
        self._unused: Sequence[int] = ()

    def write(self, *, unused: Sequence[int], signature: Tensor, verdict: Verdict | None) -> None:
        """Writes this rank's trailer; `signature` are the flags of `signature_bits` in the bucket's dtype and device."""
        if self._unused:
            self._used.fill_(1)
        if unused:
            self._used[list(unused)] = 0
        self._unused = unused
        self._signature.copy_(signature)
        self._trailer().copy_(self._mine)
        if verdict is not None:
            self._write_verdict(verdict)

    def mark_nonfinite(self, are_bad: Tensor) -> None:
        """Says which gradients are infinite or no number. [number of slots] bool; the host does not wait for it"""
        fields = self._fields
        self._bucket.storage[fields.used.start : fields.used.stop].masked_fill_(are_bad, math.nan)

    def tell_nonfinite(self, has_any: Tensor, *, rank: int) -> None:
        """Says in the verdict whether this rank has such gradients, in any bucket. [] bool"""
        self._bucket.storage[self._fields.nonfinite[rank]].copy_(has_any)

    def read(self) -> Reading | None:
        """What the reduced trailer says; None where every rank used what this one did and had nothing to report. Waits."""
        return self.parse(self._trailer(), self._mine)

    def snapshot(self) -> Snapshot:
        """The reduced trailer, to be read when a copy on the current stream has come to the host."""
        reduced, mine = (
            torch.empty_like(part, device="cpu", pin_memory=True).copy_(part, non_blocking=True)
            for part in (self._trailer(), self._mine)
        )
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return Snapshot(self, reduced, mine, copied)

    def parse(self, trailer: Tensor, mine: Tensor) -> Reading | None:
        """What `trailer` says to a rank that wrote `mine`; None where every rank wrote the same and reported nothing."""
        fields = self._fields
        stop = fields.busy.start - fields.start
        reduced, written = trailer[:stop], mine[:stop]
        if torch.equal(reduced, written):  # the usual case, where the sum was divided
            return None
        # What was written are zeros and ones.
        if torch.equal(reduced.bool(), written.bool()) and not reduced.isnan().any():
            return None
        flags = (trailer[:stop] != 0).tolist()
        return Reading(
            used=frozenset(_set_flags(self._flags(flags, fields.used))),
            ranks_differ=ranks_differ(self._flags(flags, fields.signature)),
            failed_ranks=_set_flags(self._flags(flags, fields.failed)),
            misuses=self._misuses(trailer[fields.failed.start - fields.start : fields.failed.stop - fields.start]),
            changed_ranks=_set_flags(self._flags(flags, fields.changed)),
            other_buffers_ranks=_set_flags(self._flags(flags, fields.buffers)),
            late_buckets=_set_flags(self._flags(flags, fields.late)),
            nonfinite=frozenset(_set_flags(trailer[: fields.num_slots].isnan().tolist())),
            nonfinite_ranks=_set_flags(self._flags(flags, fields.nonfinite)),
        )

    def busy_ms(self) -> tuple[float, ...]:
        """How long each rank was busy since the previous round. Waits for the device."""
        part = self._bucket.storage[self._fields.busy.start : self._fields.busy.stop]
        return tuple(float(busy) * self._divisor for busy in part.abs().tolist())

    def _write_verdict(self, verdict: Verdict) -> None:
        fields = self._fields
        values = [0.0] * (fields.stop - fields.failed.start)
        values[verdict.rank] = float(verdict.misuse or verdict.has_failed)
        values[fields.changed[verdict.rank] - fields.failed.start] = float(verdict.has_changed)
        values[fields.buffers[verdict.rank] - fields.failed.start] = float(verdict.has_other_buffers)
        for bucket in verdict.late_buckets:
            values[fields.late[bucket] - fields.failed.start] = 1.0
        # fp16 ends at 65504: a longer time is cut, for infinity would spoil the sum.
        values[fields.busy[verdict.rank] - fields.failed.start] = min(verdict.busy_ms, 60_000.0)
        # Not into `_mine`: what all ranks report alike must not look as if there were nothing to read.
        verdict_part = self._bucket.storage[fields.failed.start : fields.stop]
        verdict_part.copy_(to_device(values, self._mine.dtype, self._mine.device))

    def _misuses(self, failed: Tensor) -> tuple[tuple[int, int], ...]:
        """Small whole numbers, which any dtype keeps apart, also where the sum over ranks was divided."""
        reasons = [round(abs(value) * self._divisor) for value in failed.tolist()]
        return tuple((rank, reason) for rank, reason in enumerate(reasons) if reason > 1)

    def _trailer(self) -> Tensor:
        return self._bucket.storage[self._fields.start : self._fields.stop]

    def _part(self, field: range) -> Tensor:
        return self._mine[field.start - self._fields.start : field.stop - self._fields.start]

    def _flags(self, flags: Sequence[bool], field: range) -> Sequence[bool]:
        return flags[field.start - self._fields.start : field.stop - self._fields.start]


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
        """What the trailer says, once it is there."""
        reading = self.codec.parse(self.reduced, self.mine)
        return None if reading is None else replace(reading, is_overdue=True)


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor on `device` without waiting for it."""
    on_host = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return on_host
    # Pinned memory comes from a caching allocator that reuses it only after the copy has run.
    return on_host.pin_memory().to(device, non_blocking=True)


def _set_flags(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(index for index, flag in enumerate(flags) if flag)
