"""What ranks tell the process that started them."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.demo.settings import Way
from undertow.trace import Trace

__all__ = ["Message", "ModelBuilt", "RankFailed", "StepDone", "WayDone"]


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
    """One way on one rank."""

    way: Way
    rank: int
    step_ms: float  # median of the measured steps
    trace: Trace  # of the step that took the median time
    loss: float  # of the last step
    gradients_agree: bool  # with the reference's


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A rank has met an exception, or died, and is gone."""

    rank: int
    failed_s: float  # time.perf_counter, which all processes of a machine share: the first failure is the cause
    traceback: str  # or how it ended
    remedy: str = ""


Message = ModelBuilt | StepDone | WayDone | RankFailed
