"""python -m benchmarks: measures, writes out/bench.jsonl, and prints every figure beside its target.

python -m benchmarks matrix ...: workloads x ranks x links x systems; --help says more. `make bench` runs both.
python -m benchmarks fidelity: the simulator beside what the matrix has measured.
python -m benchmarks --only shaped: whole steps over links that tc shapes, which the README shows. It takes hours.
python -m benchmarks.shaped: some of these systems over one of these links, with every step as JSON.
python -m benchmarks --only quality --only outer-quality --only outer-docstrings: how fewer bytes, or exchanges, change the
loss. It takes hours.
python -m benchmarks figures: the tables of README.md and docs/benchmarks.md, from recorded results. `make figures` runs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks import fidelity, figures, outer, quality
from benchmarks.figure import Part
from benchmarks.machine import machine
from benchmarks.matrix import run as matrix
from benchmarks.output import Measured, figures_table, write_json_lines
from benchmarks.shaped import part as shaped
from benchmarks.suite import PARTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; 0, 1 if a part could not be measured, 130 if interrupted. A target that is missed is a result."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["matrix"]:
        return matrix.main(arguments[1:])
    if arguments[:1] == ["fidelity"]:
        return fidelity.main(arguments[1:])
    if arguments[:1] == ["figures"]:
        return figures.main(arguments[1:])
    return matrix.interruptible(partial(_measure, _parser().parse_args(arguments)))


def _measure(asked: argparse.Namespace) -> int:
    num_failed = _measure_parts(asked)
    if asked.only:
        return 1 if num_failed else 0
    of_matrix = [f"--{name}" for name in ("quick", "resume") if getattr(asked, name)]
    matrix_code = matrix.main(["--out", str(asked.out), *of_matrix])
    return matrix_code or (1 if num_failed else 0)


def _measure_parts(asked: argparse.Namespace) -> int:
    """Measures the parts asked for and writes their figures; how many could not be measured."""
    asked.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    alone = (
        shaped.part(asked.out, resumes=asked.resume),
        quality.part(asked.out, resumes=asked.resume),
        *outer.parts(asked.out, resumes=asked.resume),
    )
    chosen = [part for part in (*PARTS, *alone) if part.name in asked.only] if asked.only else PARTS
    described = {**machine(), "is_quick": asked.quick}
    results: list[Measured] = []
    try:
        _run_parts(chosen, console, results, is_quick=asked.quick)
    finally:  # also of what an interrupted run has measured
        if results:
            described["load_average_after"] = machine()["load_average"]
            write_json_lines(asked.out / "bench.jsonl", described, results)
    console.print()
    console.print(figures_table(results))
    console.print(f"Written: {asked.out / 'bench.jsonl'}", highlight=False)
    return len(chosen) - len(results)


def _run_parts(parts: Sequence[Part], console: Console, results: list[Measured], *, is_quick: bool) -> None:
    """Adds to `results` each part that can be measured."""
    for part in parts:

        def tell(now: str, name: str = part.name) -> None:
            console.print(f"{name}: {now}", markup=False, highlight=False)

        try:
            rows = part.measure(is_quick, tell)
            results.append(Measured(part=part, rows=rows, figures=part.judge(rows)))
        except Exception as error:
            tell(f"could not be measured: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*(part.name for part in PARTS), shaped.NAME, quality.NAME, outer.NAME, outer.DOCSTRINGS]
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"one of {', '.join(names)}, without the matrix; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps and repetitions: to see that it works")
    parser.add_argument("--resume", action="store_true", help="keep what an interrupted matrix or a long part has left in --out")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where to write (default: out)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
