"""The matrix as Markdown. Pure: from rows to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.matrix.catalog import BARE, OURS, OWN, TORCH
from benchmarks.matrix.finished import link_of, title_of

Row = Mapping[str, Any]
_LONG = 200  # characters of a reason; matrix.jsonl has all of it
_RECORD = (
    "Look up the time of a step in each benchmark case: a workload on a number of ranks over one link. `matrix.jsonl` "
    "in this folder has every measurement, and the page *Benchmarks* has the method."
)
_HOW_TO_READ = (
    "Each entry has the whole step of Undertow's defaults in ms, and three ratios: this step over torch DDP's, over the "
    "fastest peer's, and the step of Undertow's fastest mode over the fastest peer's. Below 1 Undertow is faster."
)


def markdown(header: Row, cells: Sequence[Row]) -> str:
    """Returns the page: the machine, an entry for each cell, and every system without a figure."""
    machine = " · ".join(f"{key} {value}" for key, value in header.items())
    blocks = ["# The matrix", _RECORD, *_at_a_glance(cells), *_not_measured(cells)]
    blocks += [*_divided(cells), "## The last run", machine]
    return "\n\n".join(blocks) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def _not_measured(cells: Sequence[Row]) -> list[str]:
    """A line for each system that has no figure, with the last line of its error."""
    lines = [
        [title_of(cell), row["title"], row["error"].strip().splitlines()[-1].strip()]
        for cell in cells
        for row in cell["rows"]
        if row["error"] is not None
    ]
    return ["## Not measured", markdown_table(("case", "system", "error"), lines)] if lines else []


def _divided(cells: Sequence[Row]) -> list[str]:
    """A line for each run that failed for systems together, which were then measured one by one."""
    reasons = [(cell, " ".join(why.split())) for cell in cells for why in cell.get("divided", ())]
    lines = [f"- {title_of(cell)}: {why if len(why) < _LONG else why[:_LONG] + ' ...'}" for cell, why in reasons]
    return ["## Measured one by one, because a shared run failed", "\n".join(lines)] if lines else []


def _at_a_glance(cells: Sequence[Row]) -> list[str]:
    """Returns an entry for each cell in which Undertow was measured."""
    measured = [cell for cell in cells if _modes(cell)]
    if not measured:
        return []
    links = list(dict.fromkeys(link_of(cell) for cell in measured))
    entries: dict[tuple[str, str], dict[str, str]] = {}
    for cell in measured:
        on = "" if cell["device"] == "cpu" else f", {cell['device']}"
        place = (f"{cell['workload']}{on}", str(cell["ranks"]))
        entries.setdefault(place, {})[link_of(cell)] = _entry(cell)
    lines = [[*place, *(of_links.get(link, "") for link in links)] for place, of_links in entries.items()]
    return ["## Whole steps", _HOW_TO_READ, markdown_table(("workload", "ranks", *links), lines)]


def _modes(cell: Row) -> list[Row]:
    return [row for row in cell["rows"] if row["error"] is None and row["system"] in OWN]


def _peers(cell: Row) -> list[Row]:
    return [row for row in cell["rows"] if row["error"] is None and row["system"] not in (BARE, *OWN)]


def _fastest(rows: Sequence[Row]) -> Row:
    return min(rows, key=_step_ms)


def _defaults(cell: Row) -> Row | None:
    return next((row for row in _modes(cell) if row["system"] == OURS), None)


def _entry(cell: Row) -> str:
    """Returns the step of the defaults, and ratios of steps; "-" for systems that were not measured."""
    defaults, fastest = _defaults(cell), _fastest(_modes(cell))
    peers = _peers(cell)
    torch = next((row for row in peers if row["system"] == TORCH), None)
    peer = _fastest(peers) if peers else None
    ms = of_torch = "-"
    if defaults is not None:
        ms = f"{_step_ms(defaults):.0f} ms"
        of_torch = "-" if torch is None else f"{_step_ms(defaults) / _step_ms(torch):.2f}"
    return f"{ms}: {of_torch}, {_over_peer(defaults, peer)}, {_over_peer(fastest, peer)}"


def _over_peer(own: Row | None, peer: Row | None) -> str:
    return "-" if own is None or peer is None else f"{_step_ms(own) / _step_ms(peer):.2f}"


def _step_ms(row: Row) -> float:
    return float(row["step_ms"]["median"])
