"""Compares groupings of gradients: the step time of each, as tables in the terminal and as curves in a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from undertow.report.timeline import FAINT_INK, INK, drawn, dress, new_figure
from undertow.shown import cell
from undertow.trace import Trace, overlap_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# By position of the method; the last method is the one of interest and stands out. It is dashed, so that a line underneath stays
# visible.
_STYLES: Sequence[Mapping[str, Any]] = (
    {"color": "#a5a5a5", "marker": "s", "linewidth": 1.5},
    {"color": "#2f75b5", "marker": "o", "linewidth": 1.5},
    {"color": "#7fb069", "marker": "^", "linewidth": 1.5},
)
_LAST_STYLE: Mapping[str, Any] = {"color": "#e4572e", "marker": "D", "linewidth": 2.2, "linestyle": "--"}


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
    has_late_ranks = any(outcome.late_rank_us > 0 for outcome in outcomes)
    late = ("of it a late rank",) if has_late_ranks else ()
    names = ("buckets", "step, ms", "exposed, ms", *late, "hidden", "achieved / limit", "efficiency")
    table = Table("gradients sent", *(Column(name, justify="right") for name in names))
    best_us = min(outcome.step_us for outcome in outcomes)
    for outcome in outcomes:
        step, exposed, hidden, efficiency = _figures(outcome)
        table.add_row(
            cell(outcome.method),
            str(outcome.num_buckets),
            step,
            exposed,
            *([f"{outcome.late_rank_us / 1e3:.1f}"] if has_late_ranks else []),
            hidden,
            f"{outcome.step_us / outcome.limit_us:.3f}" if outcome.limit_us > 0 else "-",
            efficiency,
            style="bold" if outcome.step_us == best_us else None,
        )
    console.print(table)


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Prints one block per value with one line per method; fits into 80 columns."""
    columns = (Column(name, justify="right") for name in ("step, ms", "exposed, ms", "hidden", "efficiency"))
    table = Table(Column(sweep.unit, justify="right"), "gradients sent", *columns, title=f"By {sweep.axis}", title_justify="left")
    for value, outcomes in sweep.points.items():
        table.add_section()
        for place, outcome in enumerate(outcomes):
            table.add_row("" if place else value, cell(outcome.method), *_figures(outcome))
    console.print(table)


def _figures(outcome: Outcome) -> tuple[str, str, str, str]:
    """Returns the step, its exposed communication, the hidden share of it, and the efficiency."""
    overlap = overlap_of(outcome.trace)
    hidden = "-" if overlap.fraction is None else f"{overlap.fraction:.0%}"
    return f"{outcome.step_us / 1e3:.1f}", f"{overlap.exposed_us / 1e3:.1f}", hidden, f"{outcome.efficiency:.1%}"


def save_curves(sweep: Sweep, path: str | Path) -> None:
    """Writes a PNG with two panels over the varied quantity: ms per step, and efficiency."""
    from matplotlib.ticker import LogLocator

    figure = new_figure(_takeaway(sweep), inches=4.6)
    steps, efficiencies = figure.subplots(1, 2)
    _draw(steps, sweep, lambda outcome: outcome.step_us / 1e3)
    _draw(efficiencies, sweep, lambda outcome: 100 * outcome.efficiency)
    outcomes = [outcome for point in sweep.points.values() for outcome in point]
    compute_ms = outcomes[0].compute_us / 1e3
    steps.axhline(compute_ms, color=FAINT_INK, linewidth=1, linestyle=":", label="computing only")
    if max(outcome.step_us for outcome in outcomes) / 1e3 > 5 * compute_ms:  # or the lower curves could not be told apart
        steps.set_yscale("log")
        steps.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        steps.yaxis.set_major_formatter("{x:g}")
        steps.minorticks_off()
    steps.set_ylabel("ms per step", fontsize=9.5, color=INK)
    efficiencies.set_ylabel("scaling efficiency, %", fontsize=9.5, color=INK)
    handles, labels = steps.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=len(labels),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        columnspacing=1.6,
    )
    figure.savefig(path)


def _draw(axes: Axes, sweep: Sweep, value_of: Callable[[Outcome], float]) -> None:
    values = [float(value) for value in sweep.points]
    *others, last = zip(*sweep.points.values(), strict=True)
    for outcomes, style in (*zip(others, _STYLES, strict=False), (last, _LAST_STYLE)):
        axes.plot(values, [*map(value_of, outcomes)], label=drawn(outcomes[0].method), markersize=4.5, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, list(sweep.points))
    axes.minorticks_off()
    axes.tick_params(labelsize=9, colors=INK)
    dress(axes, f"{sweep.axis}, {sweep.unit}", grid="both", without=("top", "right"))


def _takeaway(sweep: Sweep) -> str:
    """Summarizes the last method: its efficiency at both ends, and its largest gain."""
    lasts = [point[-1] for point in sweep.points.values()]
    gain, other, value = max(
        (outcome.step_us / point[-1].step_us, outcome.method, value) for value, point in sweep.points.items() for outcome in point
    )
    ends = dict.fromkeys(f"{outcome.efficiency:.0%}" for outcome in (lasts[0], lasts[-1]))
    return f"{lasts[0].method}: {' to '.join(ends)} efficiency, up to {gain:.2f}x the speed of {other} (at {value} {sweep.unit})"
