"""Draws steps as a picture: computation, network traffic, and waits of one for the other."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undertow.errors import require
from undertow.foreign import printable
from undertow.trace import Event, Trace, overlap_of
from undertow.trace.record import CODING
from undertow.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The color of each kind and its name, as in page.html: waiting is loud, and no two differ by red
# and green alone.
_KINDS = {
    "forward": ("#56b4e9", "forward"),
    "backward": ("#0072b2", "backward"),
    "wait": ("#d55e00", "waiting for the network"),
    "optimizer": ("#999999", "optimizer"),
    "reduce": ("#cc79a7", "gradients sent"),
    "all_gather": ("#e69f00", "parameters gathered"),
    "coding": ("#009e73", "encoded or decoded"),
}
# Where a lane begins below the middle of a row, and its height; other lanes are of the network.
_PLACES = {"compute": (-0.4, 0.4), "coding": (0.31, 0.08)}
_NETWORK = (0.03, 0.26)
# For light pages and for dark pages: the end of the picture's name, ink, ground and grid.
_THEMES = (("", "#333333", "#ffffff", "#e6e6e6"), ("-dark", "#e6edf3", "#0d1117", "#30363d"))


def require_matplotlib() -> None:
    """Raises ConfigError, naming the package to install, if matplotlib is missing."""
    require(
        importlib.util.find_spec("matplotlib") is not None,
        "pictures need matplotlib, which is not installed.",
        where="undertow.lab.report.timeline",
        remedy='Install it with: pip install "undertow[cli]"',
    )


def drawn(text: str) -> str:
    """Returns the text for a picture.

    Matplotlib would read text between two dollar signs as a formula.
    """
    return printable(text).replace("$", r"\$")


def save_themes(draw: Callable[[], Figure], path: Path) -> None:
    """Writes the figure that `draw` makes as PATH, and for dark pages as PATH with -dark in its
    name."""
    import matplotlib as mpl

    for name, ink, ground, grid in _THEMES:
        theme: dict[Any, str] = {"grid.color": grid}
        theme |= dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
        )
        theme |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), ground)
        picture = io.BytesIO()
        with mpl.rc_context(theme):
            draw().savefig(picture, format="png")
        target = path.with_stem(path.stem + name)
        write_whole(target, picture.getvalue(), where="the picture of a step")


def save_timeline(
    traces: Mapping[str, Trace],
    path: str | Path,
    *,
    title: str = "",
    conditions: str = "",
) -> None:
    """Writes a PNG with two rows per named trace, computation above network, on one axis in
    milliseconds; another for dark pages.

    Events before the forward, such as gathers of parameters, are drawn to the left of 0. The
    slowest trace is on top. By default the title compares the last trace with the first.
    `conditions` are drawn below: where the steps ran.
    """
    title = title or takeaway(traces)
    slowest_first = dict(sorted(traces.items(), key=lambda named: -named[1].duration_us))
    save_themes(lambda: _timeline(slowest_first, title, conditions), Path(path))


def _timeline(traces: Mapping[str, Trace], title: str, conditions: str) -> Figure:
    # Not pyplot: it would keep the figure in its own list and look for a display.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.75 + 0.82 * len(traces)), dpi=150, layout="constrained")
    figure.suptitle(drawn(title), x=0.012, ha="left", fontsize=13, fontweight="bold")
    axes = figure.add_subplot()
    visible = [
        event for trace in traces.values() for event in trace.events if event.duration_us > 0
    ]
    start_ms = min((event.start_us for event in visible), default=0.0) / 1e3
    end_ms = max(_end_ms(trace) for trace in traces.values())
    for row, trace in enumerate(traces.values()):
        _draw_trace(axes, trace, row=row, axis_ms=end_ms - start_ms)
    axes.set_xlim(start_ms, end_ms + (end_ms - start_ms) * 0.085)
    axes.set_ylim(len(traces) - 0.55, -0.6)  # the first trace on top
    axes.set_yticks(
        [row - 0.05 for row in range(len(traces))], [*map(drawn, traces)], fontsize=10.5
    )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    label = "milliseconds since the forward began" + (f"; {conditions}" if conditions else "")
    axes.set_xlabel(drawn(label), fontsize=9.5)
    axes.grid(axis="x", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    shown = {_kind(event) for event in visible}
    handles: list[Any] = [
        Patch(facecolor=color, label=label)
        for kind, (color, label) in _KINDS.items()
        if kind in shown
    ]
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
    )
    return figure


def _draw_trace(axes: Axes, trace: Trace, *, row: int, axis_ms: float) -> None:
    for event in trace.events:
        is_compute = event.lane == "compute"
        # less than 0.05 % of the axis would only show its white edges
        if is_compute and event.duration_us < axis_ms * 0.5:
            continue
        below, height = _PLACES.get(event.lane, _NETWORK)
        axes.broken_barh(
            [(event.start_us / 1e3, event.duration_us / 1e3)],
            (row + below, height),
            facecolors=_KINDS[_kind(event)][0],
            edgecolors=axes.get_facecolor(),
            linewidth=0.6,
        )
    left = _end_ms(trace) + axis_ms * 0.008
    axes.text(
        left,
        row - 0.2,
        f"{trace.duration_us / 1e3:.0f} ms",
        va="center",
        fontsize=10.5,
        fontweight="bold",
    )
    if (hidden := overlap_of(trace).fraction) is not None:
        axes.text(left, row + 0.15, f"{hidden:.0%} hidden", va="center", fontsize=8.5, alpha=0.75)


def takeaway(traces: Mapping[str, Trace]) -> str:
    """Returns one line: the speed of the last step over the first, and how much of its
    communication is hidden."""
    first = next(iter(traces))
    name, trace = list(traces.items())[-1]
    hidden = overlap_of(trace).fraction
    if hidden is None:
        return f"{name}: {trace.duration_us / 1e3:.0f} ms per step, no communication"
    gain = traces[first].duration_us / trace.duration_us
    return f"{name}: {gain:.2f}x the speed of {first}, {hidden:.0%} of the network time is hidden"


def _kind(event: Event) -> str:
    kind = event.lane if event.lane == CODING else event.kind
    return kind if kind in _KINDS else "reduce"


def _end_ms(trace: Trace) -> float:
    return max((event.stop_us for event in trace.events), default=0.0) / 1e3
