"""Compares groupings of gradients: the step time of each, as a table in the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from undertow.shown import table_of
from undertow.trace import Trace, overlap_of

# Nine of ten published step times are between these shares of their predictions
# (docs/fidelity.md).
BAND = (0.88, 1.09)
_COLUMNS = {
    "gradients_sent": ("gradients sent", ""),
    "buckets": ("buckets", "d"),
    "sent_mb": ("sent,\nMB", ".1f"),
    "step_ms": ("step,\nms", ".1f"),
    "computing_ms": ("comput-\ning, ms", ".1f"),
    "network_ms": ("network,\nms", ".1f"),
    "late_rank_ms": ("late\nrank, ms", ".1f"),
    "hidden": ("hidden", ".0%"),
    "efficiency": ("effi-\nciency", ".0%"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step under one grouping of gradients; microseconds.

    All times are of a typical rank, which waits for the network and for slower ranks.
    """

    method: str
    num_buckets: int
    trace: Trace
    step_us: float
    compute_us: float  # of a step without communication
    # the part of the waiting caused by slower ranks instead of the network
    late_rank_us: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers that the table shows, in milliseconds and shares, ready for JSON.

        Computing, waiting for the network and waiting for a late rank add up to the step; the two
        waits are the exposed time. Computing contains launches, copies and contention. Bytes are
        of gradients and of gathered parameters. The efficiency is the time of a step
        without communication, as a share of this step's.
        """
        overlap = overlap_of(self.trace)
        return {
            "gradients_sent": self.method,
            "buckets": self.num_buckets,
            "sent_mb": sum(event.num_bytes for event in self.trace.communication) / 1e6,
            "step_ms": self.step_us / 1e3,
            "computing_ms": (self.step_us - overlap.exposed_us) / 1e3,
            "network_ms": (overlap.exposed_us - self.late_rank_us) / 1e3,
            "late_rank_ms": self.late_rank_us / 1e3,
            "exposed_ms": overlap.exposed_us / 1e3,
            "hidden": overlap.fraction,
            "efficiency": self.compute_us / self.step_us if self.step_us > 0 else 1.0,
        }


def print_steps(steps: Sequence[SimulatedStep], console: Console) -> None:
    """Prints one line per method; fits into 80 columns."""
    table = table_of(_COLUMNS, [step.to_dict() for step in steps])
    best = min(range(len(steps)), key=lambda row: steps[row].step_us)
    table.rows[best].style = "bold"
    console.print(table)
    console.print(
        "Of a typical rank: computing, network and late rank add up to the step.",
        highlight=False,
    )
    low, high = (f"{share - 1:+.0%}" for share in BAND)
    console.print(f"Nine of ten published step times are {low} to {high} off their predictions.")
