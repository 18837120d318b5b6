"""Draws steps as a picture: computation, network traffic, and waits of one for the other."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from undertow.errors import ConfigError
from undertow.report.shown import drawn
from undertow.trace import Event, Trace, overlap_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["require_matplotlib", "save_timeline"]

# Calm colors for work, a loud one for waiting. Light enough that bucket numbers are readable on them.
_COLORS = {
    "forward": "#9dc3e6",
    "backward": "#2f75b5",
    "wait": "#e4572e",
    "optimizer": "#a5a5a5",
    "reduce": "#7fb069",
    "gather": "#f2b134",
}
_LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "wait": "waiting for the network",
    "optimizer": "optimizer",
    "reduce": "gradients sent",
    "gather": "parameters gathered",
}
_INK = "#333333"
_FAINT_INK = "#777777"
_COMPUTE_HEIGHT = 0.40
_NETWORK_HEIGHT = 0.26
_INCHES_PER_WAY = 0.82
_WORTH_A_DIGIT = 1.2  # a gain below this would be shown as 1.0 or 1.1
_VISIBLE = 5e-4  # share of the axis; a narrower bar would only show its white edges


def require_matplotlib() -> None:
    """Raises ConfigError, naming the package to install, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "pictures need matplotlib, which is not installed.",
            where="undertow.report.timeline",
            remedy='Install it with: pip install "undertow[cli]"',
        )


def save_timeline(traces: Mapping[str, Trace], path: str | Path) -> None:
    """Writes a PNG with two rows per named trace, computation above network, on one axis in milliseconds.

    Events before the forward, such as gathers of parameters, are drawn to the left of 0. The trace of interest is the last, its
    baseline the first. Raises ConfigError without traces or matplotlib.
    """
    if not traces:
        raise ConfigError("a timeline needs at least one trace.", where="save_timeline")
    require_matplotlib()
    # Not pyplot: it would keep the figure in its own list and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.75 + _INCHES_PER_WAY * len(traces)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    start_ms = min(_start_ms(trace) for trace in traces.values())
    end_ms = max(_end_ms(trace) for trace in traces.values())
    for row, trace in enumerate(traces.values()):
        _draw_trace(axes, trace, row=row, axis_ms=end_ms - start_ms)
    _dress(axes, [drawn(name) for name in traces], start_ms=start_ms, end_ms=end_ms)
    _title_and_legend(figure, axes, traces)
    figure.savefig(path)


def _draw_trace(axes: Axes, trace: Trace, *, row: int, axis_ms: float) -> None:
    for event in trace.on_lane("compute"):
        if event.duration_us < axis_ms * 1e3 * _VISIBLE:
            continue
        _draw_bar(axes, event, top=row - _COMPUTE_HEIGHT, height=_COMPUTE_HEIGHT, color=_COLORS[event.kind])
    for event in trace.communication:
        _draw_bar(axes, event, top=row + 0.03, height=_NETWORK_HEIGHT, color=_COLORS[_name(event)])
    left = _end_ms(trace) + axis_ms * 0.008
    axes.text(left, row - 0.2, f"{_step_ms(trace):.0f} ms", va="center", fontsize=10.5, fontweight="bold", color=_INK)
    if (hidden := overlap_of(trace).fraction) is not None:
        axes.text(left, row + 0.15, f"{hidden:.0%} hidden", va="center", fontsize=8.5, color=_FAINT_INK)


def _draw_bar(axes: Axes, event: Event, *, top: float, height: float, color: str) -> None:
    axes.broken_barh(
        [(event.start_us / 1e3, event.duration_us / 1e3)],
        (top, height),
        facecolors=color,
        edgecolors="white",
        linewidth=0.6,
    )


def _dress(axes: Axes, names: Sequence[str], *, start_ms: float, end_ms: float) -> None:
    """Adds names, scales and lines around the bars."""
    axes.set_xlim(start_ms, end_ms + (end_ms - start_ms) * 0.085)
    axes.set_ylim(len(names) - 0.55, -0.6)  # the first trace on top
    axes.set_yticks([row - 0.05 for row in range(len(names))], names, fontsize=10.5, color=_INK)
    axes.set_xlabel("milliseconds since the forward began", fontsize=9.5, color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9, colors=_INK)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _title_and_legend(figure: Figure, axes: Axes, traces: Mapping[str, Trace]) -> None:
    from matplotlib.patches import Patch

    figure.suptitle(drawn(_takeaway(traces)), x=0.012, ha="left", fontsize=13, fontweight="bold", color=_INK)
    shown = {_name(event) for trace in traces.values() for event in trace.events if event.duration_us > 0}
    handles = [Patch(facecolor=_COLORS[kind], label=_LEGEND[kind]) for kind in _COLORS if kind in shown]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=9.5,
        handlelength=1.2,
        handleheight=1.0,
        borderaxespad=0.2,
        columnspacing=1.6,
        labelcolor=_INK,
    )


def _takeaway(traces: Mapping[str, Trace]) -> str:
    name, trace = list(traces.items())[-1]
    overlap = overlap_of(trace)
    if overlap.fraction is None:
        return f"{name}: {_step_ms(trace):.0f} ms per step, no communication"
    hidden = f"{overlap.fraction:.0%} of the network time is hidden"
    if len(traces) == 1:
        return f"{name}: {hidden}, {overlap.exposed_us / 1e3:.0f} of {_step_ms(trace):.0f} ms are spent waiting"
    first_name, first = next(iter(traces.items()))
    gain = _step_ms(first) / _step_ms(trace)
    digits = 1 if gain >= _WORTH_A_DIGIT else 2
    return f"{name}: {hidden}, {gain:.{digits}f}x the speed of {first_name}"


def _name(event: Event) -> str:
    """Returns the key of its color."""
    if event.lane == "compute":
        return event.kind
    return "gather" if event.kind == "all_gather" else "reduce"


def _step_ms(trace: Trace) -> float:
    return trace.duration_us / 1e3


def _start_ms(trace: Trace) -> float:
    return min((event.start_us for event in trace.events if event.duration_us > 0), default=0.0) / 1e3


def _end_ms(trace: Trace) -> float:
    return max((event.stop_us for event in trace.events), default=0.0) / 1e3
