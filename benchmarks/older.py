"""python -m benchmarks older TREE: this checkout beside another one of the repository, in turn, in the same processes.

    git worktree add ../older COMMIT
    python -m benchmarks older ../older

The other checkout's package is copied under another name, so that both can be imported. A repetition has new processes, in
which each side measures its first steps and chooses its plan, and then takes turns with the other. Its ratio is the median over
pairs of turns; the whole result is the median over repetitions, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.machine import machine
from benchmarks.matrix import catalog
from benchmarks.matrix.cell import Cell, Effort, kind_of, measure_cell
from benchmarks.matrix.errors import UnknownName, require_known
from benchmarks.matrix.interval import ratio_of
from benchmarks.matrix.links import what_is_missing
from benchmarks.matrix.rows import rows_of_cell

_COPIED = ("ours", "ours_sharded")  # the systems that import the package
_SIDES = ("ours", "ours-zero1")
_OF_PACKAGE = re.compile(r"\bundertow\b(?!-)")  # not in names of threads, by which a package knows its own
_OF_SYSTEM = re.compile(r"\bbenchmarks\.matrix\.systems\.(?=ours)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asks for."""

    tree: Path
    workloads: tuple[catalog.WorkloadSpec, ...]
    ranks: tuple[int, ...]
    link: str
    systems: tuple[str, ...]
    num_repetitions: int
    num_turns: int


def main(arguments: Sequence[str]) -> int:
    """Prints a ratio per case; 0, or 2 for a command that cannot be understood."""
    try:
        asked = _asked(_parser().parse_args(arguments))
    except UnknownName as error:
        print(f"benchmarks older: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="undertow-older-") as folder:
        copy_renamed(asked.tree, Path(folder))
        for workload in asked.workloads:
            for num_ranks in asked.ranks:
                _compare(asked, workload, num_ranks, folder)
    return 0


def copy_renamed(tree: Path, folder: Path) -> None:
    """Copies the package of `tree`, and its systems that import it, under names that this checkout does not have."""
    package, systems = tree / "src" / "undertow", tree / "benchmarks" / "matrix" / "systems"
    sources = {Path("older_undertow") / path.relative_to(package): path for path in package.rglob("*.py")}
    sources |= {Path(f"older_{name}.py"): systems / f"{name}.py" for name in _COPIED}
    for name, source in sources.items():
        text = _OF_SYSTEM.sub("older_", source.read_text(encoding="utf-8"))
        text = _OF_PACKAGE.sub("older_undertow", text).replace('version("older_undertow")', '"older"')
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _compare(asked: Asked, workload: catalog.WorkloadSpec, num_ranks: int, folder: str) -> None:
    specs = [catalog.SYSTEMS[name] for name in asked.systems]
    cell = Cell(
        workload=workload,
        num_ranks=num_ranks,
        link=asked.link,
        kind=kind_of(asked.link, num_ranks, "cpu", has_namespaces=what_is_missing() is None),
        systems=(catalog.SYSTEMS[catalog.BARE], *specs, *(_older(spec, folder) for spec in specs)),
        effort=Effort(num_turns=asked.num_turns, has_start_up=False),
    )
    ratios: dict[str, list[float]] = {name: [] for name in asked.systems}
    for repetition in range(1, asked.num_repetitions + 1):
        load = machine()["load_average"]
        result = measure_cell(cell, lambda _line: None)
        rows = {row["system"]: row for row in rows_of_cell(cell.systems, result.timed, {}, result.errors)}
        for name in asked.systems:
            here, older = rows[name], rows[f"older-{name}"]
            failed = here["error"] or older["error"]
            if failed:
                print(f"{cell.title}: {name} could not be measured: {failed}")
                continue
            ratio = ratio_of(here, older)
            ratios[name].append(ratio.value)
            times = f"{here['step_ms']['median']:.1f} / {older['step_ms']['median']:.1f} ms"
            turns = f"{len(here['turns_ms'])} turns, {here['collectives']} and {older['collectives']} collectives"
            print(f"{cell.title}: {name}, repetition {repetition}: {times}, {ratio}; {turns}, load {load}", flush=True)
    for name, values in ratios.items():
        if values:
            spread = f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
            print(f"{cell.title}: {name}, this checkout / the other: {spread}", flush=True)


def _older(spec: catalog.SystemSpec, folder: str) -> catalog.SystemSpec:
    (options,) = spec.variants.values()
    copied = {"folder": folder, "module": f"older_{spec.module.rsplit('.', 1)[-1]}"}
    return replace(
        spec, name=f"older-{spec.name}", module="benchmarks.matrix.systems.older", variants={"": {**options, **copied}}
    )


def _asked(given: argparse.Namespace) -> Asked:
    require_known("link", given.link, catalog.LINKS)
    for name in given.system or ():
        require_known("system", name, _SIDES)
    return Asked(
        tree=given.tree.resolve(),
        workloads=tuple(map(catalog.workload_from_text, given.workload or ["replay", "gpt"])),
        ranks=tuple(given.ranks or [2]),
        link=given.link,
        systems=tuple(given.system or _SIDES[:1]),
        num_repetitions=given.repetitions,
        num_turns=given.turns,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks older", description=__doc__)
    add = parser.add_argument
    add("tree", type=Path, metavar="TREE", help="the other checkout")
    add("--workload", action="append", metavar="NAME[@SCALE]", help="default replay and gpt; may be repeated")
    add("--ranks", action="append", type=int, metavar="N", help="default 2; may be repeated")
    add("--link", default="1gbit", metavar="NAME", help="default 1gbit")
    add("--system", action="append", metavar="NAME", help=f"{', '.join(_SIDES)}; default {_SIDES[0]}; may be repeated")
    add("--repetitions", type=int, default=5, metavar="N", help="default 5")
    add("--turns", type=int, default=16, metavar="N", help="of each side in a repetition, two timed steps each; default 16")
    return parser
