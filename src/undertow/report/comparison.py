"""Compares groupings of gradients: the step time of each, as a table in the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from undertow.shown import cell
from undertow.trace import Trace, overlap_of

# Nine of ten published steps lie between these shares of their predictions (docs/fidelity.md).
BAND = (0.88, 1.09)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step under one grouping of gradients; microseconds."""

    method: str
    num_buckets: int
    trace: Trace
    step_us: float
    compute_us: float  # of a step without communication
    # the part of the waiting caused by slower ranks instead of the network
    late_rank_us: float = 0.0

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the time of a step without communication, as a share of this
        step's."""
        return self.compute_us / self.step_us if self.step_us > 0 else 1.0

    @property
    def sent_bytes(self) -> int:
        """Bytes that are passed to collectives: of gradients, and of gathered parameters."""
        return sum(event.num_bytes for event in self.trace.communication)

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers that the table shows, in milliseconds and shares, ready for JSON."""
        overlap = overlap_of(self.trace)
        return {
            "gradients_sent": self.method,
            "buckets": self.num_buckets,
            "sent_mb": self.sent_bytes / 1e6,
            "step_ms": self.step_us / 1e3,
            "exposed_ms": overlap.exposed_us / 1e3,
            "late_rank_ms": self.late_rank_us / 1e3,
            "hidden": overlap.fraction,
            "efficiency": self.efficiency,
        }


def print_steps(steps: Sequence[SimulatedStep], console: Console) -> None:
    """Prints one line per method; fits into 80 columns."""
    table = Table("gradients sent", padding=0)
    for name in (
        "buckets",
        "sent,\nMB",
        "step,\nms",
        "exposed,\nms",
        "late\nrank, ms",
        "hidden",
        "efficiency",
    ):
        table.add_column(name, justify="right")
    best_us = min(step.step_us for step in steps)
    for step in steps:
        overlap = overlap_of(step.trace)
        table.add_row(
            cell(step.method),
            str(step.num_buckets),
            f"{step.sent_bytes / 1e6:.1f}",
            f"{step.step_us / 1e3:.1f}",
            f"{overlap.exposed_us / 1e3:.1f}",
            f"{step.late_rank_us / 1e3:.1f}",
            "-" if overlap.fraction is None else f"{overlap.fraction:.0%}",
            f"{step.efficiency:.0%}",
            style="bold" if step.step_us == best_us else None,
        )
    console.print(table)
    low, high = (f"{share - 1:+.0%}" for share in BAND)
    console.print(f"Nine of ten published steps lie {low} to {high} from their predictions.")
