"""The matrix as one picture: a row per cell, a dot per system at its whole step as a multiple of torch DDP's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.matrix.catalog import OURS, OWN, TORCH
from benchmarks.matrix.finished import title_of
from benchmarks.matrix.interval import ALIKE
from undertow.report.timeline import save_themes

# What a dot is; of several systems the fastest. Shapes differ as well as colors.
_DOTS: Mapping[str, Mapping[str, Any]] = {
    "another system, the fastest": {"color": "#999999", "marker": "s"},
    "torch DDP, best bucket size of a sweep": {"color": "#cc79a7", "marker": "^"},
    "Undertow, fastest mode": {"color": "#56b4e9", "marker": "o"},
    "Undertow, defaults": {"color": "#0072b2", "marker": "D"},
}
_TORCH_BEST, _ROW_HEIGHT, _HEAD_HEIGHT = "torch-ddp-best", 0.2, 1.4  # inches


def ratios_of(cell: Mapping[str, Any]) -> dict[str, float]:
    """The whole step of each dot over that of torch DDP's defaults; empty if either side of it lacks a figure."""
    steps_ms = {row["system"]: row["step_ms"]["median"] for row in cell["rows"] if row["error"] is None}
    if not {OURS, TORCH} <= steps_ms.keys():
        return {}
    others = steps_ms.keys() - {*OWN, TORCH, _TORCH_BEST, "bare", "per-parameter"}
    systems = dict(zip(_DOTS, (others, {_TORCH_BEST} & steps_ms.keys(), OWN & steps_ms.keys(), {OURS}), strict=True))
    return {dot: min(steps_ms[name] for name in names) / steps_ms[TORCH] for dot, names in systems.items() if names}


def save_picture(cells: Sequence[Mapping[str, Any]], folder: Path) -> Path | None:
    """Writes matrix.png, and matrix-dark.png for dark pages; None if no cell has both torch DDP and Undertow."""
    rows = {title_of(cell): ratios for cell in cells if (ratios := ratios_of(cell))}
    if not rows:
        return None
    rows = dict(sorted(rows.items(), key=lambda it: it[1]["Undertow, defaults"]))
    save_themes(lambda: _figure(rows), folder / "matrix.png")
    return folder / "matrix.png"


def _figure(rows: Mapping[str, Mapping[str, float]]) -> Any:
    from matplotlib.figure import Figure

    ours = [ratios["Undertow, defaults"] for ratios in rows.values()]
    faster, slower = sum(it < 1 - ALIKE for it in ours), sum(it > 1 + ALIKE for it in ours)
    figure = Figure(figsize=(10, _HEAD_HEIGHT + _ROW_HEIGHT * len(rows)), dpi=130, layout="constrained")
    figure.suptitle(
        f"Undertow beside torch DDP, defaults: {faster} of {len(ours)} cells faster, {slower} slower, by over {ALIKE:.0%}",
        fontweight="bold",
    )
    axes = figure.add_subplot()
    for dot, style in _DOTS.items():
        places = [(ratios[dot], at) for at, ratios in enumerate(rows.values()) if dot in ratios]
        axes.scatter([ratio for ratio, _ in places], [at for _, at in places], s=26, zorder=3, label=dot, **style)
    axes.axvline(1, linewidth=1.2, color="#888888", label="torch DDP, defaults")
    axes.set_yticks(range(len(rows)), list(rows), fontsize=7.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xticks(ticks := (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4), [f"{tick:g}" for tick in ticks], fontsize=8.5)
    axes.minorticks_off()
    low, high = (pick(ratio for ratios in rows.values() for ratio in ratios.values()) for pick in (min, max))
    axes.set_xlim(low / 1.05, high * 1.05)
    axes.set_xlabel("whole step / that of torch DDP's defaults (log scale; left is faster)", fontsize=9.5)
    axes.grid(linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    return figure
