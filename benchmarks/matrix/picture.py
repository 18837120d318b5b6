"""The matrix as a picture: a panel per cell, a bar per system with a mark at its limit, and compute alone as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.matrix.catalog import BARE, OWN
from benchmarks.matrix.table import limit_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _OTHERS, _LIMIT, _COMPUTE = "#2f75b5", "#b8c4d0", "#e4572e", "#777777"
_PANEL_WIDTH, _ROW_HEIGHT, _HEAD_HEIGHT = 4.6, 0.155, 0.8  # inches
_MAX_COLUMNS = 3


def save_picture(cells: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Writes matrix.png and matrix.svg; nothing where no cell has a figure."""
    from matplotlib.figure import Figure

    shown = [cell for cell in cells if any(row["error"] is None and row["system"] != BARE for row in cell["rows"])]
    if not shown:
        return []
    num_columns = min(_MAX_COLUMNS, len(shown))
    num_lines = -(-len(shown) // num_columns)
    height = _HEAD_HEIGHT + _ROW_HEIGHT * max(len(cell["rows"]) for cell in shown)
    figure = Figure(figsize=(_PANEL_WIDTH * num_columns, height * num_lines), layout="constrained")
    panels = list(figure.subplots(num_lines, num_columns, squeeze=False).flat)
    for panel, cell in zip(panels, shown, strict=False):
        _draw(panel, cell)
    for panel in panels[len(shown) :]:
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
    panel.plot(
        list(map(limit_ms, rows)), names, linestyle="", marker="|", markersize=8, markeredgewidth=1.6, color=_LIMIT, label="limit"
    )
    bare = next((row for row in cell["rows"] if row["system"] == BARE and row["error"] is None), None)
    if bare is not None:
        compute_ms = bare["backward_ms"]["median"]
        panel.axvline(compute_ms, color=_COMPUTE, linewidth=1, linestyle=":", label=f"compute {compute_ms:.0f}")
    panel.set_title(f"{cell['workload']}, {cell['ranks']} ranks, {cell['link']} ({cell['kind']})", fontsize=9)
    panel.set_xlabel("ms per step", fontsize=7, loc="left")
    panel.tick_params(labelsize=6)
    panel.margins(x=0.08)
    panel.legend(fontsize=6, frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1.0, -0.07), borderaxespad=0.0)
