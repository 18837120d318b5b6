"""The events of one step, measured or simulated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

COMPUTE = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A half-open interval on a lane; times in microseconds since the step began. Gathers may have started before that."""

    lane: str  # "compute", or "comm." and the name of a mesh axis
    kind: str  # an op's kind, or "forward", "backward", "wait", "optimizer"
    start_us: float
    stop_us: float
    bucket: int | None = None
    num_bytes: int = 0  # payload of a collective; 0 if a communication hook sent it

    @property
    def duration_us(self) -> float:
        return self.stop_us - self.start_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The events of one step of one rank."""

    rank: int
    step: int
    events: tuple[Event, ...]

    def on_lane(self, lane: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.lane == lane)

    @property
    def duration_us(self) -> float:
        """Microseconds from the first event of the compute lane to the end of the last one."""
        events = self.on_lane(COMPUTE)
        return max(event.stop_us for event in events) - min(event.start_us for event in events) if events else 0.0

    @property
    def communication(self) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.lane != COMPUTE)

    def to_dict(self) -> dict[str, Any]:
        """Returns the trace as plain values, ready for JSON."""
        return asdict(self)
