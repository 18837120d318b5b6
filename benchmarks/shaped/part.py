"""python -m benchmarks --only shaped: the rows of the README, of docs/slow-networks.md and of docs/benchmarks.md.

Each course is one session of processes over one link, where all its systems take turns. A finished one is kept in
DIR/shaped, with every step of every rank, and `--resume` does not measure it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.errors import NoNamespaces
from benchmarks.links import remove_abandoned, what_is_missing
from benchmarks.part import Part, Row, Run, Table
from benchmarks.shaped.contenders import BARE, BEST, DDP, OURS, OUTER, SWEEPS, chosen
from benchmarks.shaped.rounds import Course, Timed, run
from benchmarks.shaped.session import HERE

NAME = SOURCE = "shaped"
WORKLOADS = {"gpt": "GPT", "replay": "24 timed layers", "small": "3,000 small parameters"}
LINKS = {"1gbit": "1 Gb/s", "5gbit": "5 Gb/s", "none": "unshaped"}
FAR = "100mbit"  # between sites
# torch's ways that one of Undertow's is compared with, in words.
EXACT = {BEST: "bucket size"}
NARROW = {"ddp-fp16": "fp16 hook", "ddp-powersgd": "PowerSGD"}
AVERAGER = {"averager": "`PeriodicModelAverager`"}
_RATES = {FAR: "100 Mb/s", **LINKS}
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
_QUICK = {("replay", "1gbit"): f"{OURS},{DDP},{BARE}"}
_QUICK_SETTLING = 20  # steps
# The lines of a table.
_ORDER = (
    *(BARE, DDP, BEST, *NARROW, *AVERAGER, OURS, "ours-untuned", "ours-auto", "ours-bfloat16", "ours-int8"),
    *("ours-zero1", "ours-zero1-int8", OUTER),
)
_NUM_RANKS = 2


def measure(how: Run) -> list[Row]:
    """Returns a row for each system, workload and link. Raises NoNamespaces."""
    missing = what_is_missing()
    if missing is not None:
        raise NoNamespaces(f"shaped links cannot be made here: {missing}")
    remove_abandoned()
    kept = how.out / (f"{NAME}-quick" if how.is_quick else NAME)  # a long run is not overwritten
    kept.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for (workload, link), names in (_QUICK if how.is_quick else _SYSTEMS).items():
        course = _course(workload, link, names, is_quick=how.is_quick)
        rows += _rows_of_course(course, kept / f"{workload}-{link}.json", how)
    return rows


def _course(workload: str, link: str, names: str, *, is_quick: bool) -> Course:
    contenders = chosen(names, {})
    if is_quick:
        contenders = tuple(replace(each, most_settling=_QUICK_SETTLING) for each in contenders)
    return Course(
        workload=workload,
        link=link,
        num_ranks=_NUM_RANKS,
        contenders=contenders,
        num_rounds=1 if is_quick else 3,
        num_steps=6 if is_quick else 12,
        sources={"": HERE},
    )


def _rows_of_course(course: Course, kept: Path, how: Run) -> list[Row]:
    if how.resumes and kept.exists():
        before: list[Row] = json.loads(kept.read_text(encoding="utf-8"))["rows"]
        return before
    timed = run(course, how.tell)
    rows = rows_of(course, timed)
    errors = [each.error for each in timed if each.error is not None]
    for error in errors:
        how.tell(error)
    if not errors:  # otherwise `--resume` measures the course again
        steps = [each.to_dict() for each in timed]
        kept.write_text(json.dumps({"rows": rows, "steps": steps}) + "\n", encoding="utf-8")
    return rows


def rows_of(course: Course, timed: Sequence[Timed]) -> list[Row]:
    """Returns a row for each system that was measured, and one for the best bucket size of torch DDP."""
    rows = [_row(course, each.contender.name, each.contender.title, each) for each in timed if each.error is None]
    sweep = [each for each in timed if each.contender.name in SWEEPS[BEST] and each.error is None]
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
    """Returns the milliseconds of a step, by system; BEST is the fastest bucket size of torch DDP, its default among them."""
    steps = {row["system"]: row["step_ms"] for row in rows if (row["workload"], row["link"]) == (workload, link)}
    if {DDP, BEST} <= steps.keys():
        steps[BEST] = min(steps[DDP], steps[BEST])
    return steps


def table(rows: Sequence[Row]) -> Table:
    """Returns whole steps in ms, by system; a column for each workload and link."""
    return by_system(rows, list(_SYSTEMS), lambda steps, system: f"{steps[system]:.0f}")


def by_system(rows: Sequence[Row], places: Sequence[tuple[str, str]], text: Callable[[Mapping[str, float], str], str]) -> Table:
    """Returns a line for each system of these workloads and links, without single bucket sizes."""
    steps = {place: found for place in places if (found := steps_of(rows, *place))}
    titles = {row["system"]: row["title"] for row in rows if (row["workload"], row["link"]) in steps}
    lines = [["ms of a step", *(f"{WORKLOADS[workload]}, {_RATES[link]}" for workload, link in steps)]]
    for system in (name for name in _ORDER if name in titles):
        cells = (text(found, system) if system in found else "" for found in steps.values())
        lines.append([titles[system], *cells])
    return lines


PART = Part(
    name=NAME,
    title=f"Shaped links: ms of whole steps of {_NUM_RANKS} ranks in namespaces, systems in turn",
    measure=measure,
    table=table,
)
