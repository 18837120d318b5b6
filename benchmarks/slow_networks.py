"""What fewer bytes gain on slow networks: all systems in turn in one run, over shaped links of several speeds.

The cells are cells of the matrix, in DIR/slow-networks, with the systems that send fewer bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, Part, Relation, Row, Target, Tell
from benchmarks.matrix import run as matrix
from benchmarks.matrix.catalog import BARE, OURS, SYSTEMS, workload_from_text
from benchmarks.matrix.cell import Effort
from benchmarks.matrix.finished import read_cells

NAME, BEST = "slow-networks", "torch-ddp-best"
MEASURED = (
    *(BARE, BEST, "torch-ddp-bfloat16", "torch-ddp-powersgd"),
    *(OURS, "ours-bfloat16", "ours-int8", "ours-auto", "ours-zero1", "ours-zero1-int8"),
)
LINKS = ("1gbit", "none", "5gbit", "100mbit")  # in the order of their targets: a run may be interrupted
_FULL = Effort(num_turns=20, has_start_up=False, turn_budget_s=60.0)  # two steps of a turn are timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A system's step, or what it sends, over another's in the same cell: at most `bound`."""

    workload: str
    ranks: int
    system: str
    over: str
    bound: float
    link: str = "1gbit"
    measured: str = "step_ms"

    @property
    def name(self) -> str:
        what = "" if self.measured == "step_ms" else ", bytes"
        return f"{self.workload}, {self.ranks} ranks, {self.link}: {self.system} / {self.over}{what}"


WANTED = (
    Wanted(workload="replay", ranks=2, system="ours-int8", over=BARE, bound=1.08),
    Wanted(workload="replay", ranks=4, system="ours-int8", over=BARE, bound=1.15),
    Wanted(workload="gpt", ranks=2, system="ours-int8", over=BEST, bound=0.75),
    Wanted(workload="gpt", ranks=2, system="ours-bfloat16", over=BEST, bound=0.80),
    Wanted(workload="gpt", ranks=2, system="ours-zero1-int8", over=BEST, bound=0.75),
    *(
        Wanted(workload=workload, ranks=2, system=system, over=BEST, bound=0.26, measured="sent_mb")
        for workload in ("replay", "gpt")
        for system in ("ours-int8", "ours-zero1-int8")
    ),
    *(
        Wanted(workload=workload, ranks=2, link="none", system="ours-int8", over=OURS, bound=1.10)
        for workload in ("replay", "gpt")
    ),
)


def part(out: Path, *, resumes: bool) -> Part:
    """The benchmark; it keeps its cells in a folder of `out`."""
    return Part(
        name=NAME,
        title="Slow networks: whole steps and bytes of systems that send less, in turn",
        measure=partial(measure, out / NAME, resumes),
        judge=judge,
    )


def measure(out: Path, resumes: bool, is_quick: bool, _tell: Tell) -> list[Row]:
    """A row for each system of each cell that has a figure."""
    asked = matrix.Asked(
        workloads=tuple(map(workload_from_text, ("replay", "gpt"))),
        ranks=(2,) if is_quick else (2, 4),
        links=LINKS[:1] if is_quick else LINKS,
        systems=tuple(SYSTEMS[name] for name in MEASURED),
        effort=matrix.QUICK if is_quick else _FULL,
        device="cpu",
        out=out,
        has_large=False,
        records=False,
        resumes=resumes,
        validates=False,
        left_out=(),
    )
    matrix.run(asked, f"python -m benchmarks --only {NAME}")
    return rows_of(read_cells(out / "matrix.jsonl"))


def rows_of(cells: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Whole steps and bytes, system by system."""
    return [
        {
            **{key: cell[key] for key in ("workload", "ranks", "link", "kind")},
            "system": row["system"],
            "variant": row["variant"],
            "step_ms": row["step_ms"]["median"],
            "num_steps": row["num_steps"],
            "sent_mb": row["sent_mb"],
            "buckets": row["collectives"],
        }
        for cell in cells
        for row in cell["rows"]
        if row["error"] is None
    ]


def judge(rows: Sequence[Row]) -> list[Figure]:
    """The figures with a target whose systems were measured."""
    found = {(row["workload"], row["ranks"], row["link"], row["system"]): row for row in rows}
    figures = []
    for wanted in WANTED:
        place = (wanted.workload, wanted.ranks, wanted.link)
        one, other = found.get((*place, wanted.system)), found.get((*place, wanted.over))
        if one is not None and other is not None and other[wanted.measured]:
            target = Target(relation=Relation.AT_MOST, bound=wanted.bound)
            ratio = one[wanted.measured] / other[wanted.measured]
            figures.append(Figure(name=wanted.name, measured=ratio, unit="x", target=target))
    return figures
