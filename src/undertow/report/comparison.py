"""Compares groupings of gradients: the step time of each, as tables in the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from undertow.shown import cell
from undertow.trace import Trace, overlap_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A simulated step under one grouping of gradients; microseconds."""

    method: str
    num_buckets: int
    trace: Trace
    step_us: float
    compute_us: float  # of a step without communication
    limit_us: float  # lower bound of the step time for every grouping
    band_us: tuple[float, float]  # p10 and p90 of the step
    # the part of the waiting caused by slower ranks instead of the network
    late_rank_us: float = 0.0

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the time of a step without communication, as a share of this
        step's."""
        return self.compute_us / self.step_us if self.step_us > 0 else 1.0

    @property
    def efficiency_band(self) -> tuple[float, float]:
        """Its p10 and p90, at most 1."""
        low_us, high_us = (max(us, self.compute_us) or 1.0 for us in self.band_us)
        return self.compute_us / high_us, self.compute_us / low_us

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers that the table shows, in milliseconds and shares, ready for JSON."""
        overlap = overlap_of(self.trace)
        return {
            "gradients_sent": self.method,
            "buckets": self.num_buckets,
            "step_ms": self.step_us / 1e3,
            "step_p10_p90_ms": [us / 1e3 for us in self.band_us],
            "exposed_ms": overlap.exposed_us / 1e3,
            "late_rank_ms": self.late_rank_us / 1e3,
            "hidden": overlap.fraction,
            "limit_ms": self.limit_us / 1e3,
            "efficiency": self.efficiency,
            "efficiency_p10_p90": [*self.efficiency_band],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Outcomes by value of the varied quantity; every value has the same methods in the same
    order."""

    axis: str  # the varied quantity
    unit: str
    points: Mapping[str, Sequence[Outcome]]  # by value, as text


def print_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints one line per method; fits into 80 columns."""
    has_late_ranks = any(outcome.late_rank_us > 0 for outcome in outcomes)
    table = Table("gradients sent", padding=0)
    for name in ("buck-\nets", "step\nms", "p10-p90\nms", "exposed\nms"):
        table.add_column(name, justify="right")
    if has_late_ranks:
        table.add_column("late\nrank", justify="right")
    for name in ("hid-\nden", "x the\nlimit", "effi-\nciency"):
        table.add_column(name, justify="right")
    best_us = min(outcome.step_us for outcome in outcomes)
    for outcome in outcomes:
        step, exposed, hidden, efficiency = _figures(outcome)
        low_us, high_us = outcome.band_us
        row = [str(outcome.num_buckets), step, f"{low_us / 1e3:.1f}-{high_us / 1e3:.1f}", exposed]
        if has_late_ranks:
            row.append(f"{outcome.late_rank_us / 1e3:.1f}")
        limits = f"{outcome.step_us / outcome.limit_us:.3f}" if outcome.limit_us > 0 else "-"
        # In fewer columns than a sweep has for the efficiency.
        row += [hidden, limits, efficiency.replace("% to ", "-")]
        table.add_row(
            cell(outcome.method), *row, style="bold" if outcome.step_us == best_us else None
        )
    console.print(table)


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Prints one block per value with one line per method; fits into 80 columns."""
    table = Table(title=f"By {sweep.axis}", title_justify="left")
    table.add_column(sweep.unit, justify="right")
    table.add_column("gradients sent")
    for name in ("step, ms", "exposed, ms", "hidden", "efficiency"):
        table.add_column(name, justify="right")
    for value, outcomes in sweep.points.items():
        table.add_section()
        for place, outcome in enumerate(outcomes):
            table.add_row("" if place else value, cell(outcome.method), *_figures(outcome))
    console.print(table)


def _figures(outcome: Outcome) -> tuple[str, str, str, str]:
    """Returns the step, its exposed communication, the hidden share of it, and the efficiency."""
    overlap = overlap_of(outcome.trace)
    low, high = outcome.efficiency_band
    return (
        f"{outcome.step_us / 1e3:.1f}",
        f"{overlap.exposed_us / 1e3:.1f}",
        "-" if overlap.fraction is None else f"{overlap.fraction:.0%}",
        f"{low:.0%} to {high:.0%}",
    )
