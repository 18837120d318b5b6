"""The earliest time at which all gradients can have crossed the link: what every row is compared with.

    limit = max over i of  r_i + C*(S_i)

r_i is when gradient i was ready on the last rank (measured on the bare model in the same run), S_i the bytes of all
gradients that are ready at r_i or later, C*(S) the cheapest way to send S bytes in any split (Gradient i and all later
ones cannot be on the wire before r_i). C* is taken from below: the seconds per byte of the best piece size that the
calibration of the same run has tried, without any latency, and no less than the fastest small collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What an all-reduce costs on a link, as measured at the beginning of a run."""

    seconds_per_byte: float  # of payload, at the best piece size
    least_s: float  # of the fastest small all-reduce

    def __post_init__(self) -> None:
        if self.seconds_per_byte < 0 or self.least_s < 0:
            raise ValueError(f"a link cannot take {self.seconds_per_byte} s per byte and {self.least_s} s at least")

    @property
    def megabytes_per_s(self) -> float:
        """Payload of an all-reduce per second."""
        return 1e-6 / self.seconds_per_byte if self.seconds_per_byte else float("inf")

    def cheapest_s(self, num_bytes: int) -> float:
        """C*: no split of `num_bytes` is through earlier."""
        return max(self.least_s, num_bytes * self.seconds_per_byte) if num_bytes else 0.0

    @property
    def half(self) -> Wire:
        """What a reduce-scatter costs, or an all-gather: each sends (n-1)/n of the payload, half of an all-reduce."""
        return Wire(seconds_per_byte=self.seconds_per_byte / 2, least_s=self.least_s / 2)


def wire_from_calibration(calibration: Mapping[str, Any]) -> Wire:
    """The best of what `calibrate` measured: trains of pieces by piece size, and small collectives one by one."""
    trains = calibration["trains"]
    return Wire(
        seconds_per_byte=min(train["seconds"] / train["bytes"] for train in trains),
        least_s=calibration["small_s"],
    )


def limit_s(ready_s: Sequence[float], num_bytes: Sequence[int], wire: Wire) -> float:
    """The limit for gradients that are ready at `ready_s` and have `num_bytes`, in any order; seconds as `ready_s`."""
    remaining, limit = 0, 0.0
    for ready, size in sorted(zip(ready_s, num_bytes, strict=True), reverse=True):
        remaining += size
        limit = max(limit, ready + wire.cheapest_s(remaining))
    return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A step of the bare model, in seconds since it began."""

    ready_s: Sequence[float]  # by parameter: its gradient is there
    used_s: Sequence[float]  # by parameter: it is first read in forward
    backward_s: float  # the end of backward
    update_s: float  # the optimizer's step, of what a rank has to update


def barrier_limit_s(compute: Compute, num_bytes: Sequence[int], wire: Wire) -> float:
    """The shortest period of steps that reduce-scatter under backward, then update, then gather under the next forward.

        limit = stall + max(backward, max over i of  r_i + C(S_i)) + update
        stall = max over i of  C(G_i) - u_i, and no less than 0

    No gather starts before the update, and no update before everything is reduced: two phases that have the link to
    themselves. G_i is the bytes of all parameters first read at u_i or earlier. The best order of gathers is that of the
    forward, so that a parameter is there at C(G_i) after the update; everything after the latest one is late by the stall.
    S_i is as in `limit_s`, C(S) the half of C*(S). Two layers of 4 bytes, forward 2 + 2, backward 4 + 4, update 1, all-reduce
    1 second per byte: the first layer is read at 0 and there at 2, the second one at 2 and at 4: stall 2. Gradients
    are ready at 8 (second) and 12 (first): max(12, 8 + 4, 12 + 2) = 14. The limit is 2 + 14 + 1 = 17, its compute 13.
    """
    stall_s = _latest(compute.used_s, num_bytes, wire.half)
    reduced_s = limit_s(compute.ready_s, num_bytes, wire.half)
    return stall_s + max(compute.backward_s, reduced_s) + compute.update_s


def _latest(used_s: Sequence[float], num_bytes: Sequence[int], wire: Wire) -> float:
    """By how much the forward falls behind, gathers being sent in its order from its beginning on."""
    gathered, stall = 0, 0.0
    for used, size in sorted(zip(used_s, num_bytes, strict=True)):
        gathered += size
        stall = max(stall, wire.cheapest_s(gathered) - used)
    return stall
