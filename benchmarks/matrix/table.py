"""The matrix as Markdown. Pure: from rows to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.matrix.catalog import BARE, OURS, OWN, TORCH
from benchmarks.matrix.finished import link_of, title_of
from benchmarks.matrix.interval import ALIKE, LEAST_TURNS, Ratio, ratio_of

Row = Mapping[str, Any]
_BEST_OF_TORCH = "torch-ddp-best"
_LONG = 200  # characters of a reason; matrix.jsonl has all of it
_VERDICTS = ("won", "level", "undecided", "lost")
_RECORD = (
    "Look up the time of a step in each benchmark case: a workload on a number of ranks over one link. `matrix.jsonl` "
    "in this folder has every measurement, and the page *Benchmarks* has the method."
)
_HOW_TO_READ = (
    "Each entry has the whole step of Undertow's defaults in ms, and three ratios: this step over torch DDP's, over the "
    "fastest peer's, and the step of Undertow's fastest mode over the fastest peer's. Below 1 Undertow is faster."
)
_HOW_SURE = (
    f"If Undertow and the fastest peer took at least {LEAST_TURNS} turns, their ratio has a 95 % confidence interval, a "
    f"bootstrap over pairs of turns. A case is won or lost if all of the interval is beyond {ALIKE:.0%}, level if none of it "
    f"is above {1 + ALIKE:.2f}, undecided otherwise. The fastest systems are chosen by the medians that are compared, which "
    f"favors the side with more to choose from."
)


def markdown(header: Row, cells: Sequence[Row]) -> str:
    """Returns the page: the machine, an entry for each cell, the counts, and every system without a figure."""
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
    """An entry for each cell in which Undertow was measured, and the counts of the cells that have all peers."""
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
    compared = [cell for cell in cells if _is_compared(cell)]
    table = markdown_table(("workload", "ranks", *links), lines)
    return ["## Whole steps", _HOW_TO_READ, table, *((_HOW_SURE, *_count(compared)) if compared else ())]


def _modes(cell: Row) -> list[Row]:
    return [row for row in cell["rows"] if row["error"] is None and row["system"] in OWN]


def _peers(cell: Row) -> list[Row]:
    return [row for row in cell["rows"] if row["error"] is None and row["system"] not in (BARE, *OWN)]


def _fastest(rows: Sequence[Row]) -> Row:
    return min(rows, key=_step_ms)


def _defaults(cell: Row) -> Row | None:
    return next((row for row in _modes(cell) if row["system"] == OURS), None)


def _is_compared(cell: Row) -> bool:
    """False for the emulated link, and for cells that were measured with some systems only."""
    has_all_peers = any(row["system"] == _BEST_OF_TORCH for row in _peers(cell))
    return cell["kind"] != "emulated" and has_all_peers and _defaults(cell) is not None


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
    return "-" if own is None or peer is None else f"{ratio_of(own, peer).value:.2f}"


def _count(compared: Sequence[Row]) -> list[str]:
    """How many cells Undertow wins and loses by the interval, and those without an interval by the ratio alone."""
    peers = [_fastest(_peers(cell)) for cell in compared]
    ratios = {
        "Undertow's defaults": [ratio_of(_defaults(cell) or {}, peer) for cell, peer in zip(compared, peers, strict=True)],
        "its fastest mode": [ratio_of(_fastest(_modes(cell)), peer) for cell, peer in zip(compared, peers, strict=True)],
    }
    head = (f"whole steps, {len(compared)} cases", *_VERDICTS, f"no interval: {ALIKE:.0%} faster, alike, {ALIKE:.0%} slower")
    return [markdown_table(head, ([name, *_counts(of_cells)] for name, of_cells in ratios.items()))]


def _counts(ratios: Sequence[Ratio]) -> list[str]:
    unsure = [it.value for it in ratios if it.interval is None]
    faster, slower = sum(it < 1 - ALIKE for it in unsure), sum(it > 1 + ALIKE for it in unsure)
    by_verdict = [str(sum(it.verdict == verdict for it in ratios)) for verdict in _VERDICTS]
    return [*by_verdict, f"{faster}, {len(unsure) - faster - slower}, {slower}"]


def _step_ms(row: Row) -> float:
    return float(row["step_ms"]["median"])
