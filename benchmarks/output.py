"""Where the figures go: JSON lines, and the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from benchmarks.figure import Figure, Part, Row

_HEAD = ("figure", "measured", "target", "met")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One part of the suite that has run."""

    part: Part
    rows: Sequence[Row]
    figures: Sequence[Figure]


def write_json_lines(path: Path, machine: Row, results: Sequence[Measured]) -> None:
    """One object per line: the machine, then every measurement and every figure."""
    lines = [{"type": "machine", **machine}]
    for result in results:
        lines += [{"type": "measurement", "part": result.part.name, **row} for row in result.rows]
        lines += [{"type": "figure", "part": result.part.name, **figure.to_dict()} for figure in result.figures]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def figures_table(results: Sequence[Measured]) -> Table:
    """Every figure of every part."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(_HEAD[0])
    for name in _HEAD[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(f"[bold]{escape(result.part.title)}[/]")
        for figure in result.figures:
            style = "bold red" if figure.is_met is False else None
            table.add_row(f"  {escape(figure.name)}", figure.measured_text, figure.target_text, figure.verdict, style=style)
        table.add_section()
    return table
