"""python -m benchmarks --only shaped: the rows of the README, of docs/slow-networks.md and of docs/benchmarks.md.

Each course is one session of processes over one link, where all its systems take turns. A finished one is kept in
DIR/shaped, with every step of every rank, and `--resume` does not measure it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, Part, Row, Tell
from benchmarks.matrix.errors import NoNamespaces
from benchmarks.matrix.links import remove_abandoned, what_is_missing
from benchmarks.shaped.rounds import Course, Timed, run
from benchmarks.shaped.session import HERE
from benchmarks.shaped.systems import BARE, BEST, DDP, OURS, OUTER, SWEEP, chosen

NAME = SOURCE = "shaped"
WORKLOADS = {"gpt": "GPT", "replay": "24 timed layers", "small": "3,000 small parameters"}
LINKS = {"1gbit": "1 Gb/s", "5gbit": "5 Gb/s", "none": "unshaped"}
FAR = "100mbit"  # between sites
_LARGE = ("gpt", "replay")
_CHANGED = f"{OURS},ours-untuned,{DDP},{BEST},{BARE}"
_FULL_WIDTH = f"{_CHANGED},ours-zero1"
# By workload and link. The parameters of `small` travel in full width in every format, and are too small for shards.
_SYSTEMS = {
    **{(workload, "1gbit"): f"{_FULL_WIDTH},ours-auto,ours-int8,ours-zero1-int8,ddp-fp16,ddp-powersgd" for workload in _LARGE},
    **{(workload, "5gbit"): f"{_FULL_WIDTH},ours-auto,ours-int8" for workload in _LARGE},
    **{(workload, "none"): _FULL_WIDTH for workload in _LARGE},
    **{("small", link): _CHANGED for link in LINKS},
    **{(workload, FAR): f"{OUTER},averager,ours-int8,{DDP},{BEST},{BARE}" for workload in _LARGE},
}
# Over all workloads and links: a system's step over another's, at most.
_BOUNDS = (
    (OURS, "ours-untuned", 1.02),  # a plan is kept only if it is faster
    ("ours-auto", OURS, 1.02),  # so is a format
    (OURS, BEST, None),
    (OUTER, BARE, 1.03),
)
_NUM_RANKS = 2


def part(out: Path, *, resumes: bool) -> Part:
    """Returns the benchmark; it keeps its courses in a folder of `out`."""
    return Part(
        name=NAME,
        title=f"Shaped links: whole steps of {_NUM_RANKS} ranks in namespaces, systems in turn",
        measure=partial(measure, out / NAME, resumes),
        judge=judge,
    )


def measure(out: Path, resumes: bool, is_quick: bool, tell: Tell) -> list[Row]:
    """Returns a row for each system, workload and link."""
    missing = what_is_missing()
    if missing is not None:
        raise NoNamespaces(f"shaped links cannot be made here: {missing}")
    remove_abandoned()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for (workload, link), names in _SYSTEMS.items():
        kept = out / f"{workload}-{link}.json"
        if not (resumes and kept.exists()):
            course = Course(
                workload=workload,
                link=link,
                num_ranks=_NUM_RANKS,
                contenders=chosen(names, {}),
                num_rounds=1 if is_quick else 3,
                num_steps=6 if is_quick else 12,
                sources={"": HERE},
            )
            timed = run(course, tell)
            steps = [each.to_dict() for each in timed]
            kept.write_text(json.dumps({"rows": rows_of(course, timed), "steps": steps}) + "\n", encoding="utf-8")
        rows += json.loads(kept.read_text(encoding="utf-8"))["rows"]
    return rows


def rows_of(course: Course, timed: Sequence[Timed]) -> list[Row]:
    """Returns a row for each system that was measured, and one for the best bucket size of torch DDP."""
    rows = [_row(course, each.contender.name, each.contender.title, each) for each in timed if each.error is None]
    sweep = [each for each in timed if each.contender.name in SWEEP and each.error is None]
    if sweep:
        best = min(sweep, key=lambda each: each.step_ms)
        rows.append(_row(course, BEST, f"torch DDP, best of {len(sweep)} bucket sizes", best))
    return rows


def _row(course: Course, name: str, title: str, timed: Timed) -> Row:
    return {
        "source": SOURCE,
        "workload": course.workload,
        "link": course.link,
        "ranks": course.num_ranks,
        "system": name,
        "title": title,
        "variant": timed.contender.name,
        "step_ms": round(timed.step_ms, 2),
        "min_ms": round(min(timed.of_rounds_ms), 2),
        "max_ms": round(max(timed.of_rounds_ms), 2),
        "cpu_ms": round(max(timed.cpu_ms), 2),
        "rounds": len(timed.rounds_ms),
    }


def steps_of(rows: Sequence[Mapping[str, Any]], workload: str, link: str) -> dict[str, float]:
    """Returns the milliseconds of a step, by system."""
    return {row["system"]: row["step_ms"] for row in rows if (row["workload"], row["link"]) == (workload, link)}


def judge(rows: Sequence[Row]) -> list[Figure]:
    """Returns the ratios of systems of the same session."""
    figures = []
    for workload, link in _SYSTEMS:
        steps = steps_of(rows, workload, link)
        for system, over, bound in _BOUNDS:
            if system in steps and over in steps:
                figures.append(
                    Figure(
                        name=f"{workload}, {link}: {system} / {over}",
                        measured=steps[system] / steps[over],
                        unit="x",
                        at_most=bound,
                    )
                )
    return figures
