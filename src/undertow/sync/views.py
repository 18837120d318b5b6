"""The views of the lab on what a model has recorded, loaded when a user asks for one.

The only module of the core that loads the lab. Training runs without the folder `undertow/lab`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undertow.plan import Plan
from undertow.trace import StepRecord
from undertow.trace.measured import Measurements

if TYPE_CHECKING:
    from undertow.lab.profile import Profile


def profile_of(
    measurements: Measurements,
    plan: Plan,
    *,
    strategy: str,
    wire: str | None,
    param_wire: str | None,
) -> Profile | None:
    """Returns the profile of measured steps, or None before there are any."""
    from undertow.lab import measurement

    return measurement.profile_of(
        measurements, plan, strategy=strategy, wire=wire, param_wire=param_wire
    )


def trace_text(records: Sequence[StepRecord], about: dict[str, Any]) -> str:
    """Returns the trace of consecutive steps for viewers, as JSON."""
    from undertow.lab import traces

    return traces.trace_text(records, about)


def path_of_rank(path: str | Path, rank: int, number: int) -> Path:
    """Returns the path of the trace of one rank and one model."""
    from undertow.lab import traces

    return traces.path_of_rank(path, rank, number)
