"""What ranks tell the process that started them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from undertow.demo.settings import REFERENCE, Way
from undertow.profile import Profile
from undertow.trace import Trace, overlap_of

__all__ = ["Message", "ModelBuilt", "RankFailed", "StepDone", "Verdict", "WayDone", "way_done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBuilt:
    """Rank 0 has made the model and all ranks have met."""

    num_parameters: int  # elements
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One step of rank 0."""

    way: Way
    step: int  # from 0, the warm-up included
    step_ms: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WayDone:
    """One way on one rank; figures are medians over the measured steps."""

    way: Way
    rank: int
    step_ms: float
    exposed_ms: float
    overlap: float | None  # hidden share of the communication; None: there was none
    typical: Trace  # of the step that is closest to the medians
    loss: float  # of the last step
    gradients_agree: bool  # with the reference's
    parameters_agree: bool  # after the last step; True where adding in another order leads elsewhere
    profile: Profile | None = None  # what the library has measured; None of other ways, and of too few steps


def way_done(way: Way, traces: Sequence[Trace], *, loss: float, gradients_agree: bool, parameters_agree: bool = True) -> WayDone:
    """Sums up the measured steps of one way."""
    lengths = [trace.duration_us for trace in traces]
    overlaps = [overlap_of(trace) for trace in traces]
    length, exposed = median(lengths), median(overlap.exposed_us for overlap in overlaps)
    hidden = [overlap.fraction for overlap in overlaps if overlap.fraction is not None]
    distances = [abs(lengths[i] - length) + abs(overlaps[i].exposed_us - exposed) for i in range(len(traces))]
    return WayDone(
        way=way,
        rank=traces[0].rank,
        step_ms=length / 1e3,
        exposed_ms=exposed / 1e3,
        overlap=median(hidden) if hidden else None,
        typical=traces[distances.index(min(distances))],
        loss=loss,
        gradients_agree=gradients_agree,
        parameters_agree=parameters_agree,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A rank has met an exception, or died, and is gone."""

    rank: int
    failed_s: float  # time.perf_counter, which all processes of a machine share: the first failure is the cause
    traceback: str  # or how it ended
    remedy: str = ""


Message = ModelBuilt | StepDone | WayDone | RankFailed


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
