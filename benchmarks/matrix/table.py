"""The matrix as Markdown. Pure: from rows to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.matrix.catalog import BARE, OURS, OWN, TORCH
from benchmarks.matrix.finished import place_of, title_of
from benchmarks.matrix.interval import ALIKE, LEAST_TURNS, Ratio, ratio_of

Row = Mapping[str, Any]
_TORCH = (TORCH, "torch-ddp-best")
_GLANCE = (
    "case",
    "defaults, ms",
    "until averaged / limit",
    "/ torch DDP",
    "/ its best size",
    "Undertow's fastest, ms",
    "fastest peer, ms",
    "defaults / peer",
    "fastest / peer",
)
_LONG = 200  # characters of a reason; matrix.jsonl has all of it
_VERDICTS = ("won", "level", "undecided", "lost")
_RECORD = (
    "`matrix.jsonl` beside this page has every measurement: all systems, their versions and notes, minimum and maximum, bytes, "
    "memory, start-up, machine load. The page *Benchmarks* has the method."
)
_HOW_SURE = (
    f"All ratios are of whole steps, except the second figure. Ratios to the fastest peer have a 95 % confidence interval if "
    f"both systems took at least {LEAST_TURNS} turns: a bootstrap over pairs of turns. A case is won or lost if all of the "
    f"interval is beyond {ALIKE:.0%}, level if none of it is above {1 + ALIKE:.2f}, undecided otherwise. *Another run*: the two "
    f"did not take turns, and the machine may have drifted. The fastest systems are chosen by the medians that are compared, "
    f"which favors the side with more to choose from."
)


def markdown(header: Row, cells: Sequence[Row]) -> str:
    """Returns the page: the machine, a line for each cell, the counts, and every system without a figure."""
    blocks = ["# The matrix", " · ".join(f"{key} {value}" for key, value in header.items()), _RECORD]
    blocks += [*_at_a_glance(cells), *_validation(cells), *_not_measured(cells), *_divided(cells)]
    return "\n\n".join(blocks) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def validation_rows(cells: Sequence[Row]) -> list[dict[str, Any]]:
    """Systems measured on a shaped link and on the emulated one of the same name, and by how much they differ."""
    by_place = {place_of(cell): cell for cell in cells}
    rows = []
    for (workload, ranks, link, kind, device), emulated in by_place.items():
        shaped = by_place.get((workload, ranks, link, "shaped", device))
        if kind != "emulated" or shaped is None:
            continue
        real = {row["system"]: row for row in shaped["rows"] if row["error"] is None}
        for row in emulated["rows"]:
            if row["error"] is not None or row["system"] not in real or row["system"] == BARE:
                continue
            compared = "step_ms" if row["is_sharded"] else "backward_ms"
            shaped_ms, emulated_ms = (it[compared]["median"] for it in (real[row["system"]], row))
            rows.append(
                {
                    "workload": workload,
                    "ranks": ranks,
                    "link": link,
                    "system": row["system"],
                    "shaped_ms": shaped_ms,
                    "emulated_ms": emulated_ms,
                    "difference": round(emulated_ms / shaped_ms - 1, 4),
                }
            )
    return rows


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
    """A line for each cell in which Undertow was measured, and the counts of the cells that have all peers."""
    lines = [_glance(cell) for cell in cells if _modes(cell)]
    if not lines:
        return []
    compared = [cell for cell in cells if _is_compared(cell)]
    return ["## Whole steps", markdown_table(_GLANCE, lines), _HOW_SURE, *(_count(compared) if compared else ())]


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
    has_all_peers = any(row["system"] == _TORCH[1] for row in _peers(cell))
    return cell["kind"] != "emulated" and has_all_peers and _defaults(cell) is not None


def _glance(cell: Row) -> list[str]:
    own, peers = _fastest(_modes(cell)), _peers(cell)
    of_torch = {row["system"]: row for row in peers if row["system"] in _TORCH}
    of_defaults = [""] * 4
    over_peer = [""] * 2
    peer = _fastest(peers) if peers else None
    if peer is not None:
        over_peer[1] = _ratio(ratio_of(own, peer))
    defaults = _defaults(cell)
    if defaults is not None:
        ratios = [f"{_step_ms(defaults) / _step_ms(of_torch[it]):.2f}" if it in of_torch else "" for it in _TORCH]
        of_defaults = [f"{_step_ms(defaults):.0f}", _number(defaults["over_limit"], 3), *ratios]
        over_peer[0] = "" if peer is None else _ratio(ratio_of(defaults, peer))
    return [title_of(cell), *of_defaults, _named(own), "" if peer is None else _named(peer), *over_peer]


def _named(row: Row) -> str:
    return f"{row['variant'] or row['system']} {_step_ms(row):.0f}"


def _ratio(ratio: Ratio) -> str:
    """The interval and the verdict if there is an interval; else the ratio alone."""
    return f"{ratio.value:.2f}" if ratio.interval is None else str(ratio)


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


def _validation(cells: Sequence[Row]) -> list[str]:
    """Says how far the emulated link is from the shaped one, if both were measured."""
    rows = validation_rows(cells)
    if not rows:
        return []
    worst = max(rows, key=lambda row: abs(row["difference"]))
    place = f"{worst['system']} in {worst['workload']} on {worst['ranks']} ranks over {worst['link']}"
    return [
        f"Over the emulated link, steps differ from the shaped link by at most {abs(worst['difference']):.1%} "
        f"({place}; {len(rows)} pairs)."
    ]


def _number(value: float | None, num_decimals: int) -> str:
    return "" if value is None else f"{value:.{num_decimals}f}"
