"""python -m benchmarks: measures host overhead, Muon and steps over shaped links; prints a table each, writes out/bench.jsonl.

It takes about two hours; two of the three need root and iproute2. `make bench` runs it.
python -m benchmarks --only quality --only outer-quality --only outer-docstrings: how fewer bytes, or exchanges, change the
loss. It takes hours.
python -m benchmarks.shaped: any of the systems, also Megatron-core's and DeepSpeed's, on any workload over one link.
python -m benchmarks.many_ranks: processor time of a step on many ranks.
python -m benchmarks fidelity: the simulator beside steps that benchmarks.shaped has measured.
python -m benchmarks figures: the tables of README.md and docs/benchmarks.md, from recorded results. `make figures` runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from benchmarks import fidelity, figures, host_overhead, muon, outer, quality
from benchmarks.machine import machine
from benchmarks.part import Part, Row, Run, Table
from benchmarks.processes import interruptible
from benchmarks.shaped import part as shaped

PARTS = (host_overhead.PART, muon.PART, shaped.PART)
ONLY_IF_NAMED = (quality.PART, *outer.PARTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; 0, 1 if a part could not be measured, 130 if interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["fidelity"]:
        return fidelity.main(arguments[1:])
    if arguments[:1] == ["figures"]:
        return figures.main(arguments[1:])
    return interruptible(partial(_measure, _parser().parse_args(arguments)))


def _measure(asked: argparse.Namespace) -> int:
    asked.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    chosen = [part for part in (*PARTS, *ONLY_IF_NAMED) if part.name in asked.only] if asked.only else PARTS
    described = {**machine(), "is_quick": asked.quick}
    rows: dict[str, Sequence[Row]] = {}
    try:
        for part in chosen:
            tell = partial(_tell, console, part)
            try:
                rows[part.name] = part.measure(Run(out=asked.out, is_quick=asked.quick, resumes=asked.resume, tell=tell))
            except Exception as error:
                tell(f"could not be measured: {error}")
    finally:  # also of what an interrupted run has measured
        if rows:
            described["load_average_after"] = machine()["load_average"]
            write_json_lines(asked.out / "bench.jsonl", described, rows)
    for part in chosen:
        if part.name in rows:
            console.print()
            console.print(_shown(part.title, part.table(rows[part.name])))
    if rows:
        console.print(f"Written: {asked.out / 'bench.jsonl'}", highlight=False)
    return 0 if len(rows) == len(chosen) else 1


def _tell(console: Console, part: Part, now: str) -> None:
    console.print(f"{part.name}: {now}", markup=False, highlight=False)


def write_json_lines(path: Path, machine: Row, rows: Mapping[str, Sequence[Row]]) -> None:
    """Writes one object per line: the machine, then every measurement of each part."""
    lines = [machine, *({"part": name, **row} for name, of_part in rows.items() for row in of_part)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _shown(title: str, lines: Table) -> RichTable:
    head, *rows = lines
    table = RichTable(title=escape(title), title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(head):
        table.add_column(escape(name), justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in (*PARTS, *ONLY_IF_NAMED)]
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps and repetitions: to see that it works")
    parser.add_argument("--resume", action="store_true", help="keep what an interrupted long part has left in --out")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where to write (default: out)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
