"""Draws steps as a picture: computation, network traffic, and waits of one for the other."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from undertow.errors import ConfigError, require
from undertow.foreign import printable
from undertow.trace import Event, Trace, overlap_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The color of each kind and its name: calm colors for work, a loud one for waiting.
_KINDS = {
    "forward": ("#9dc3e6", "forward"),
    "backward": ("#2f75b5", "backward"),
    "wait": ("#e4572e", "waiting for the network"),
    "optimizer": ("#a5a5a5", "optimizer"),
    "reduce": ("#7fb069", "gradients sent"),
    "all_gather": ("#f2b134", "parameters gathered"),
}
INK, FAINT_INK = "#333333", "#777777"


def require_matplotlib() -> None:
    """Raises ConfigError, naming the package to install, if matplotlib is missing."""
    require(
        importlib.util.find_spec("matplotlib") is not None,
        "pictures need matplotlib, which is not installed.",
        where="undertow.report.timeline",
        remedy='Install it with: pip install "undertow[cli]"',
    )


def make_directory(path: Path, *, where: str) -> None:
    """Creates the directory if it is missing; raises ConfigError if nothing can be written there."""
    with checked_writing(path, where=where):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass


@contextmanager
def checked_writing(path: Path, *, where: str) -> Iterator[None]:
    """Raises ConfigError, naming `path` and the reason, instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"nothing can be written to '{path}': {error.strerror or type(error).__name__}.",
            where=where,
            remedy="Give another directory for the pictures: --out DIR.",
        ) from error


def drawn(text: str) -> str:
    """Returns the text for a picture: matplotlib would read text between two dollar signs as a formula."""
    return printable(text).replace("$", r"\$")


def new_figure(title: str, *, inches: float) -> Figure:
    """Returns an empty figure of that height."""
    # Not pyplot: it would keep the figure in its own list and look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, inches), dpi=150, layout="constrained")
    figure.suptitle(drawn(title), x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    return figure


def dress(axes: Axes, label: str, *, grid: Literal["x", "both"], without: Sequence[str]) -> None:
    """Labels the horizontal axis, and draws a faint grid and no frame at the sides `without`."""
    axes.set_xlabel(drawn(label), fontsize=9.5, color=INK)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in without:
        axes.spines[side].set_visible(False)


def save_timeline(traces: Mapping[str, Trace], path: str | Path) -> None:
    """Writes a PNG with two rows per named trace, computation above network, on one axis in milliseconds.

    Events before the forward, such as gathers of parameters, are drawn to the left of 0. The trace of interest is the last, its
    baseline the first.
    """
    from matplotlib.patches import Patch

    figure = new_figure(_takeaway(traces), inches=1.75 + 0.82 * len(traces))
    axes = figure.add_subplot()
    visible = [event for trace in traces.values() for event in trace.events if event.duration_us > 0]
    start_ms = min((event.start_us for event in visible), default=0.0) / 1e3
    end_ms = max(_end_ms(trace) for trace in traces.values())
    for row, trace in enumerate(traces.values()):
        _draw_trace(axes, trace, row=row, axis_ms=end_ms - start_ms)
    axes.set_xlim(start_ms, end_ms + (end_ms - start_ms) * 0.085)
    axes.set_ylim(len(traces) - 0.55, -0.6)  # the first trace on top
    axes.set_yticks([row - 0.05 for row in range(len(traces))], [*map(drawn, traces)], fontsize=10.5, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9, colors=INK)
    dress(axes, "milliseconds since the forward began", grid="x", without=("top", "right", "left"))
    shown = {_kind(event) for event in visible}
    handles = [Patch(facecolor=color, label=label) for kind, (color, label) in _KINDS.items() if kind in shown]
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
        labelcolor=INK,
    )
    figure.savefig(path)


def _draw_trace(axes: Axes, trace: Trace, *, row: int, axis_ms: float) -> None:
    for event in trace.events:
        is_compute = event.lane == "compute"
        if is_compute and event.duration_us < axis_ms * 0.5:  # less than 0.05 % of the axis would only show its white edges
            continue
        axes.broken_barh(
            [(event.start_us / 1e3, event.duration_us / 1e3)],
            (row - 0.4, 0.4) if is_compute else (row + 0.03, 0.26),
            facecolors=_KINDS[_kind(event)][0],
            edgecolors="white",
            linewidth=0.6,
        )
    left = _end_ms(trace) + axis_ms * 0.008
    axes.text(left, row - 0.2, f"{trace.duration_us / 1e3:.0f} ms", va="center", fontsize=10.5, fontweight="bold", color=INK)
    if (hidden := overlap_of(trace).fraction) is not None:
        axes.text(left, row + 0.15, f"{hidden:.0%} hidden", va="center", fontsize=8.5, color=FAINT_INK)


def _takeaway(traces: Mapping[str, Trace]) -> str:
    (first_name, first), *_ = traces.items()
    *_, (name, trace) = traces.items()
    overlap, step_ms = overlap_of(trace), trace.duration_us / 1e3
    if overlap.fraction is None:
        return f"{name}: {step_ms:.0f} ms per step, no communication"
    hidden = f"{overlap.fraction:.0%} of the network time is hidden"
    if len(traces) == 1:
        return f"{name}: {hidden}, {overlap.exposed_us / 1e3:.0f} of {step_ms:.0f} ms are spent waiting"
    gain = first.duration_us / trace.duration_us
    digits = 1 if gain >= 1.2 else 2  # a smaller gain would be shown as 1.0 or 1.1
    return f"{name}: {hidden}, {gain:.{digits}f}x the speed of {first_name}"


def _kind(event: Event) -> str:
    return event.kind if event.kind in _KINDS else "reduce"


def _end_ms(trace: Trace) -> float:
    return max((event.stop_us for event in trace.events), default=0.0) / 1e3
