"""Whether all ways have trained the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from undertow.demo.results import WayDone
from undertow.demo.settings import REFERENCE, Way

__all__ = ["Verdict"]

# Of the loss, with three or more ranks, where ways add in different orders: a last bit that differs in a gradient is a
# whole learning rate in AdamW's first steps where the gradient is nearly zero.
_LOSS_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What each way came to."""

    with_wrong_gradients: Sequence[Way]
    with_wrong_loss: Sequence[Way]
    with_wrong_parameters: Sequence[Way]

    @classmethod
    def of(cls, results: Mapping[Way, Sequence[WayDone]], *, num_ranks: int) -> Self:
        """Compares every way with the reference, rank by rank."""
        tolerance = 0.0 if num_ranks <= 2 else _LOSS_TOLERANCE
        right = results[REFERENCE]
        return cls(
            with_wrong_gradients=[way for way, mine in results.items() if not all(rank.gradients_agree for rank in mine)],
            with_wrong_parameters=[way for way, mine in results.items() if not all(rank.parameters_agree for rank in mine)],
            with_wrong_loss=[way for way, mine in results.items() if not _are_close(mine, right, tolerance)],
        )

    def agrees(self, way: Way) -> bool:
        return way not in self.with_wrong_gradients

    @property
    def complaints(self) -> list[str]:
        """A line per way that came to something else than the reference; empty when all is well."""
        return [
            *(f"{way.label}: its gradients are not the reference's." for way in self.with_wrong_gradients),
            *(f"{way.label}: its final loss is not the reference's." for way in self.with_wrong_loss),
            *(f"{way.label}: its parameters are not the reference's." for way in self.with_wrong_parameters),
        ]


def _are_close(mine: Sequence[WayDone], right: Sequence[WayDone], tolerance: float) -> bool:
    # A loss that is no number is close to nothing.
    return all(abs(one.loss - other.loss) <= tolerance * abs(other.loss) for one, other in zip(mine, right, strict=True))
