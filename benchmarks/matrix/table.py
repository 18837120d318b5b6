"""The matrix as Markdown. Pure: from rows to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.matrix.catalog import BARE, OURS, OWN, TORCH
from benchmarks.matrix.finished import place_of, title_of
from benchmarks.matrix.interval import ALIKE, LEAST_TURNS, Ratio, ratio_of

Row = Mapping[str, Any]
_HEAD = (
    "system",
    "until averaged, ms (min-max)",
    "whole step, ms (min-max)",
    "limit, ms",
    "achieved / limit",
    "exposed ms",
    "MB sent",
    "MB of state",
    "collectives",
    "CPU ms above bare",
    "peak MB",
    "import, wrap, first step ms",
)
_TORCH = (TORCH, "torch-ddp-best")
_GLANCE = (
    "cell",
    "defaults until averaged / limit",
    "defaults / torch DDP's defaults",
    "defaults / its best of a sweep",
    "defaults, ms",
    "our fastest, ms",
    "fastest peer, ms",
    "defaults / peer",
    "our fastest / peer",
)
_VERDICTS = ("won", "level", "undecided", "lost")
_HOW_SURE = (
    f"Ratios over the fastest peer have a 95 % confidence interval: a bootstrap over pairs of turns, whose "
    f"ratios have the median that is given. A cell is won or lost if "
    f"all of its interval is beyond {ALIKE:.0%}, level if none of it is above {1 + ALIKE:.2f}, undecided otherwise. *Another "
    f"run*: the two did not take turns, and the interval lacks the machine's drift between their runs. *Not in turn*: measured "
    f"or recorded without turns, so the interval is unknown, as it is with fewer than {LEAST_TURNS} turns. The fastest peer, the "
    f"best size of its sweep and the fastest of our modes are chosen by the medians that are compared, so noise favors the side "
    f"that had more to choose from."
)
VALID_WITHIN = 0.05


def markdown(header: Row, cells: Sequence[Row]) -> str:
    """The whole document: the machine, a line and a table per cell, the answers that need several, and the notes."""
    blocks = ["# The matrix", " · ".join(f"{key} {value}" for key, value in header.items()), *_at_a_glance(cells)]
    for cell in cells:
        blocks += [_cell_heading(cell), markdown_table(_HEAD, (_cells_of(row) for row in cell["rows"])), *_errors(cell["rows"])]
    blocks += [*_validation(cells), *_notes(cells)]
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


def _cell_heading(cell: Row) -> str:
    heading = f"## {title_of(cell)}"
    speed, small = (cell["link_measured"][name] for name in ("megabytes_per_s", "small_ms"))
    if speed is None:
        return heading
    measured = f"an all-reduce carries {speed} MB/s, a small one takes {small} ms"
    about = f"{cell['workload_title']}; {cell['num_params'] / 1e6:.1f} M parameters. On this link {measured}."
    conditions = cell["conditions"]
    load = " to ".join(f"{conditions[key]:.1f}" for key in ("load_average", "load_average_after"))
    commit = f", commit {conditions['commit']}" if conditions.get("commit") else ""
    reasons = [" ".join(why.split()) for why in cell.get("divided", ())]
    divided = "".join(f"\n\nMeasured one by one, for a run that they shared failed: {why}" for why in reasons)
    return f"{heading}\n\n{about} {conditions['date']}{commit}, load average {load}.{_timed(conditions)}{divided}"


def _timed(conditions: Row) -> str:
    """How, where it is not as `turns` says."""
    if "steps_per_turn" in conditions:
        return ""
    return " Timed one step a turn; our sharded systems and Megatron-core's distributed optimizer in the middle of four."


def _cells_of(row: Row) -> list[str]:
    title = f"{row['title']} ({row['variant'].partition('@')[2]})" if row["variant"] else row["title"]
    if row["error"] is not None:
        return [title, "could not be measured", *[""] * (len(_HEAD) - 2)]
    is_bare = row["system"] == BARE
    start_up = [row.get(name) for name in ("import_ms", "wrap_ms", "first_step_ms")]
    return [
        title,
        _spread(row["backward_ms"]),
        _spread(row["step_ms"]),
        "" if is_bare else _limit(row),
        _number(row["over_limit"], 3),
        "" if is_bare else _number(row["exposed_ms"], 0),
        _number(row["sent_mb"], 1),
        _number(row["state_mb"], 1),
        _number(row["collectives"], 0),
        "" if is_bare else _number(row["host_cpu_ms"], 1),
        _number(_peak_mb(row), 0),
        "" if None in start_up else ", ".join(f"{value:.0f}" for value in start_up),
    ]


def _peak_mb(row: Row) -> float | None:
    """Of the device, where the model was on one; that of the host is in matrix.jsonl."""
    on_device: float | None = row.get("peak_device_mb")
    return row.get("peak_rss_mb") if on_device is None else on_device


def limit_ms(row: Row) -> float:
    """What a system is held to: until gradients are averaged, or of the whole step."""
    return float(row["barrier_limit_ms" if row["is_sharded"] else "limit_ms"])


def _limit(row: Row) -> str:
    return f"{limit_ms(row):.0f}{' (step)' if row['is_sharded'] else ''}"


def _errors(rows: Sequence[Row]) -> list[str]:
    return [f"{row['title']}:\n\n```\n{row['error']}\n```" for row in rows if row["error"] is not None]


def _at_a_glance(cells: Sequence[Row]) -> list[str]:
    """A line for each cell in which both something of ours and a peer were measured."""
    found = [(cell, fastest) for cell in cells if (fastest := _fastest(cell)) is not None]
    if not found:
        return []
    table = markdown_table(_GLANCE, (_glance(cell, *fastest) for cell, fastest in found))
    compared = [(cell, *of_cell) for cell, of_cell in found if _is_compared(cell)]
    return ["## At a glance (but for the first figure, whole steps)", table, _HOW_SURE, *(_count(compared) if compared else ())]


def _fastest(cell: Row) -> tuple[Row, Row] | None:
    """Of ours and of the peers, by whole steps; None where either has no figure."""
    found = [row for row in cell["rows"] if row["error"] is None and row["system"] != BARE]
    own = [row for row in found if row["system"] in OWN]
    peers = [row for row in found if row["system"] not in OWN]
    return (min(own, key=_step_ms), min(peers, key=_step_ms)) if own and peers else None


def _defaults(cell: Row) -> Row | None:
    return next((row for row in cell["rows"] if row["system"] == OURS and row["error"] is None), None)


def _is_compared(cell: Row) -> bool:
    """True but for the emulated link, and for cells that are measured with some systems only."""
    has_all_peers = any(row["system"] == _TORCH[1] and row["error"] is None for row in cell["rows"])
    return cell["kind"] != "emulated" and has_all_peers and _defaults(cell) is not None


def _glance(cell: Row, own: Row, peer: Row) -> list[str]:
    of_torch = {row["system"]: row for row in cell["rows"] if row["system"] in _TORCH and row["error"] is None}
    over_limit, *ratios, defaults_ms, over_peer = [""] * 5
    if (defaults := _defaults(cell)) is not None:
        over_limit, defaults_ms = _number(defaults["over_limit"], 3), f"{_step_ms(defaults):.0f}"
        ratios = [f"{_step_ms(defaults) / _step_ms(of_torch[it]):.2f}" if it in of_torch else "" for it in _TORCH]
        over_peer = str(ratio_of(defaults, peer))
    names = [f"{row['variant'] or row['system']} {_step_ms(row):.0f}" for row in (own, peer)]
    return [title_of(cell), over_limit, *ratios, defaults_ms, *names, over_peer, str(ratio_of(own, peer))]


def _count(compared: Sequence[tuple[Row, Row, Row]]) -> list[str]:
    """How many cells ours wins and loses by the interval, and those without an interval by the ratio alone."""
    ratios = {
        "our defaults": [ratio_of(_defaults(cell) or own, peer) for cell, own, peer in compared],
        "the fastest of our modes": [ratio_of(own, peer) for _, own, peer in compared],
    }
    head = (f"whole steps, {len(compared)} cells", *_VERDICTS, f"no interval: {ALIKE:.0%} faster, alike, {ALIKE:.0%} slower")
    return [markdown_table(head, ([name, *_counts(of_cells)] for name, of_cells in ratios.items()))]


def _counts(ratios: Sequence[Ratio]) -> list[str]:
    unsure = [it.value for it in ratios if it.interval is None]
    faster, slower = sum(it < 1 - ALIKE for it in unsure), sum(it > 1 + ALIKE for it in unsure)
    by_verdict = [str(sum(it.verdict == verdict for it in ratios)) for verdict in _VERDICTS]
    return [*by_verdict, f"{faster}, {len(unsure) - faster - slower}, {slower}"]


def _step_ms(row: Row) -> float:
    return float(row["step_ms"]["median"])


def _validation(cells: Sequence[Row]) -> list[str]:
    rows = validation_rows(cells)
    if not rows:
        return []
    head = ("workload", "ranks", "link", "system", "shaped ms", "emulated ms", "difference", f"within {VALID_WITHIN:.0%}")
    lines = [
        [
            *(str(row[key]) for key in ("workload", "ranks", "link", "system")),
            f"{row['shaped_ms']:.0f}",
            f"{row['emulated_ms']:.0f}",
            f"{row['difference']:+.1%}",
            "yes" if abs(row["difference"]) <= VALID_WITHIN else "NO",
        ]
        for row in rows
    ]
    return ["## The emulated link beside the shaped one", markdown_table(head, lines)]


def _notes(cells: Sequence[Row]) -> list[str]:
    versions = {row["title"]: row["version"] for cell in cells for row in cell["rows"] if row.get("version")}
    told = [*((title, f"version {version}.") for title, version in versions.items())]
    told += [(row["title"], row["note"]) for cell in cells for row in cell["rows"] if row["note"]]
    return ["## Notes", "\n".join(f"- {title}: {note}" for title, note in dict.fromkeys(told))] if told else []


def _spread(times: Row) -> str:
    return f"{times['median']:.0f} ({times['min']:.0f}-{times['max']:.0f})"


def _number(value: float | None, num_decimals: int) -> str:
    return "" if value is None else f"{value:.{num_decimals}f}"
