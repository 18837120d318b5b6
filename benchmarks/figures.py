"""python -m benchmarks figures, or make figures: the tables of README.md, docs/benchmarks.md and docs/slow-networks.md.

Steps over links are those that `--only shaped` has measured in network namespaces (rows with source "shaped"): the emulated link
takes no processor time, so its figures say nothing about a real one.

Reads docs/matrix/matrix.jsonl and benchmarks/recorded.json. Writes docs/figures.json, and fills
the blocks of the pages between <!-- figures: NAME --> and <!-- end of figures --> from it. With --record FILE, the results of a
bench.jsonl are recorded first. With --pictures, the demo and the simulator draw their pictures again, which takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import outer, quality
from benchmarks.matrix.catalog import OURS, OWN, PER_PARAMETER, TORCH
from benchmarks.matrix.finished import read_cells
from benchmarks.matrix.table import markdown_table
from benchmarks.shaped import part as shaped
from benchmarks.shaped.systems import BARE, BEST, DDP, OUTER, PERIOD

ROOT = Path(__file__).parents[1]
FIGURES, RECORDED, MATRIX = (
    ROOT / name for name in ("docs/figures.json", "benchmarks/recorded.json", "docs/matrix/matrix.jsonl")
)
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "slow-networks.md")
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(\n<!-- end of figures -->)", re.DOTALL)
_BEST = "torch-ddp-best"
ALIKE = 0.03  # a smaller difference says nothing here
_LINKS = {"1gbit": "1 Gb/s", "5gbit": "5 Gb/s", "none": "unshaped"}
_ON_THEIR_PAGE = (quality.NAME, outer.NAME, outer.DOCSTRINGS)
_SYSTEMS = {
    TORCH: "torch DDP, defaults",
    _BEST: "torch DDP, best of six bucket sizes",
    "megatron-ddp": "Megatron-core DDP, best of seven bucket sizes",
    OURS: "**Undertow, defaults**",
    "ours-zero1": "**Undertow, sharded optimizer**",
    "megatron-distopt": "Megatron-core distributed optimizer, best of its bucket sizes",
    "torch-zero": "torch ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2 per layer (made for device streams)",
    "deepspeed-zero1": "DeepSpeed ZeRO-1 (made for device streams)",
}
# torch's systems that send as little as one of ours, in words.
_NARROW = {"ddp-fp16": "fp16 hook", "ddp-powersgd": "PowerSGD"}
_FAR = {"averager": "averager"}
# The lines of tables by system, and the names of links.
_ORDER = (
    *(BARE, DDP, BEST, *_NARROW, *_FAR, OURS, "ours-untuned", "ours-auto", "ours-bfloat16", "ours-int8"),
    *("ours-zero1", "ours-zero1-int8", OUTER),
)
_RATES = {shaped.FAR: "100 Mb/s", **shaped.LINKS}

Table = list[list[str]]  # the first line is the head
Cell = Mapping[str, Any]


def tables() -> dict[str, Table]:
    """Returns every table, by the name of its block."""
    cells = [cell for cell in read_cells(MATRIX) if cell["kind"] == "shaped" and OURS in _steps(cell)]
    compared = [cell for cell in cells if _BEST in _steps(cell)]  # with all systems
    parts = _recorded()
    rows = _dated_rows(parts, shaped.NAME)
    of_parts = {quality.NAME: _quality, outer.NAME: _outer_quality, outer.DOCSTRINGS: _outer_quality}
    return {
        "readme": _readme(rows),
        "shaped": _shaped(rows),
        "slow-networks": _slow_networks(rows),
        "outer-link": _outer_link(rows),
        "summary": _summary(compared),
        "systems": _systems(compared),
        "targets": _targets(parts),
        **{name: table(parts[name]["rows"]) for name, table in of_parts.items() if name in parts},
    }


def filled(page: str, found: Mapping[str, Table]) -> str:
    """Returns the page with its blocks as they follow from the tables."""

    def block(match: re.Match[str]) -> str:
        head, *rows = found[match[2]]
        return f"{match[1]}{markdown_table(head, rows)}{match[3]}"

    return _BLOCK.sub(block, page)


def write(found: Mapping[str, Table]) -> None:
    FIGURES.write_text(text_of(found), encoding="utf-8")
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")


def text_of(found: Mapping[str, Table]) -> str:
    """Returns the generated file: JSON with a row a line."""
    blocks = ((name, ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in rows)) for name, rows in found.items())
    return "{\n" + ",\n".join(f'  "{name}": [\n{rows}\n  ]' for name, rows in blocks) + "\n}\n"


def record(path: Path) -> None:
    """Takes the results of the parts in a bench.jsonl instead of those recorded before."""
    machine, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    parts: dict[str, Any] = {}
    for line in lines:
        part = parts.setdefault(line.pop("part"), {**_origin(machine), "figures": [], "rows": []})
        if line.pop("type") == "measurement":
            part["rows"].append({key: value for key, value in line.items() if not isinstance(value, list | dict)})
        else:
            met = {True: "yes", False: "NO", None: "-"}[line["is_met"]]
            figure = {"figure": line["figure"], "measured": line["text"], "target": line["target"], "met": met}
            part["figures"].append(figure)
    _keep(parts)


def _recorded() -> dict[str, Any]:
    """Returns the recorded parts, by name."""
    return dict(json.loads(RECORDED.read_text(encoding="utf-8")))


def _dated_rows(parts: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the rows of a part with the date of each; none if it is not recorded."""
    return [{"date": parts[name]["date"], **row} for row in parts[name]["rows"]] if name in parts else []


def _keep(parts: Mapping[str, Any]) -> None:
    """Records these parts instead of those of the same names."""
    RECORDED.write_text(json.dumps(_recorded() | parts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _origin(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {key: machine[key] for key in ("date", "commit")}


def _steps(cell: Cell) -> dict[str, float]:
    """Returns whole steps in ms, by system."""
    return {row["system"]: row["step_ms"]["median"] for row in cell["rows"] if row["error"] is None}


def _cell(cells: Sequence[Cell], workload: str, ranks: int, link: str = "1gbit") -> Cell:
    return next(cell for cell in cells if (cell["workload"], cell["ranks"], cell["link"]) == (workload, ranks, link))


def _ratios(cells: Sequence[Cell], own: Sequence[str], others: Sequence[str] | None) -> list[float]:
    """Returns the fastest of `own` over the fastest of `others`, cell by cell; without `others`, over the fastest peer."""
    ratios = []
    for cell in cells:
        steps = _steps(cell)
        peers = [name for name in steps if name not in (*OWN, "bare", PER_PARAMETER)] if others is None else others
        ratios.append(min(steps[name] for name in own if name in steps) / min(steps[name] for name in peers))
    return ratios


def _mean(ratios: Sequence[float]) -> str:
    return f"{exp(mean(map(log, ratios))):.2f}"


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _readme(rows: Sequence[Cell]) -> Table:
    """The changed import alone first, then settings; each compared with torch's in the same session.

    A line whose course was not measured is left out.
    """
    lines = (
        ("24 timed layers, 1 Gb/s", "the import alone", OURS, {}, ("replay", "1gbit")),
        ("24 timed layers, 1 Gb/s", "`ShardedOptimizer`", "ours-zero1", {}, ("replay", "1gbit")),
        ("24 timed layers, 1 Gb/s", '`SyncConfig(wire="auto")`', "ours-auto", _NARROW, ("replay", "1gbit")),
        ("a GPT, 1 Gb/s", "the import alone", OURS, {}, ("gpt", "1gbit")),
        ("a GPT, 1 Gb/s", '`SyncConfig(wire="int8")`', "ours-int8", _NARROW, ("gpt", "1gbit")),
        ("a GPT, 100 Mb/s", f"`SyncConfig(outer=Outer(every={PERIOD}))`", OUTER, _FAR, ("gpt", shaped.FAR)),
    )
    torch = ("torch DDP", "its best of six bucket sizes", "torch, as few bytes")
    table = [["ms of a step, two ranks", "changed", *torch, "Undertow", "Undertow / best"]]
    for case, changed, system, alike, place in lines:
        steps = shaped.steps_of(rows, *place)
        if {system, BEST} <= steps.keys():
            times = [f"{steps[each]:.0f}" if each in steps else "" for each in (DDP, BEST, system)]
            times.insert(2, _fastest(steps, alike))
            table.append([case, changed, *times, f"{steps[system] / steps[BEST]:.2f}"])
    return table


def _fastest(steps: Mapping[str, float], titles: Mapping[str, str]) -> str:
    """Returns the step of the fastest of the systems with `titles`, and its title."""
    found = [system for system in titles if system in steps]
    if not found:
        return ""
    system = min(found, key=steps.__getitem__)
    return f"{steps[system]:.0f} ({titles[system]})"


def _summary(cells: Sequence[Cell]) -> Table:
    def line(name: str, ratios: Sequence[float]) -> list[str]:
        faster, slower = sum(it < 1 - ALIKE for it in ratios), sum(it > 1 + ALIKE for it in ratios)
        counts = (faster, len(ratios) - faster - slower, slower)
        return [name, *map(str, counts), _range(ratios), _mean(ratios)]

    fewer = [cell for cell in cells if cell["workload"] in ("gpt", "resnet") and "steps_per_turn" not in cell["conditions"]]
    whole = [mode for mode in OWN if mode in (OURS, "ours-untuned", "ours-ordered")]
    careful = [ratio for cell in cells for ratio in _ratios([cell], whole if cell in fewer else OWN, None)]
    by_link = [
        line(f"the same, {name}", _ratios([cell for cell in cells if cell["link"] == link], [OURS], [TORCH]))
        for link, name in _LINKS.items()
    ]
    return [
        [f"step time, {len(cells)} cases", "faster", "within 3 %", "slower", "range", "geometric mean"],
        line("**defaults / torch DDP's defaults**", _ratios(cells, [OURS], [TORCH])),
        *by_link,
        line("defaults / torch DDP's best of six bucket sizes", _ratios(cells, [OURS], [_BEST])),
        line("defaults / the fastest peer", _ratios(cells, [OURS], None)),
        line("fastest of Undertow's five modes / the fastest peer", _ratios(cells, OWN, None)),
        line(f"the same, without sharded modes in {len(fewer)} cases whose timing favored them", careful),
    ]


def _systems(cells: Sequence[Cell]) -> Table:
    steps = {ranks: _steps(_cell(cells, "replay", ranks)) for ranks in (2, 4)}
    rows = [[title, *(f"{steps[ranks][name]:.0f}" for ranks in steps)] for name, title in _SYSTEMS.items()]
    return [["whole step over 1 Gb/s, ms", "2 ranks", "4 ranks"], *sorted(rows, key=lambda row: int(row[1]), reverse=True)]


def _targets(parts: Mapping[str, Any]) -> Table:
    return [
        ["figure", "measured", "target", "date"],
        *(
            [f"{name}: {it['figure']}", _judged(it), it["target"], part["date"]]
            for name, part in parts.items()
            for it in part["figures"]
            if it["target"] != "-" and name not in _ON_THEIR_PAGE
        ),
    ]


def _judged(figure: Mapping[str, str]) -> str:
    """Returns the measured value, marked if it misses its target."""
    return f"**missed**: {figure['measured']}" if figure["met"] == "NO" else figure["measured"]


def _shaped(rows: Sequence[Cell]) -> Table:
    """Whole steps of systems in full width; a line for each workload and link."""
    systems = {
        BARE: "compute alone",
        DDP: "torch DDP",
        BEST: "its best bucket size",
        OURS: "Undertow",
        "ours-untuned": "`auto_tune=False`",
        "ours-zero1": "`ShardedOptimizer`",
    }
    dates = {(row["workload"], row["link"]): row["date"] for row in rows}
    table = [["ms of a step", *systems.values(), "Undertow / best", "date"]]
    for workload, title in shaped.WORKLOADS.items():
        for link, link_title in shaped.LINKS.items():
            steps = shaped.steps_of(rows, workload, link)
            if {OURS, BEST} <= steps.keys():
                times = [f"{steps[system]:.1f}" if system in steps else "" for system in systems]
                ratio = f"{steps[OURS] / steps[BEST]:.2f}"
                table.append([f"{title}, {link_title}", *times, ratio, dates[workload, link]])
    return table


def _slow_networks(rows: Sequence[Cell]) -> Table:
    """Whole steps in ms, by system; a column for each workload and link."""
    places = [(workload, link) for link in shaped.LINKS for workload in ("replay", "gpt")]
    return _by_system(rows, places, lambda steps, system: f"{steps[system]:.0f}")


def _by_system(rows: Sequence[Cell], places: Sequence[tuple[str, str]], text: Callable[[Mapping[str, float], str], str]) -> Table:
    """Returns a line for each system of these workloads and links, without single bucket sizes."""
    steps = {place: found for place in places if (found := shaped.steps_of(rows, *place))}
    titles = {row["system"]: row["title"] for row in rows if (row["workload"], row["link"]) in steps}
    table = [["ms of a step", *(f"{shaped.WORKLOADS[workload]}, {_RATES[link]}" for workload, link in steps)]]
    for system in (name for name in _ORDER if name in titles):
        cells = (text(found, system) if system in found else "" for found in steps.values())
        table.append([titles[system], *cells])
    return table


def _quality(rows: Sequence[Cell]) -> Table:
    """Losses on held-out text as means over seeds, and in percent above those in full width, with the range over seeds."""
    above = quality.percent_above(rows, quality.FULL_WIDTH)
    ranks = sorted({row["ranks"] for row in rows})
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        line = [variant]
        for number in ranks:
            losses = [row["validation_loss"] for row in rows if (row["variant"], row["ranks"]) == (variant, number)]
            line += [f"{mean(losses):.4f}", _percents(above[variant, number])]
        lines.append(line)
    head = [text for number in ranks for text in (f"loss, {number} ranks", f"above {quality.FULL_WIDTH}, %")]
    return [["sent as", *head], *lines]


def _percents(above: Sequence[float]) -> str:
    return f"{mean(above):+.2f} ({min(above):+.2f} to {max(above):+.2f})"


def _outer_link(rows: Sequence[Cell]) -> Table:
    """Whole steps in ms and over the bare model's, by system and workload."""
    places = [(workload, shaped.FAR) for workload in ("replay", "gpt")]
    return _by_system(rows, places, lambda steps, system: f"{steps[system]:.0f} ({steps[system] / steps[BARE]:.2f})")


def _outer_quality(rows: Sequence[Cell]) -> Table:
    """Losses on held-out text, in percent above a mean in every step: means over seeds, with their range."""
    above = quality.percent_above(rows, outer.PLAIN)
    ranks = sorted({row["ranks"] for row in rows})
    lines = [
        [variant, *(_percents(above[variant, number]) for number in ranks)]
        for variant in dict.fromkeys(row["variant"] for row in rows)
        if variant != outer.PLAIN
    ]
    return [["exchange", *(f"{number} replicas, %" for number in ranks)], *lines]


def draw() -> None:
    """Runs the demo and the simulator; writes their pictures into docs."""
    from undertow.lab.demo import DemoSettings
    from undertow.lab.demo.run import headline, train
    from undertow.lab.demo.settings import WAYS
    from undertow.lab.report.timeline import save_timeline

    settings = DemoSettings(strategy="zero2")
    ask = ("gpt2", "--ranks", "64", "--per-node", "8", "--link", "25gbit", "--out", "docs")
    subprocess.run([str(Path(sys.executable).parent / "undertow"), "simulate", *ask], cwd=ROOT, check=True)
    done = train(settings)
    conditions = f"{settings.num_ranks} ranks on one machine, {settings.link} emulated, typical of {settings.num_steps} steps"
    for name, chosen in (("demo-zero2", done), ("demo", done[:-1])):
        traces = {WAYS[it.way]: it.typical for it in chosen}
        save_timeline(traces, ROOT / "docs" / f"{name}.png", title=headline(chosen), conditions=conditions)


def main(arguments: Sequence[str]) -> int:
    """Writes figures.json and the blocks of the pages; 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks figures", description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FILE", help="take the results of this bench.jsonl first")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures again")
    asked = parser.parse_args(arguments)
    if asked.record:
        record(asked.record)
    if asked.pictures:
        draw()
    write(tables())
    return 0
