"""python -m benchmarks matrix: workloads x ranks x links x systems, side by side; writes matrix.jsonl and matrix.md."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.machine import machine
from benchmarks.matrix import catalog
from benchmarks.matrix.cell import Cell, CellResult, Effort, kind_of, measure_cell, why_not_here
from benchmarks.matrix.errors import MatrixError, UnknownName, require_known
from benchmarks.matrix.finished import (
    Document,
    in_order,
    lines_of,
    measured_systems,
    place_of,
    profile_name,
    read_cells,
)
from benchmarks.matrix.links import LOCAL, SHAPES, remove_abandoned, what_is_missing
from benchmarks.matrix.rows import profiles_of, rows_of_cell
from benchmarks.matrix.table import markdown
from benchmarks.matrix.turns import STEPS_PER_TURN, TIMED_PER_TURN

FULL = Effort(num_turns=8)
QUICK = Effort(num_turns=2, max_settling=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asks for, all names known."""

    workloads: tuple[catalog.WorkloadSpec, ...]
    ranks: tuple[int, ...]
    links: tuple[str, ...]
    systems: tuple[catalog.SystemSpec, ...]
    effort: Effort
    device: str
    out: Path
    resumes: bool


def main(arguments: Sequence[str]) -> int:
    """Runs the matrix; 0, 1 if nothing could be measured, 2 for a command that cannot be understood."""
    try:
        asked = _asked(_parser().parse_args(arguments))
    except UnknownName as error:
        print(f"benchmarks matrix: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "benchmarks", "matrix", *arguments])
    return interruptible(partial(run, asked, command))


def run(asked: Asked, command: str) -> int:
    """Measures cell by cell and writes what there is after each: an interrupted run is not lost, and can be resumed."""
    began_s = time.perf_counter()
    asked.out.mkdir(parents=True, exist_ok=True)
    removed, not_removed = remove_abandoned()
    for name in removed:
        _tell(f"removed {name}, which a runner that was killed had left")
    if not_removed is not None:
        _tell(not_removed)
    missing = what_is_missing()
    asked_cells = _cells(asked, is_shaped=missing is None)
    if missing is not None and any(cell.kind == LOCAL for cell in asked_cells):
        _tell(f"no shaped links: {missing}. Ranks talk over this machine's loopback: these figures only show that it works.")
    header = {**machine(), "command": command, "links": _links(asked_cells, missing)}
    if not asked.resumes:
        _set_aside(asked.out)
    cells = {place_of(cell): cell for cell in read_cells(asked.out / "matrix.jsonl")} if asked.resumes else {}
    wanted = [cell for cell in asked_cells if not _is_finished(cells.get(cell.place), cell)]
    measured: list[Document] = []
    for number, cell in enumerate(wanted, start=1):
        _tell(f"cell {number} of {len(wanted)}")
        earlier = cells.get(cell.place)
        found = _measured(cell if earlier is None else _with_systems_of(earlier, cell))
        if earlier is not None and not _has_figures(found):
            _tell(f"{cell.title}: nothing could be measured; the figures of an earlier run are kept")
            continue
        measured.append(found)
        cells[cell.place] = found
        write(asked.out, header, in_order(cells.values()))
    header["load_average_after"] = machine()["load_average"]
    if not asked.resumes:  # else it would be that of some of the cells
        header["duration_s"] = round(time.perf_counter() - began_s)
    documents = in_order(cells.values())
    write(asked.out, header, documents)
    print(markdown(header, documents))
    _tell(f"written: {asked.out}/matrix.jsonl and .md")
    return 0 if not wanted or any(map(_has_figures, measured)) else 1


def _links(cells: Sequence[Cell], missing: str | None) -> str:
    """Returns the kinds of links for the head of the tables, and why links were not shaped."""
    kinds = dict.fromkeys(cell.kind for cell in cells)
    return ", ".join(f"{kind} ({missing})" if kind == LOCAL and missing is not None else kind for kind in kinds)


def _has_figures(cell: Document) -> bool:
    """Of more than the bare model, where more was asked for."""
    return bool(measured_systems(cell) - {catalog.BARE}) or (len(cell["rows"]) == 1 and bool(measured_systems(cell)))


def _is_timed_so(cell: Document) -> bool:
    """As this code times; what was timed in another way is not to stand beside it."""
    return bool(cell["conditions"].get("steps_per_turn") == STEPS_PER_TURN)


def _is_finished(earlier: Document | None, cell: Cell) -> bool:
    """True if an earlier run has as good a figure of every system of `cell` that can be measured here."""
    if earlier is None or not _is_timed_so(earlier) or earlier["conditions"]["num_turns"] < cell.effort.num_turns:
        return False
    lacking = [spec for spec in cell.systems if spec.name not in measured_systems(earlier)]
    return all(why_not_here(spec, cell.device) is not None for spec in lacking)


def _with_systems_of(earlier: Document, cell: Cell) -> Cell:
    """`cell`, which takes the place of an earlier one, with what that has figures of."""
    names = measured_systems(earlier) | {spec.name for spec in cell.systems}
    return replace(cell, systems=tuple(spec for name, spec in catalog.SYSTEMS.items() if name in names))


def _cells(asked: Asked, *, is_shaped: bool) -> list[Cell]:
    """Returns the cells in the order in which they run."""
    return [
        Cell(
            workload=workload,
            num_ranks=num_ranks,
            link=link,
            kind=kind_of(link, num_ranks, asked.device, has_namespaces=is_shaped),
            device=asked.device,
            systems=asked.systems,
            effort=asked.effort,
        )
        for workload, link, num_ranks in itertools.product(asked.workloads, asked.links, asked.ranks)
    ]


def _measured(cell: Cell) -> Document:
    before = machine()
    try:
        result = measure_cell(cell, _tell)
    except Exception as error:
        # The cell is lost, not the bench.
        if not isinstance(error, MatrixError):
            traceback.print_exc()
        result = CellResult(timed=[], errors={spec.name: str(error) for spec in cell.systems})
    for name, reason in result.errors.items():
        _tell(f"{cell.title}: {name} could not be measured: {reason}")
    return {
        "workload": cell.workload.label,
        "workload_title": cell.workload.title,
        "num_params": result.timed[0][0]["num_params"] if result.timed else 0,
        "ranks": cell.num_ranks,
        "link": cell.link,
        "kind": cell.kind,
        "device": cell.device,
        "divided": result.divided,
        "conditions": {
            **{key: before[key] for key in ("date", "commit", "torch", "load_average")},
            "load_average_after": machine()["load_average"],
            "num_turns": cell.effort.num_turns,
            "steps_per_turn": STEPS_PER_TURN,
        },
        "rows": rows_of_cell(cell.systems, result.timed, result.errors),
        "profiles": profiles_of(result.timed),
    }


def write(out: Path, header: Document, cells: Sequence[Document]) -> None:
    for cell in cells:
        for system, profile in cell["profiles"].items():
            (out / "profiles").mkdir(exist_ok=True)
            (out / "profiles" / profile_name(cell, system)).write_text(profile, encoding="utf-8")
    lines = lines_of(header, cells)
    _replace(out / "matrix.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    _replace(out / "matrix.md", markdown(header, cells))


def _set_aside(out: Path) -> None:
    """Keeps the files of an earlier run, which took hours, under another name."""
    for path in (out / "matrix.jsonl", out / "matrix.md"):
        if path.exists():
            kept = path.with_stem(f"{path.stem}.previous")
            path.replace(kept)
            _tell(f"{path} of an earlier run is {kept} now; with --resume a run continues it")


def _replace(path: Path, text: str) -> None:
    """Who is interrupted here has the old file or the new one."""
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def interruptible(measure: Callable[[], int]) -> int:
    """The exit code of `measure`; 130 if it is interrupted, by Ctrl-C or whatever else asks this process to end."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _stop)  # as Ctrl-C: everything that has been set up is torn down
    try:
        return measure()
    except KeyboardInterrupt:
        _tell("interrupted; what was measured before is kept")
        return 130


def _stop(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _asked(given: argparse.Namespace) -> Asked:
    """The command line with every name looked up; raises UnknownName."""
    for link in given.link or ():
        require_known("link", link, SHAPES)
    for system in given.system or ():
        require_known("system", system, catalog.SYSTEMS)
    workloads = given.workload or (["replay", "gpt"] if given.quick else list(catalog.WORKLOADS))
    quick_systems = [catalog.OURS, catalog.TORCH]
    names = given.system or (
        quick_systems if given.quick else [name for name, spec in catalog.SYSTEMS.items() if not spec.rounding]
    )
    chosen = [name for name in catalog.SYSTEMS if name in (catalog.BARE, *names)]  # the bare model is always there
    effort = QUICK if given.quick else FULL
    if given.steps is not None:
        effort = replace(effort, num_turns=math.ceil(given.steps / TIMED_PER_TURN))
    return Asked(
        workloads=tuple({spec.label: spec for spec in map(catalog.workload_from_text, workloads)}.values()),
        ranks=tuple(dict.fromkeys(given.ranks or ((2,) if given.quick else catalog.RANKS))),
        links=tuple(dict.fromkeys(given.link or (("1gbit",) if given.quick else catalog.LINKS))),
        systems=tuple(catalog.SYSTEMS[name] for name in chosen),
        effort=effort,
        device=_device(given.device),
        out=given.out,
        resumes=given.resume,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks matrix", description=__doc__)
    add = parser.add_argument
    add("--workload", action="append", metavar="NAME[@SCALE]", help=f"{', '.join(catalog.WORKLOADS)}; may be repeated")
    add("--ranks", action="append", type=_num_ranks, metavar="N", help="2 to 64, default 2 and 4; may be repeated")
    add(
        "--link",
        action="append",
        metavar="NAME",
        help=f"{', '.join(SHAPES)}; default {', '.join(catalog.LINKS)}; may be repeated",
    )
    add("--system", action="append", metavar="NAME", help=f"{', '.join(catalog.SYSTEMS)}; may be repeated")
    add("--device", default="cpu", metavar="NAME", help=f"{', '.join(catalog.DEVICES)}: where models compute (default: cpu)")
    add(
        "--steps", type=_positive, metavar="N", help="that are timed of each system in each cell, two a turn (of slow ones fewer)"
    )
    add("--quick", action="store_true", help="replay and gpt on two ranks at 1gbit, our defaults and torch's, few steps")
    add("--resume", action="store_true", help="keep the cells in --out that have all these systems, and measure the others")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="where to write (default: out)")
    return parser


def _device(name: str) -> str:
    require_known("device", name, catalog.DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        raise UnknownName("there is no CUDA device here, or this torch was built without CUDA")
    return name


def _num_ranks(text: str) -> int:
    number = _positive(text)
    if not 2 <= number <= 64:
        raise argparse.ArgumentTypeError(f"between 2 and 64 ranks, not {number}")
    return number


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a number above 0, not {text!r}")
    return int(text)
