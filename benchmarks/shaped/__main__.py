"""python -m benchmarks.shaped: whole steps of systems in turn over a real shaped link, as a table of medians and ratios.

Needs root and iproute2 (`tc`). Every rank runs in its own network namespace, with one thread. Before it is timed, a system must
train as a blocking reduction per parameter does.

  python -m benchmarks.shaped --workload gpt --link 1gbit --systems ours,ours-untuned,ddp-4mb --rounds 3 --steps 60
  python -m benchmarks.shaped --workload gpt2@0.5 --ranks 4 --systems ddp,ours-zero1,fsdp2,megatron-ddp-best,deepspeed-zero1
  python -m benchmarks.shaped --systems ours,old:ours --tree old=../other/src --json steps.json
  python -m benchmarks.shaped --workload replay@0.01 --link loopback   # without root, to see that it works
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.links import LOOPBACK, SHAPES, remove_abandoned, what_is_missing
from benchmarks.machine import machine
from benchmarks.processes import interruptible
from benchmarks.shaped.contenders import BEST, CONTENDERS, SWEEPS, chosen
from benchmarks.shaped.rounds import Course, Timed, run
from benchmarks.shaped.session import HERE
from benchmarks.shaped.workloads import NAMES, workload_from_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 0, 1 if a system failed, 2 for a command that cannot be understood."""
    asked = _parser().parse_args(arguments)
    return interruptible(partial(_measure, asked))


def _measure(asked: argparse.Namespace) -> int:
    trees = dict(text.split("=", 1) for text in asked.tree)
    try:
        contenders = chosen(asked.systems, trees)
        workload_from_text(asked.workload)
    except BenchmarkError as error:
        print(f"benchmarks shaped: {error}", file=sys.stderr)
        return 2
    if asked.link != LOOPBACK:
        missing = what_is_missing()
        if missing is not None:
            print(f"benchmarks shaped: shaped links cannot be made: {missing}", file=sys.stderr)
            return 2
        remove_abandoned()
    course = Course(
        workload=asked.workload,
        link=asked.link,
        num_ranks=asked.ranks,
        contenders=contenders,
        num_rounds=asked.rounds,
        num_steps=asked.steps,
        sources={"": HERE, **{name: source_of(Path(path)) for name, path in trees.items()}},
    )
    timed = run(course, partial(print, file=sys.stderr))
    print(table(timed))
    if asked.explain:
        for each in timed:
            print(f"\n{each.contender.name}:\n{each.told.get('explain', each.error or '-')}")
    if asked.json is not None:
        conditions = {name: getattr(asked, name) for name in ("workload", "link", "ranks", "rounds", "steps")}
        document = {**machine(), **conditions, "systems": [each.to_dict() for each in timed]}
        asked.json.write_text(json.dumps(document) + "\n", encoding="utf-8")
    for each in timed:
        if each.error is not None:
            print(f"\n{each.error}", file=sys.stderr)
    return 1 if any(each.error for each in timed) else 0


def table(timed: Sequence[Timed]) -> str:
    """Returns medians in ms and ratios to the first system that was measured, with the range over rounds."""
    whole = [each for each in timed if each.error is None]
    lines = [f"{'system':24} {'ms':>8} {'rounds, ms':>19} {'CPU ms':>8} {'ratio':>7} {'of rounds':>15}"]
    for each in timed:
        if each.error is not None:
            lines.append(f"{each.contender.name:24} failed")
            continue
        of_rounds = each.of_rounds_ms
        ratios = [own / other for own, other in zip(of_rounds, whole[0].of_rounds_ms, strict=True)]
        cells = (
            f"{each.contender.name:24}",
            f"{each.step_ms:8.1f}",
            f"{f'{min(of_rounds):.1f} to {max(of_rounds):.1f}':>19}",
            f"{max(each.cpu_ms):8.1f}",
            f"{each.step_ms / whole[0].step_ms:7.3f}",
            f"{f'{min(ratios):.3f} to {max(ratios):.3f}':>15}",
        )
        lines.append(" ".join(cells))
    return "\n".join(lines)


def source_of(tree: Path) -> Path:
    """Returns the folder of `tree` that holds the package: itself, or its `src`."""
    for folder in (tree, tree / "src"):
        if (folder / "undertow").is_dir():
            return folder.resolve()
    raise SystemExit(f"benchmarks shaped: there is no undertow in {tree} or {tree / 'src'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shaped", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="gpt", metavar="NAME[@SCALE]", help=", ".join(NAMES))
    parser.add_argument(
        "--link", default="1gbit", choices=[*SHAPES, LOOPBACK], help=f"{LOOPBACK} needs no root: to see that it works"
    )
    parser.add_argument("--ranks", type=int, choices=range(2, 65), default=2, metavar="N", help="2 to 64")
    parser.add_argument(
        "--systems",
        default=f"ours,{BEST}",
        help=f"a list of {', '.join((*CONTENDERS, *SWEEPS))}; NAME-best is every bucket size; TREE:NAME runs NAME with that tree",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each round, at most: a slow system has 20 s")
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=PATH", help="another source tree of the library")
    parser.add_argument("--explain", action="store_true", help="print what explain() says at the end, system by system")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every step of every rank, and Undertow's profiles")
    return parser


if __name__ == "__main__":
    sys.exit(main())
