"""The matrix as pictures, one for each workload: a panel per cell, a bar per system with a mark at its limit.

A sharded system sends in its update as well and has the whole step as its bar, hatched; the others the time until gradients
are averaged, and so has the line of compute alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.matrix.catalog import BARE, OWN
from benchmarks.matrix.finished import title_of
from benchmarks.matrix.table import limit_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _OTHERS, _LIMIT, _COMPUTE = "#2f75b5", "#b8c4d0", "#e4572e", "#777777"
_PANEL_WIDTH, _ROW_HEIGHT, _HEAD_HEIGHT = 4.6, 0.155, 0.8  # inches
_MAX_COLUMNS = 3


def save_pictures(cells: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Path]:
    """Writes matrix-WORKLOAD.png and .svg for each workload that has a figure; where the first ones are, by workload."""
    shown: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        if any(row["error"] is None and row["system"] != BARE for row in cell["rows"]):
            shown.setdefault(cell["workload"], []).append(cell)
    return {workload: _save(of_workload, folder / f"matrix-{workload}.png") for workload, of_workload in shown.items()}


def _save(cells: Sequence[Mapping[str, Any]], path: Path) -> Path:
    from matplotlib.figure import Figure

    num_columns = min(_MAX_COLUMNS, len(cells))
    lines = [cells[first : first + num_columns] for first in range(0, len(cells), num_columns)]
    heights = [_HEAD_HEIGHT + _ROW_HEIGHT * max(len(cell["rows"]) for cell in line) for line in lines]
    figure = Figure(figsize=(_PANEL_WIDTH * num_columns, sum(heights)), layout="constrained")
    panels = list(figure.subplots(len(lines), num_columns, squeeze=False, height_ratios=heights).flat)
    for panel, cell in zip(panels, cells, strict=False):
        _draw(panel, cell)
    for panel in panels[len(cells) :]:
        panel.set_axis_off()
    for each in (path, path.with_suffix(".svg")):
        figure.savefig(each, dpi=130)
    return path


def _draw(panel: Axes, cell: Mapping[str, Any]) -> None:
    rows = [row for row in cell["rows"] if row["error"] is None and row["system"] != BARE]
    times = [row["step_ms" if row["is_sharded"] else "backward_ms"] for row in rows]
    medians = [time["median"] for time in times]
    spreads = [[time["median"] - time["min"] for time in times], [time["max"] - time["median"] for time in times]]
    names = [row["variant"] or row["system"] for row in rows]
    colors = [_OURS if row["system"] in OWN else _OTHERS for row in rows]
    hatches = ["///" if row["is_sharded"] else "" for row in rows]
    bars = {"color": colors, "hatch": hatches, "edgecolor": "#ffffff", "linewidth": 0}
    panel.barh(names, medians, xerr=spreads, error_kw={"elinewidth": 0.8, "ecolor": "#555555"}, **bars)
    panel.invert_yaxis()
    panel.plot(
        list(map(limit_ms, rows)), names, linestyle="", marker="|", markersize=8, markeredgewidth=1.6, color=_LIMIT, label="limit"
    )
    bare = next((row for row in cell["rows"] if row["system"] == BARE and row["error"] is None), None)
    if bare is not None:
        compute_ms = bare["backward_ms"]["median"]
        panel.axvline(compute_ms, color=_COMPUTE, linewidth=1, linestyle=":", label=f"compute {compute_ms:.0f}")
    panel.set_title(title_of(cell), fontsize=9)
    panel.set_xlabel("ms, whole step if hatched", fontsize=7, loc="left")
    panel.tick_params(labelsize=6)
    panel.margins(x=0.08)
    panel.legend(fontsize=6, frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1.0, -0.07), borderaxespad=0.0)
