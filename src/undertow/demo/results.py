"""Messages from the ranks to the process that started them."""

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
    """Rank 0 has built the model and all ranks have met."""

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
    """One variant on one rank; figures are medians over the measured steps."""

    way: Way
    rank: int
    step_ms: float
    exposed_ms: float
    overlap: float | None  # hidden share of the communication; None: there was none
    typical: Trace  # of the step that is closest to the medians
    loss: float  # of the last step
    gradients_agree: bool  # with the reference's
    parameters_agree: bool  # after the last step; True if another order of addition leads to different parameters
    profile: Profile | None = None  # the library's profile; None for other variants, and after too few steps


def way_done(way: Way, traces: Sequence[Trace], *, loss: float, gradients_agree: bool, parameters_agree: bool = True) -> WayDone:
    """Summarizes the measured steps of one variant."""
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
    """A rank has raised an exception or died."""

    rank: int
    failed_s: float  # time.perf_counter, which all processes of a machine share: the first failure is the cause
    traceback: str  # or how it ended
    remedy: str = ""


Message = ModelBuilt | StepDone | WayDone | RankFailed


# Tolerance of the loss with three or more ranks, when variants add in different orders: in AdamW's first steps a differing last
# bit of a gradient that is nearly zero changes the update by a whole learning rate.
_LOSS_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of each variant."""

    with_wrong_gradients: Sequence[Way]
    with_wrong_loss: Sequence[Way]
    with_wrong_parameters: Sequence[Way]

    @classmethod
    def of(cls, results: Mapping[Way, Sequence[WayDone]], *, num_ranks: int) -> Self:
        """Compares every variant with the reference, rank by rank."""
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
        """One line per variant that differs from the reference; empty if all agree."""
        return [
            *(f"{way.label}: its gradients are not the reference's." for way in self.with_wrong_gradients),
            *(f"{way.label}: its final loss is not the reference's." for way in self.with_wrong_loss),
            *(f"{way.label}: its parameters are not the reference's." for way in self.with_wrong_parameters),
        ]


def _are_close(mine: Sequence[WayDone], right: Sequence[WayDone], tolerance: float) -> bool:
    # A NaN loss is close to nothing.
    return all(abs(one.loss - other.loss) <= tolerance * abs(other.loss) for one, other in zip(mine, right, strict=True))
