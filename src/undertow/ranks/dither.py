"""Offsets that are added to values before they are rounded, so that errors average out over steps.

Without them a value below half a unit of its block arrives as zero in every step. With offsets that
are spread evenly over a unit, it arrives as a whole unit in its share of the steps.

The offsets of an element depend on its place in its block, on the step, on the rank, and on the
stage of the exchange. They depend on no bucket, so bits do not depend on the plan.

Reasons: docs/design/exchanges.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from undertow.torch_private import private

# Offsets are fractions of a unit, as integers below `_UNIT`: the same on every processor.
_UNIT = 1 << 24
_BITS_DROPPED = 10
_STEP = 2.0**-14  # of a unit, between offsets: the outermost one must not round 127 up to 128
_GOLDEN = 10368889  # `_UNIT` divided by the golden ratio, and odd: spreads 512 elements evenly
_RANK_TURN = 6408327  # between the offsets of two ranks
_WORD = (1 << 31) - 1  # products of two words fit into 64 bits
_NUM_PARAMS, _NUM_ELEMENTS = 8, 64  # that a digest reads: at most, and of each


class Rounding(IntEnum):
    """A rounding on the way of a gradient. The roundings must not depend on each other."""

    OWN = 0  # of a rank's own values
    ACROSS = 1  # of the sums of a row, for the other rows of a mesh
    MEAN = 2  # of a part's mean, by its owner: the same on every rank, for any owner


# The offsets of each stage turn by these when a synchronization repeats: `_UNIT` divided by powers
# of the root of x^4 = x + 1. Together they cover all combinations evenly.
_TURNS = (13743435, 11258243, 9222445)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The offsets of one synchronization."""

    digest: Tensor | int  # [] int64 below 2^31: of the parameters
    repeats: Tensor | int = 0  # [] int64: synchronizations before it with the same digest
    _rows: dict[tuple[int, Rounding, int], Tensor] = field(default_factory=dict)

    def offsets(self, numel: int, stage: Rounding, *, rank: int, device: torch.device) -> Tensor:
        """Returns the offsets of the elements of a block, between -1/2 and 1/2. [numel] float32"""
        key = (numel, stage, rank)
        # On a device, another bucket's stream may not have waited for the row.
        if key not in self._rows or isinstance(self.digest, Tensor):
            turned = _mixed(self.digest, stage) + self.repeats * _TURNS[stage] + rank * _RANK_TURN
            if isinstance(turned, Tensor):
                turned = turned.to(device)
            places = torch.arange(numel, device=device).mul_(_GOLDEN).add_(turned)
            steps = places.bitwise_and_(_UNIT - 1).bitwise_right_shift_(_BITS_DROPPED)
            # Every product and sum is exact.
            self._rows[key] = steps.float().mul_(_STEP).add_(_STEP / 2 - 0.5)
        return self._rows[key]


def _mixed(digest: Tensor | int, stage: Rounding) -> Tensor | int:
    """Returns a pseudo-random number below 2^31; numbers of different stages look independent."""
    mixed = (digest + (stage + 1) * 0x3C6EF372) & _WORD
    for factor in (0x45D9F3B5, 0x2C1B3C6D):
        mixed = ((mixed ^ (mixed >> 15)) * factor) & _WORD
    return mixed ^ (mixed >> 16)


class Rotation:
    """Chooses the turn of each synchronization from the parameters.

    An optimizer changes them in every step, and every checkpoint restores them: a run that is
    resumed has the bits of the run without the break. A number of steps would be in no plain
    `state_dict()`. Between two steps the parameters stay, so synchronizations are counted there.
    """

    def __init__(self, *, is_host: bool) -> None:
        self.now = Turn(0)
        self._is_host = is_host  # parameters are on the host
        self._weights: Tensor | None = None

    def advance(self, params: Sequence[Tensor]) -> None:
        """Called when a synchronization of `params`, at least one, begins.

        Their values have arrived.
        """
        digest, before = self._digest(params), self.now
        repeats: Tensor | int = 0
        if isinstance(digest, Tensor):
            repeats = torch.where(digest == before.digest, before.repeats + 1, 0)
        elif digest == before.digest:
            repeats = before.repeats + 1
        self.now = Turn(digest, repeats)

    @torch.no_grad()
    def _digest(self, params: Sequence[Tensor]) -> Tensor | int:
        """Returns a digest of some elements of some parameters; the host does not wait for a
        device."""
        step = -(-len(params) // _NUM_PARAMS)
        chosen = [param for param in params[::step] if param.device == params[0].device]
        with private.as_plain_tensors():
            sample = torch.cat(list(map(_some_of, chosen)))
        if self._weights is None or len(self._weights) != len(sample):
            places = torch.arange(1, len(sample) + 1, device=sample.device)
            self._weights = (places * 0x9E3779B1 >> 7) % (1 << 20) | 1  # their sum fits too
        bits = sample.view(torch.int32).long() & _WORD
        total = (bits * self._weights).sum()
        total = (total ^ (total >> 29)) & _WORD
        return int(total) if self._is_host else total


def _some_of(param: Tensor) -> Tensor:
    """Returns elements of a parameter, from its first to about its last. float32"""
    flat = (torch.view_as_real(param) if param.is_complex() else param).reshape(-1)
    return flat[:: -(-flat.numel() // _NUM_ELEMENTS) or 1].float()
