"""Cells that an earlier run has written: `--resume` keeps them, and measures the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.matrix.catalog import WORKLOADS
from benchmarks.matrix.links import LOCAL, SHAPES

Document = dict[str, Any]
ROW, MACHINE = "row", "machine"  # types of lines
OF_THE_CELL = (
    *("workload", "workload_title", "num_params", "ranks", "link", "kind", "device", "conditions"),
    "divided",  # not in what older runs have written
)
_KINDS_OF_NONE = {"shaped": "cables, unshaped", LOCAL: "this machine's own"}
PLACE = ("workload", "ranks", "link", "kind", "device")


def place_of(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a cell from every other one."""
    return tuple(cell[key] for key in PLACE)


def title_of(cell: Mapping[str, Any]) -> str:
    """The place for readers."""
    on = "" if cell["device"] == "cpu" else f", {cell['device']}"
    return f"{cell['workload']}, {cell['ranks']} ranks, {link_of(cell)}{on}"


def link_of(cell: Mapping[str, Any]) -> str:
    """The link for readers: "1gbit (shaped)"."""
    kind = _KINDS_OF_NONE.get(cell["kind"], cell["kind"]) if cell["link"] == "none" else cell["kind"]
    return f"{cell['link']} ({kind})"


def profile_name(cell: Mapping[str, Any], system: str) -> str:
    """The file in OUT/profiles with what `system`, or a variant of it, has measured in this cell."""
    return "-".join(str(part) for part in (*place_of(cell), system)) + ".json"


def lines_of(header: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> list[Document]:
    """A line for the machine, then one for each row, with what is true of its whole cell."""
    lines: list[Document] = [{"type": MACHINE, **header}]
    for cell in cells:
        shared = {key: cell[key] for key in OF_THE_CELL if key in cell}
        lines += [{"type": ROW, **shared, **row} for row in cell["rows"]]
    return lines


def read_cells(path: Path) -> list[Document]:
    """The cells in a matrix.jsonl, in its order, without those that have no figure at all; none where there is no file."""
    if not path.exists():
        return []
    cells: dict[tuple[Any, ...], Document] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["type"] != ROW:
            continue
        shared = {key: line[key] for key in OF_THE_CELL if key in line}
        cell = cells.setdefault(place_of(line), {**shared, "rows": [], "profiles": {}})
        cell["rows"].append({key: value for key, value in line.items() if key not in (*OF_THE_CELL, "type")})
    return [cell for cell in cells.values() if measured_systems(cell)]


def measured_systems(cell: Document) -> set[str]:
    """Names of those that have a figure."""
    return {row["system"] for row in cell["rows"] if row["error"] is None}


def in_order(cells: Iterable[Document]) -> list[Document]:
    """By workload, link and ranks, whenever they were measured."""
    workloads, links = list(WORKLOADS), list(SHAPES)

    def key(cell: Document) -> tuple[Any, ...]:
        name, _, scale = cell["workload"].partition("@")
        return workloads.index(name), scale, links.index(cell["link"]), cell["ranks"], cell["kind"] != "shaped", cell["device"]

    return sorted(cells, key=key)
