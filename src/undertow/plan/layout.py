"""Where things lie inside a bucket's storage, in elements of the bucket's dtype.

    0             numel        trailer.start                                   storage_numel
    | gradients   | padding    | used | signature | verdict                    |
      one slot                   one    48 bits     last bucket only:
      per                        per                failed, changed and other-buffers ranks,
      parameter                  slot               late buckets, busy time of every rank

Gradients with the first part of the padding are cut into equal shards, one per rank: that part's end, and the end of all,
are multiples of the number of ranks and of 16 bytes (vector loads). The trailer is
summed or averaged like the gradients, so everything in it but the busy times is read only as "not zero", which is
exact in any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from undertow.errors import ConfigError
from undertow.plan.spec import ParamSpec

_ALIGN_BYTES = 16
_STEP_BITS, _GENERATION_BITS, _MODE_BITS = 12, 8, 4
SIGNATURE_BITS = _STEP_BITS + _GENERATION_BITS + _MODE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Place of one parameter's gradient inside its bucket."""

    param: int  # index into Plan.params
    start: int  # elements, inclusive
    stop: int  # elements, exclusive; equal to start for a parameter without elements

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ConfigError(
                f"the slot of parameter {self.param} is impossible: [{self.start}, {self.stop}).",
                remedy="A slot starts at zero or later and does not end before it starts.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """Fields behind the gradients of a bucket, as half-open ranges of the bucket's storage.

    The verdict travels in the last bucket only, which leaves when backward is over: `num_late` flags, one per
    bucket, and `num_ranks` busy times; both are zero in the other buckets.
    """

    start: int
    num_slots: int
    num_late: int = 0
    num_ranks: int = 0

    @property
    def used(self) -> range:
        """One flag per slot: a gradient came since the last synchronisation."""
        return range(self.start, self.start + self.num_slots)

    @property
    def signature(self) -> range:
        """The bits of `signature_bits`, then their complements."""
        return range(self.used.stop, self.used.stop + 2 * SIGNATURE_BITS)

    @property
    def failed(self) -> range:
        """One flag per rank, set by a rank that failed in this step. In the last bucket only."""
        return range(self.signature.stop, self.signature.stop + self.num_ranks)

    @property
    def changed(self) -> range:
        """One flag per rank, set by a rank whose parameters are no longer those of the plan. In the last bucket only."""
        return range(self.failed.stop, self.failed.stop + self.num_ranks)

    @property
    def buffers(self) -> range:
        """One flag per rank, set by a rank whose buffers are not those that were compared. In the last bucket only."""
        return range(self.changed.stop, self.changed.stop + self.num_ranks)

    @property
    def late(self) -> range:
        """One flag per bucket: a gradient of it arrived again after it had left. In the last bucket only."""
        return range(self.buffers.stop, self.buffers.stop + self.num_late)

    @property
    def busy(self) -> range:
        """One time per rank in milliseconds, each written by its own rank. In the last bucket only."""
        return range(self.late.stop, self.late.stop + self.num_ranks)

    @property
    def has_verdict(self) -> bool:
        return self.num_late > 0

    @property
    def stop(self) -> int:
        return self.busy.stop if self.has_verdict else self.signature.stop


def signature_bits(*, step: int, generation: int, mode: int | None) -> tuple[int, ...]:
    """Bits that say where a rank is, then their complements. A rank whose mode is None goes by that of the others.

    Summed over ranks, a bit and its complement are both non-zero exactly where ranks differ.
    """
    fields = [(step, _STEP_BITS), (generation, _GENERATION_BITS), (mode or 0, _MODE_BITS)]
    bits = [(value >> bit) & 1 for value, width in fields for bit in range(width)]
    complements = [1 - bit for bit in bits]
    if mode is None:
        complements[-_MODE_BITS:] = [0] * _MODE_BITS
    return (*bits, *complements)


def ranks_differ(signature: Sequence[bool]) -> bool:
    """Whether the non-zero flags of a reduced signature are those of ranks in different places."""
    half = len(signature) // 2
    return any(bit and complement for bit, complement in zip(signature[:half], signature[half:], strict=True))


def slots_of(group: Sequence[int], params: Sequence[ParamSpec]) -> tuple[Slot, ...]:
    """The parameters of `group` one behind the other."""
    slots, start = [], 0
    for param in group:
        slots.append(Slot(param=param, start=start, stop=start + params[param].slot_numel))
        start = slots[-1].stop
    return tuple(slots)


def padded_numel(numel: int, *, itemsize: int, num_ranks: int) -> int:
    """The least multiple of the number of ranks and of 16 bytes that holds `numel` elements."""
    unit = math.lcm(num_ranks, _ALIGN_BYTES // math.gcd(_ALIGN_BYTES, itemsize))
    return -(-numel // unit) * unit
