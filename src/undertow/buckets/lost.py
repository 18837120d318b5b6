"""Counts the gradient values that a format loses on their way, in a few synchronizations.

Encoding and decoding a bucket once more takes too long for every step.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from undertow.device import Accelerator, Host
from undertow.errors import listed
from undertow.plan import Bucket, Plan
from undertow.ranks.parcels import Encoded
from undertow.wire import forget_scratch

_EVERY = 100  # synchronizations between two counts, after the first 64
_MOST_LOST = 0.05  # of a gradient's nonzero values, without a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Counts of the gradients of one bucket that travel in a format. [slots, 4] int64: nonzero
    values, nonzero values that arrive as zero, values below the range of the format, and finite
    values above it."""

    wire: str
    names: list[str]
    counts: Tensor  # on the host
    copied: torch.Event | None  # the end of the copy from a device


@dataclass(slots=True)
class LostValues:
    """The losses of one rank's gradients in the formats that they travel in.

    Rounding to zero is right on average over steps (`undertow.ranks.dither`), so only the report
    shows it. A value outside of a format's range is lost in every step: a warning names its
    parameter, once.
    """

    device: Host | Accelerator
    is_counting: bool = False  # in this synchronization
    _num_rounds: int = 0
    _counted: list[_Counts] = field(default_factory=list)
    _share: float | None = None
    _told: set[tuple[str, str]] = field(default_factory=set)  # how it arrives, and a name

    def begin(self) -> None:
        """Called when a synchronization begins."""
        number, self._num_rounds = self._num_rounds, self._num_rounds + 1
        self.is_counting = number % _EVERY == 0 if number > 64 else number.bit_count() <= 1
        if self.is_counting and all(it.copied is None or it.copied.query() for it in self._counted):
            self._read()

    @torch.no_grad()
    def count(self, values: Tensor, spec: Bucket, plan: Plan, parcel: Encoded) -> None:
        """Looks at the gradients of a bucket before they are sent. Does not wait for a device.

        Args:
            values: The bucket's gradients. [numel]
            spec: The bucket.
            plan: Its plan.
            parcel: How they travel.
        """
        wire = parcel.wire
        if not parcel.is_host:
            forget_scratch()  # another stream may still use that of the bucket before
        narrow = values[: spec.narrow_numel]
        message = narrow.new_empty(wire.num_bytes(len(narrow)), dtype=torch.uint8)
        wire.encode(narrow, message, parcel.own_dither, is_host=parcel.is_host)
        arrived = torch.empty_like(narrow)
        wire.decode(message, arrived, adds=False)
        names, rows = [], []
        for slot in spec.slots:
            if slot.stop > spec.narrow_numel or slot.numel == 0:
                continue
            sizes = values[slot.start : slot.stop].abs()
            nonzero = sizes.count_nonzero()
            num_zeros = slot.numel - nonzero
            counts = (
                nonzero,
                nonzero - arrived[slot.start : slot.stop].count_nonzero(),
                (sizes <= wire.least).count_nonzero() - num_zeros,
                ((sizes > wire.largest) & sizes.isfinite()).count_nonzero(),
            )
            names.append(plan.params[slot.param].name)
            rows.append(torch.stack(counts))
        if rows:
            found, copied = torch.stack(rows), None
            if isinstance(self.device, Accelerator):
                found, copied = self.device.to_host(found), self.device.record()
            counted = _Counts(wire=str(spec.wire), names=names, counts=found, copied=copied)
            self._counted.append(counted)

    def round_ends(self) -> None:
        """Called when a synchronization has ended, in the thread that trains."""
        if self.is_counting and self.device.is_host:  # of a device, when the next count begins
            self._read()

    @property
    def share(self) -> float | None:
        """The share of nonzero values that arrived as zero when they were last counted.

        None if none was counted. On a device, the host waits.
        """
        for counted in self._counted:
            if counted.copied is not None:
                counted.copied.synchronize()
        self._read()
        return self._share

    def _read(self) -> None:
        """Reads counts that have arrived on the host."""
        counted, self._counted = self._counted, []
        num_nonzero = num_zeroed = 0
        below: dict[str, str] = {}
        above: dict[str, str] = {}
        for bucket in counted:
            rows: list[list[int]] = bucket.counts.tolist()
            for name, (nonzero, zeroed, num_below, num_above) in zip(
                bucket.names, rows, strict=True
            ):
                num_nonzero += nonzero
                num_zeroed += zeroed
                if num_below > _MOST_LOST * nonzero:
                    below[name] = bucket.wire
                if num_above:
                    above[name] = bucket.wire
        if num_nonzero:
            self._share = num_zeroed / num_nonzero
        self._tell(below, "are too small for", "arrive as zero in every step")
        self._tell(above, "are too large for", "arrive as Inf")

    def _tell(self, wires: dict[str, str], are: str, arrive: str) -> None:
        new = [name for name in wires if (arrive, name) not in self._told]
        if not new:
            return
        self._told.update((arrive, name) for name in new)
        wire = wires[new[0]]
        warnings.warn(
            f"gradient values {are} wire={wire!r}, and {arrive}.\n"
            f"  parameter {listed(list(map(repr, new)))}\n"
            f"  {_REMEDIES.get(wire, _REMEDIES['int8'])}",
            stacklevel=2,
        )


_REMEDIES = {
    "float16": 'Set wire="bfloat16" or wire="int8", which have the range of float32.',
    "int8": "It has the range of float32: scale the loss, or leave wire out.",
}
