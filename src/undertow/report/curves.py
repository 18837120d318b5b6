"""Draws a sweep: the step time and the scaling efficiency of every method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from undertow.report.comparison import Outcome, Sweep
from undertow.report.shown import drawn
from undertow.report.timeline import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["save_curves"]

# By position of the method; the last method is the one of interest and stands out.
_STYLES = (("#a5a5a5", "s"), ("#2f75b5", "o"), ("#7fb069", "^"))
_LAST_COLOR = "#e4572e"
_INK, _FAINT_INK = "#333333", "#777777"
_LOG_RATIO = 5  # ratio from which a scale of times is logarithmic


def save_curves(sweep: Sweep, path: str | Path) -> None:
    """Writes a PNG with two panels over the varied quantity: ms per step, and efficiency. Needs matplotlib (ConfigError)."""
    require_matplotlib()
    # Not pyplot: it would keep the figure in its own list and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    steps, efficiencies = figure.subplots(1, 2)
    _draw(steps, sweep, lambda outcome: outcome.step_us / 1e3)
    _draw(efficiencies, sweep, lambda outcome: 100 * outcome.efficiency)
    _dress_times(steps, sweep)
    efficiencies.set_ylabel("scaling efficiency, %", fontsize=9.5, color=_INK)
    figure.suptitle(drawn(_takeaway(sweep)), x=0.012, ha="left", fontsize=13, fontweight="bold", color=_INK)
    handles, labels = steps.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=len(labels),
        frameon=False,
        fontsize=9.5,
        labelcolor=_INK,
        columnspacing=1.6,
    )
    figure.savefig(path)


def _draw(axes: Axes, sweep: Sweep, value_of: Callable[[Outcome], float]) -> None:
    values = [float(value) for value in sweep.points]
    *others, last = zip(*sweep.points.values(), strict=True)
    for outcomes, (color, marker) in zip(others, _STYLES, strict=False):
        heights = [*map(value_of, outcomes)]
        axes.plot(values, heights, label=drawn(outcomes[0].method), color=color, marker=marker, linewidth=1.5, markersize=4.5)
    # Dashed, so that a line underneath stays visible.
    axes.plot(
        values,
        [*map(value_of, last)],
        label=drawn(last[0].method),
        markersize=4.5,
        linewidth=2.2,
        color=_LAST_COLOR,
        marker="D",
        linestyle="--",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, list(sweep.points))
    axes.minorticks_off()
    axes.set_xlabel(drawn(f"{sweep.axis}, {sweep.unit}"), fontsize=9.5, color=_INK)
    axes.tick_params(labelsize=9, colors=_INK)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _dress_times(axes: Axes, sweep: Sweep) -> None:
    """Adds the step without communication, and a scale on which all curves are readable."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    outcomes = [outcome for point in sweep.points.values() for outcome in point]
    compute_ms = outcomes[0].compute_us / 1e3
    axes.axhline(compute_ms, color=_FAINT_INK, linewidth=1, linestyle=":", label="computing only")
    if max(outcome.step_us for outcome in outcomes) / 1e3 > _LOG_RATIO * compute_ms:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("ms per step", fontsize=9.5, color=_INK)


def _takeaway(sweep: Sweep) -> str:
    """Summarizes the last method: its efficiency at both ends, and its largest gain."""
    lasts = [point[-1] for point in sweep.points.values()]
    gain, other, value = max(
        (outcome.step_us / point[-1].step_us, outcome.method, value) for value, point in sweep.points.items() for outcome in point
    )
    ends = dict.fromkeys(f"{outcome.efficiency:.0%}" for outcome in (lasts[0], lasts[-1]))
    return f"{lasts[0].method}: {' to '.join(ends)} efficiency, up to {gain:.2f}x the speed of {other} (at {value} {sweep.unit})"
