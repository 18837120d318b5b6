"""Compares groupings of gradients: the step time of each, as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from undertow.report.shown import cell
from undertow.trace import Trace, overlap_of

__all__ = ["Outcome", "Sweep", "print_outcomes", "print_sweep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A simulated step under one grouping of gradients; microseconds."""

    method: str
    num_buckets: int
    trace: Trace
    step_us: float
    compute_us: float  # of a step without communication
    limit_us: float  # lower bound of the step time for every grouping
    late_rank_us: float = 0.0  # the part of the waiting caused by slower ranks instead of the network

    @property
    def exposed_us(self) -> float:
        return overlap_of(self.trace).exposed_us

    @property
    def overlap(self) -> float | None:
        """Hidden share of the communication; None without communication."""
        return overlap_of(self.trace).fraction

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the time of a step without communication, as a share of this step's."""
        return self.compute_us / self.step_us if self.step_us > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Outcomes by value of the varied quantity; every value has the same methods in the same order."""

    axis: str  # the varied quantity
    unit: str
    points: Mapping[str, Sequence[Outcome]]  # by value, as text


def print_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints one line per method."""
    table = Table()
    has_late_ranks = any(outcome.late_rank_us > 0 for outcome in outcomes)
    late = ("of it a late rank",) if has_late_ranks else ()
    table.add_column("gradients sent")
    for name in ("buckets", "step, ms", "exposed, ms", *late, "hidden", "achieved / limit", "efficiency"):
        table.add_column(name, justify="right")
    best_us = min(outcome.step_us for outcome in outcomes)
    for outcome in outcomes:
        table.add_row(
            cell(outcome.method),
            str(outcome.num_buckets),
            _ms(outcome.step_us),
            _ms(outcome.exposed_us),
            *([_ms(outcome.late_rank_us)] if has_late_ranks else []),
            _hidden(outcome),
            f"{outcome.step_us / outcome.limit_us:.3f}" if outcome.limit_us > 0 else "-",
            f"{outcome.efficiency:.1%}",
            style="bold" if outcome.step_us == best_us else None,
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
            table.add_row(
                value if place == 0 else "",
                cell(outcome.method),
                _ms(outcome.step_us),
                _ms(outcome.exposed_us),
                _hidden(outcome),
                f"{outcome.efficiency:.1%}",
            )
    console.print(table)


def _hidden(outcome: Outcome) -> str:
    return "-" if outcome.overlap is None else f"{outcome.overlap:.0%}"


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f}"
