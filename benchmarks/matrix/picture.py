"""The matrix as a picture: a panel per cell, a bar per system, the limit and compute alone as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.matrix.catalog import BARE, OWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _OTHERS, _LIMIT, _COMPUTE = "#2f75b5", "#b8c4d0", "#e4572e", "#777777"
_PANEL_INCHES = (4.6, 2.6)
_MAX_COLUMNS = 3


def save_picture(cells: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Writes matrix.png and matrix.svg; nothing where no cell has a figure."""
    from matplotlib.figure import Figure

    shown = [cell for cell in cells if any(row["error"] is None and row["system"] != BARE for row in cell["rows"])]
    if not shown:
        return []
    num_columns = min(_MAX_COLUMNS, len(shown))
    num_lines = -(-len(shown) // num_columns)
    figure = Figure(figsize=(_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_lines), layout="constrained")
    panels = figure.subplots(num_lines, num_columns, squeeze=False).flat
    for panel, cell in zip(panels, shown, strict=False):
        _draw(panel, cell)
    for panel in list(panels)[len(shown) :]:
        panel.set_axis_off()
    paths = [folder / "matrix.png", folder / "matrix.svg"]
    for path in paths:
        figure.savefig(path, dpi=130)
    return paths


def _draw(panel: Axes, cell: Mapping[str, Any]) -> None:
    rows = [row for row in cell["rows"] if row["error"] is None and row["system"] != BARE]
    times = [row["step_ms" if row["is_sharded"] else "backward_ms"] for row in rows]
    medians = [time["median"] for time in times]
    spreads = [[time["median"] - time["min"] for time in times], [time["max"] - time["median"] for time in times]]
    names = [row["variant"] or row["system"] for row in rows]
    colours = [_OURS if row["system"] in OWN else _OTHERS for row in rows]
    panel.barh(names, medians, xerr=spreads, color=colours, error_kw={"elinewidth": 0.8, "ecolor": "#555555"})
    panel.invert_yaxis()
    panel.axvline(rows[0]["limit_ms"], color=_LIMIT, linewidth=1.2, label=f"limit {rows[0]['limit_ms']:.0f}")
    bare = next((row for row in cell["rows"] if row["system"] == BARE and row["error"] is None), None)
    if bare is not None:
        compute_ms = bare["backward_ms"]["median"]
        panel.axvline(compute_ms, color=_COMPUTE, linewidth=1, linestyle=":", label=f"compute {compute_ms:.0f}")
    panel.set_title(f"{cell['workload']}, {cell['ranks']} ranks, {cell['link']} ({cell['kind']})", fontsize=9)
    panel.set_xlabel("ms per step", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.legend(fontsize=7, frameon=False, loc="lower right")
