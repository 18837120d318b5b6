"""Compares groupings of gradients: the step time of each, as tables in the terminal and as curves in a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from undertow.report.timeline import LEAST_GAIN, drawn, dress, new_figure, save_themes
from undertow.shown import cell
from undertow.trace import Trace, overlap_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By position of the method; the last method is the one of interest and stands out. It is dashed, so that a line underneath stays
# visible.
_STYLES: Sequence[Mapping[str, Any]] = (
    {"color": "#999999", "marker": "s", "linewidth": 1.5},
    {"color": "#0072b2", "marker": "o", "linewidth": 1.5},
    {"color": "#cc79a7", "marker": "^", "linewidth": 1.5},
    {"color": "#e69f00", "marker": "v", "linewidth": 1.5},
)
_LAST_STYLE: Mapping[str, Any] = {"color": "#d55e00", "marker": "D", "linewidth": 2.2, "linestyle": "--"}


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
    late_rank_us: float = 0.0  # the part of the waiting caused by slower ranks instead of the network

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the time of a step without communication, as a share of this step's."""
        return self.compute_us / self.step_us if self.step_us > 0 else 1.0

    @property
    def efficiency_band(self) -> tuple[float, float]:
        """Its p10 and p90, at most 1."""
        low_us, high_us = (max(us, self.compute_us) or 1.0 for us in self.band_us)
        return self.compute_us / high_us, self.compute_us / low_us

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers that the table shows, in milliseconds and shares, ready for JSON."""
        return {
            "gradients_sent": self.method,
            "buckets": self.num_buckets,
            "step_ms": self.step_us / 1e3,
            "step_p10_p90_ms": [us / 1e3 for us in self.band_us],
            "exposed_ms": overlap_of(self.trace).exposed_us / 1e3,
            "late_rank_ms": self.late_rank_us / 1e3,
            "hidden": overlap_of(self.trace).fraction,
            "limit_ms": self.limit_us / 1e3,
            "efficiency": self.efficiency,
            "efficiency_p10_p90": [*self.efficiency_band],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Outcomes by value of the varied quantity; every value has the same methods in the same order."""

    axis: str  # the varied quantity
    unit: str
    points: Mapping[str, Sequence[Outcome]]  # by value, as text


def print_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints one line per method; fits into 80 columns."""
    has_late_ranks = any(outcome.late_rank_us > 0 for outcome in outcomes)
    late = ("late\nrank",) if has_late_ranks else ()
    names = ("buck-\nets", "step\nms", "p10-p90\nms", "exposed\nms", *late, "hid-\nden", "x the\nlimit", "effi-\nciency")
    table = Table("gradients sent", *(Column(name, justify="right") for name in names), padding=0)
    best_us = min(outcome.step_us for outcome in outcomes)
    for outcome in outcomes:
        step, exposed, hidden, efficiency = _figures(outcome)
        table.add_row(
            cell(outcome.method),
            str(outcome.num_buckets),
            step,
            "{:.1f}-{:.1f}".format(*(us / 1e3 for us in outcome.band_us)),
            exposed,
            *([f"{outcome.late_rank_us / 1e3:.1f}"] if has_late_ranks else []),
            hidden,
            f"{outcome.step_us / outcome.limit_us:.3f}" if outcome.limit_us > 0 else "-",
            efficiency.replace("% to ", "-"),  # in fewer columns than a sweep has for it
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
    return (
        f"{outcome.step_us / 1e3:.1f}",
        f"{overlap.exposed_us / 1e3:.1f}",
        "-" if overlap.fraction is None else f"{overlap.fraction:.0%}",
        "{:.0%} to {:.0%}".format(*outcome.efficiency_band),
    )


def save_curves(sweep: Sweep, path: str | Path, *, conditions: str = "") -> None:
    """Writes a PNG with two panels over the varied quantity: ms per step, and efficiency; another one for dark pages."""
    save_themes(lambda: _curves(sweep, conditions), Path(path))


def _curves(sweep: Sweep, conditions: str) -> Figure:
    from matplotlib.ticker import LogLocator

    figure = new_figure(_takeaway(sweep), inches=4.6)
    steps, efficiencies = figure.subplots(1, 2)
    _draw(steps, sweep, lambda outcome: outcome.step_us / 1e3)
    limits_ms = [min(outcome.limit_us for outcome in point) / 1e3 for point in sweep.points.values()]
    steps.plot([*map(float, sweep.points)], limits_ms, color="#009e73", linewidth=1.5, linestyle="-.", label="lower bound")
    _draw(efficiencies, sweep, lambda outcome: 100 * outcome.efficiency)
    outcomes = [outcome for point in sweep.points.values() for outcome in point]
    compute_ms = outcomes[0].compute_us / 1e3
    steps.axhline(compute_ms, color="#888888", linewidth=1, linestyle=":", label="computing only")
    if max(outcome.step_us for outcome in outcomes) / 1e3 > 5 * compute_ms:  # or the lower curves could not be told apart
        steps.set_yscale("log")
        steps.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        steps.yaxis.set_major_formatter("{x:g}")
        steps.minorticks_off()
    else:
        steps.set_ylim(bottom=0)
    efficiencies.set_ylim(0, 105)
    steps.set_ylabel("ms per step", fontsize=9.5)
    efficiencies.set_ylabel("scaling efficiency, %", fontsize=9.5)
    handles, labels = steps.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=len(labels),
        frameon=False,
        fontsize=9.5,
        columnspacing=1.6,
        title=drawn(conditions),
        title_fontsize=8.5,
        alignment="left",
    )
    return figure


def _draw(axes: Axes, sweep: Sweep, value_of: Callable[[Outcome], float]) -> None:
    values = [float(value) for value in sweep.points]
    *others, last = zip(*sweep.points.values(), strict=True)
    for outcomes, style in (*zip(others, _STYLES, strict=False), (last, _LAST_STYLE)):
        axes.plot(values, [*map(value_of, outcomes)], label=drawn(outcomes[0].method), markersize=4.5, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, list(sweep.points))
    axes.minorticks_off()
    axes.tick_params(labelsize=9)
    dress(axes, f"{sweep.axis}, {sweep.unit}", grid="both", without=("top", "right"))


def _takeaway(sweep: Sweep) -> str:
    """Summarizes the last method: its efficiency at both ends, and its largest gain."""
    lasts = [point[-1] for point in sweep.points.values()]
    gain, other, value = max(
        (outcome.step_us / point[-1].step_us, outcome.method, value) for value, point in sweep.points.items() for outcome in point
    )
    ends = dict.fromkeys(f"{outcome.efficiency:.0%}" for outcome in (lasts[0], lasts[-1]))
    gained = f"up to {gain:.2f}x the speed of {other} (at {value} {sweep.unit})"
    return f"{lasts[0].method}: {' to '.join(ends)} efficiency, {gained if gain >= LEAST_GAIN else 'as fast as the others'}"
