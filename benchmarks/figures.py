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
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import cases, host_overhead, outer, quality
from benchmarks.part import Row, Table, markdown_table
from benchmarks.shaped import part as shaped
from benchmarks.shaped.contenders import BARE, BEST, DDP, OURS, OUTER, PERIOD

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures.json"
RECORDED = ROOT / "benchmarks" / "recorded.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "slow-networks.md")
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(\n<!-- end of figures -->)", re.DOTALL)
_OF_PARTS = {
    host_overhead.NAME: host_overhead.table,
    quality.NAME: quality.table,
    outer.NAME: outer.table,
    outer.DOCSTRINGS: outer.table,
}


def tables() -> dict[str, Table]:
    """Returns every table, by the name of its block."""
    parts = dict(json.loads(RECORDED.read_text(encoding="utf-8")))
    measured = cases.recorded()
    of_shaped = parts.get(shaped.NAME, {"date": "", "rows": []})
    rows = [{"date": of_shaped["date"], **row} for row in of_shaped["rows"]]
    return {
        "readme": _readme(rows),
        "shaped": _shaped(rows),
        "slow-networks": _slow_networks(rows),
        "outer-link": _outer_link(rows),
        "summary": cases.summary(measured),
        "systems": cases.one_case(measured),
        **{name: table(parts[name]["rows"]) for name, table in _OF_PARTS.items() if name in parts},
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
    parts = json.loads(RECORDED.read_text(encoding="utf-8"))
    for name in dict.fromkeys(line["part"] for line in lines):
        rows = [{key: value for key, value in line.items() if key != "part"} for line in lines if line["part"] == name]
        parts[name] = {"date": machine["date"], "commit": machine["commit"], "rows": rows}
    RECORDED.write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _readme(rows: Sequence[Row]) -> Table:
    """The changed import alone first, then settings; each compared with the fastest way of torch's in the same session.

    Settings that lose nothing are compared with torch DDP at its best bucket size, the others with what loses as well. A line
    whose course was not measured is left out.
    """
    lines = (
        ("24 timed layers, 1 Gb/s", "the import alone", OURS, shaped.EXACT, ("replay", "1gbit")),
        ("24 timed layers, 1 Gb/s", "`ShardedOptimizer`", "ours-zero1", shaped.EXACT, ("replay", "1gbit")),
        ("24 timed layers, 1 Gb/s", '`SyncConfig(wire="auto")`', "ours-auto", shaped.NARROW, ("replay", "1gbit")),
        ("a GPT, 1 Gb/s", "the import alone", OURS, shaped.EXACT, ("gpt", "1gbit")),
        ("a GPT, 1 Gb/s", "`ShardedOptimizer`", "ours-zero1", shaped.EXACT, ("gpt", "1gbit")),
        ("a GPT, 1 Gb/s", '`SyncConfig(wire="int8")`', "ours-int8", shaped.NARROW, ("gpt", "1gbit")),
        ("a GPT, 100 Mb/s", f"`SyncConfig(outer=Outer(every={PERIOD}))`", OUTER, shaped.AVERAGER, ("gpt", shaped.FAR)),
    )
    table = [["ms of a step, two ranks", "changed", "torch DDP", "torch's fastest", "Undertow", "Undertow / fastest"]]
    for case, changed, system, alike, place in lines:
        steps = shaped.steps_of(rows, *place)
        rivals = [each for each in alike if each in steps]
        if system in steps and rivals:
            fastest = min(rivals, key=steps.__getitem__)
            of_torch = f"{steps[fastest]:.0f} ({alike[fastest]})"
            default = f"{steps[DDP]:.0f}" if DDP in steps else ""
            table.append([case, changed, default, of_torch, f"{steps[system]:.0f}", f"{steps[system] / steps[fastest]:.2f}"])
    return table


def _shaped(rows: Sequence[Row]) -> Table:
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


def _slow_networks(rows: Sequence[Row]) -> Table:
    """Whole steps in ms, by system; a column for each workload and link."""
    places = [(workload, link) for link in shaped.LINKS for workload in ("replay", "gpt")]
    return shaped.by_system(rows, places, lambda steps, system: f"{steps[system]:.0f}")


def _outer_link(rows: Sequence[Row]) -> Table:
    """Whole steps in ms and over the bare model's, by system and workload."""
    places = [(workload, shaped.FAR) for workload in ("replay", "gpt")]
    return shaped.by_system(rows, places, lambda steps, system: f"{steps[system]:.0f} ({steps[system] / steps[BARE]:.2f})")


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
