"""Compares groupings of gradients: the step time of each, as a table in the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from undertow.lab.what_if import WhatIf
from undertow.shown import table_of
from undertow.trace import StepRecord

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
    """The record of a simulated step under one grouping of gradients, as a row of a table.

    It is of a typical rank, which waits for the network and for slower ranks.
    """

    method: str
    num_buckets: int
    record: StepRecord
    compute_us: float  # of a step without communication

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers that the table shows, in milliseconds and shares, ready for JSON.

        Computing, waiting for the network and waiting for a late rank add up to the step; the two
        waits are the exposed time. Computing contains launches, copies and contention. Bytes are
        of gradients and of gathered parameters. The efficiency is the time of a step
        without communication, as a share of this step's.
        """
        overlap = self.record.overlap()
        step_us, late_rank_us = self.record.step_us, self.record.late_rank_us()
        sent = (*self.record.gathers, *self.record.buckets)
        return {
            "gradients_sent": self.method,
            "buckets": self.num_buckets,
            "sent_mb": sum(row.num_bytes for row in sent) / 1e6,
            "step_ms": step_us / 1e3,
            "computing_ms": (step_us - overlap.exposed_us) / 1e3,
            "network_ms": (overlap.exposed_us - late_rank_us) / 1e3,
            "late_rank_ms": late_rank_us / 1e3,
            "exposed_ms": overlap.exposed_us / 1e3,
            "hidden": overlap.fraction,
            "efficiency": self.compute_us / step_us if step_us > 0 else 1.0,
        }


def compared(what_if: WhatIf) -> tuple[SimulatedStep, ...]:
    """Returns the simulated step under each plan that is compared."""
    steps = []
    for method, plan in what_if.plans().items():
        step = SimulatedStep(
            method=method,
            num_buckets=len(plan.buckets),
            record=what_if.step(plan),
            compute_us=what_if.divided(plan).compute_us,
        )
        steps.append(step)
    return tuple(steps)


def print_steps(steps: Sequence[SimulatedStep], console: Console) -> None:
    """Prints one line per method; fits into 80 columns."""
    table = table_of(_COLUMNS, [step.to_dict() for step in steps])
    best = min(range(len(steps)), key=lambda row: steps[row].record.step_us)
    table.rows[best].style = "bold"
    console.print(table)
    console.print(
        "Of a typical rank: computing, network and late rank add up to the step.",
        highlight=False,
    )
    low, high = (f"{share - 1:+.0%}" for share in BAND)
    console.print(
        f"Nine of ten published step times are within {low} and {high} of their predictions. "
        "If the profile is of ranks over gloo on one machine, or of another link than the one "
        "given, only compare plans with each other.",
    )
