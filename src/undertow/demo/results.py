"""What ranks tell the process that started them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from undertow.demo.settings import Way
from undertow.profile import Profile
from undertow.trace import Trace, overlap_of

__all__ = ["Message", "ModelBuilt", "RankFailed", "StepDone", "WayDone", "way_done"]


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
