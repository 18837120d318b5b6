"""python -m benchmarks figures, or make figures: the tables of README.md, docs/benchmarks.md and docs/slow-networks.md.

Reads docs/matrix/matrix.jsonl, benchmarks/matrix/recorded.json and benchmarks/recorded.json. Writes docs/figures.json, and fills
the blocks of the pages between <!-- figures: NAME --> and <!-- end of figures --> from it. With --record FILE, the results of a
bench.jsonl are recorded first. With --pictures, the demo and the simulator draw their pictures anew, which takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import outer, quality, slow_networks
from benchmarks.matrix import guard
from benchmarks.matrix.catalog import OURS, OWN, PER_PARAMETER, SYSTEMS, TORCH
from benchmarks.matrix.finished import read_cells
from benchmarks.matrix.interval import ALIKE
from benchmarks.matrix.table import markdown_table

ROOT = Path(__file__).parents[1]
FIGURES, RECORDED, MATRIX = (
    ROOT / name for name in ("docs/figures.json", "benchmarks/recorded.json", "docs/matrix/matrix.jsonl")
)
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "slow-networks.md")
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(\n<!-- end of figures -->)", re.DOTALL)
_BEST = "torch-ddp-best"
_LINKS = {"1gbit": "1 Gb/s", "5gbit": "5 Gb/s", "none": "unshaped"}
_ON_THEIR_PAGE = (slow_networks.NAME, quality.NAME, outer.LINK, outer.QUALITY, outer.DOCSTRINGS)
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

Table = list[list[str]]  # the first line is the head
Cell = Mapping[str, Any]


def tables() -> dict[str, Table]:
    """Returns every table, by the name of its block."""
    cells = [cell for cell in read_cells(MATRIX) if cell["kind"] == "shaped" and OURS in _steps(cell)]
    compared = [cell for cell in cells if _BEST in _steps(cell)]  # with all systems
    parts = _recorded()
    of_parts = {
        slow_networks.NAME: _slow_networks,
        quality.NAME: _quality,
        outer.LINK: _outer_link,
        outer.QUALITY: _outer_quality,
        outer.DOCSTRINGS: _outer_quality,
    }
    return {
        "readme": _readme(compared, parts),
        "summary": _summary(compared),
        "systems": _systems(compared),
        "model-size": _model_size(parts),
        "targets": _targets(parts),
        "guard": _guard(),
        "demo": _demo(parts),
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


def _readme(cells: Sequence[Cell], parts: Mapping[str, Any]) -> Table:
    """Figures for overlap, fewer bytes and fewer synchronizations, each compared with torch's best in the same run."""
    layers = _steps(_cell(cells, "replay", 2))
    narrow, far = (_of_gpt(parts[name]["rows"]) for name in (slow_networks.NAME, outer.LINK))
    lines = [
        ("24 timed layers, 1 Gb/s", "`ShardedOptimizer`", layers[_BEST], layers["ours-zero1"]),
        ("a GPT, 1 Gb/s", '`SyncConfig(wire="auto")`', narrow[_BEST], narrow["ours-auto"]),
        ("a GPT, 100 Mb/s between sites", "`SyncConfig(outer=Outer(every=30))`", far[outer.TORCH], far[outer.OUTER]),
    ]
    head = ["ms of a step, two ranks", "set", "torch DDP, best of six bucket sizes", "Undertow", "ratio"]
    return [
        head,
        *([case, chosen, f"{of_torch:.0f}", f"{ours:.0f}", f"{ours / of_torch:.2f}"] for case, chosen, of_torch, ours in lines),
    ]


def _of_gpt(rows: Sequence[Cell]) -> dict[str, float]:
    """Returns the steps of the GPT on two ranks in ms, by system: over 1 Gb/s, or the one link of the rows."""
    return {
        row["system"]: row["step_ms"]
        for row in rows
        if row["workload"] == "gpt" and row.get("ranks", 2) == 2 and row.get("link", "1gbit") == "1gbit"
    }


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


def _model_size(parts: Mapping[str, Any]) -> Table:
    rows = parts["model-size"]["rows"]
    names = list(dict.fromkeys(row["system"] for row in rows))
    lines = []
    for size in dict.fromkeys((row["num_params"], row["tensors"]) for row in rows):
        by_name = {row["system"]: row for row in rows if row["num_params"] == size[0]}
        times = (f"{by_name[name]['step_ms']:.0f}" for name in names)
        lines.append([f"{size[0] / 1e6:.1f} M", str(size[1]), *times, f"**{by_name['Undertow']['times_faster']:.1f}**"])
    return [["parameters", "tensors", *(f"{name}, ms" for name in names), "times faster"], *lines]


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


def _guard() -> Table:
    recorded = guard.read_recorded()
    rows = [[name.replace("ours", "Undertow"), f"{value:.3f}", _wanted(name)] for name, value in recorded.items()]
    return [["ratio", "recorded", "target"], *rows]


def _wanted(name: str) -> str:
    return f"≤ {guard.TARGETS[name]:.2f}" if name in guard.TARGETS else "-"


def _slow_networks(rows: Sequence[Cell]) -> Table:
    """Whole steps in ms on 2 ranks, by system; a column for each workload and link."""
    steps = {(row["workload"], row["link"], row["system"]): f"{row['step_ms']:.0f}" for row in rows if row["ranks"] == 2}
    links = {"100mbit": "100 Mb/s", **_LINKS}
    names = {"replay": "24 timed layers", "gpt": "GPT"}
    columns = [(workload, link) for link in links for workload in names if any(key[:2] == (workload, link) for key in steps)]
    lines = [
        [SYSTEMS[system].title, *(steps.get((*column, system), "") for column in columns)]
        for system in dict.fromkeys(system for _, _, system in steps)
    ]
    return [["ms of a step", *(f"{names[workload]}, {links[link]}" for workload, link in columns)], *lines]


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
    steps = {(row["workload"], row["system"]): row["step_ms"] for row in rows}
    workloads = {"replay": "24 timed layers", "gpt": "GPT"}
    lines = []
    for system in dict.fromkeys(row["system"] for row in rows):
        line = [system]
        for workload in workloads:
            step_ms = steps[workload, system]
            line.append(f"{step_ms:.0f} ({step_ms / steps[workload, outer.BARE]:.2f})")
        lines.append(line)
    return [["ms of a step (over bare)", *workloads.values()], *lines]


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


def _demo(parts: Mapping[str, Any]) -> Table:
    rows = parts["demo"]["rows"]
    return [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]


def draw() -> None:
    """Runs the demo and the simulator; writes their pictures into docs, and records the demo's figures."""
    from benchmarks.machine import machine
    from undertow.demo import DemoSettings
    from undertow.demo.run import headline, train
    from undertow.demo.settings import WAYS
    from undertow.report.timeline import save_timeline
    from undertow.trace import overlap_of

    settings = DemoSettings(strategy="zero2")
    ask = ("examples/profiles/gpt2.json", "--ranks", "64", "--per-node", "8", "--link", "25gbit", "--out", "docs")
    subprocess.run([str(Path(sys.executable).parent / "undertow"), "simulate", *ask], cwd=ROOT, check=True)
    done = train(settings)
    typical = {WAYS[it.way]: it.typical for it in done}
    conditions = f"{settings.num_ranks} ranks on one machine, {settings.link} emulated, typical of {settings.num_steps} steps"
    for name, chosen in (("demo-zero2", done), ("demo", done[:-1])):
        traces = {WAYS[it.way]: it.typical for it in chosen}
        save_timeline(traces, ROOT / "docs" / f"{name}.png", title=headline(chosen), conditions=conditions)
    rows = [
        {
            "variant": way,
            "ms per step": f"{step.duration_us / 1e3:.0f}",
            "exposed ms": f"{overlap_of(step).exposed_us / 1e3:.0f}",
            "hidden": f"{overlap_of(step).fraction or 0:.0%}",
            "operations": str(len(step.communication)),
        }
        for way, step in typical.items()
    ]
    _keep({"demo": {**_origin(machine()), "figures": [], "rows": rows}})


def main(arguments: Sequence[str]) -> int:
    """Writes figures.json and the blocks of the pages; 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks figures", description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FILE", help="take the results of this bench.jsonl first")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures anew, with the demo's table")
    asked = parser.parse_args(arguments)
    if asked.record:
        record(asked.record)
    if asked.pictures:
        draw()
    write(tables())
    return 0
