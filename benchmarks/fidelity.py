"""python -m benchmarks fidelity: the simulator beside what the matrix has measured; reads OUT/matrix.jsonl and OUT/profiles.

Run the matrix first, with our systems. Every cell is simulated from its own profile: its compute times, its curve of costs, its
buckets. The step is compared with the steps of the profile, from the forward until all gradients were through. Where a cell has
our defaults and other plans, the steps of those are also simulated from the profile of the defaults, which has not seen them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.matrix.catalog import OURS
from benchmarks.matrix.finished import profile_name, title_of
from undertow.lab.profile import Profile, profile_from_file
from undertow.lab.what_if import WhatIf
from undertow.plan import plan_from_groups

BOUND = 0.05
_TITLE = f"Simulated from profiles: errors of at most {BOUND:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A cell of the matrix, measured and simulated; milliseconds."""

    cell: str
    system: str
    source: str  # the system whose profile was simulated
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def main(arguments: Sequence[str]) -> int:
    """Prints and writes the table; 0, or 1 if an error is above its bound, 2 without a matrix, or without a profile of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fidelity", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="where the matrix has written (default: out)"
    )
    out: Path = parser.parse_args(arguments).out
    console = Console()
    try:
        lines = (out / "matrix.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        console.print(f"{error}. Run the matrix first: python -m benchmarks matrix --out {out}", markup=False)
        return 2
    measured = [row for row in map(json.loads, lines) if row["type"] == "row" and not row.get("error")]
    predictions = list(_predictions([variant for row in measured for variant in _variants(row)], out))
    if not predictions:
        console.print(
            f"{out / 'profiles'} has no profile of a cell in {out / 'matrix.jsonl'}. Run the matrix with a system of ours: "
            f"python -m benchmarks matrix --workload replay --system ours --out {out}",
            markup=False,
            soft_wrap=True,  # a command is copied
        )
        return 2
    console.print(_table(predictions))
    console.print(_counts(predictions), highlight=False)
    (out / "fidelity.md").write_text(_markdown(predictions), encoding="utf-8")
    console.print(f"Written: {out / 'fidelity.md'}", highlight=False)
    return int(any(abs(it.error) > BOUND for it in predictions))


def _variants(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each variant that was measured, not for the best one only."""
    if not row.get("variants_ms"):
        yield row
        return
    for variant in row["variants_ms"]:
        yield {**row, "variant": variant}


def _predictions(rows: Sequence[dict[str, Any]], out: Path) -> Iterator[Prediction]:
    """Every plan from what was measured under it, and from what our defaults have measured in the same cell."""
    found = {}
    for row in rows:
        system = row["variant"] or row["system"]
        path = out / "profiles" / profile_name(row, system)
        profile = profile_from_file(path) if path.exists() else None
        if profile is not None and profile.step_us is not None:
            found[title_of(row), system] = profile
    for (cell, system), profile in found.items():
        for source in dict.fromkeys((system, OURS)):
            known = found.get((cell, source))
            if known is not None and known.strategy == profile.strategy:
                yield _prediction(cell, system, profile, source, known)


def _prediction(cell: str, system: str, profile: Profile, source: str, known: Profile) -> Prediction:
    assert profile.groups is not None  # measured under a plan
    assert profile.step_us is not None
    plan = plan_from_groups(known.params, profile.groups, num_ranks=known.num_ranks, wires=profile.wires)
    step_us = WhatIf.of(known).step(plan).step_us
    return Prediction(
        cell=cell,
        system=system,
        source=source,
        # Without what lies between two steps: in the matrix that is the turns of all other systems.
        measured_ms=(profile.step_us - profile.update_us) / 1e3,
        predicted_ms=(step_us - known.update_us) / 1e3,
    )


def _table(predictions: Sequence[Prediction]) -> Table:
    table = Table(title=_TITLE, title_justify="left")
    for name in ("cell", "system", "profile of"):
        table.add_column(name)
    for name in ("measured, ms", "simulated, ms", "error"):
        table.add_column(name, justify="right")
    for it in predictions:
        style = "bold red" if abs(it.error) > BOUND else None
        table.add_row(it.cell, it.system, it.source, *_figures(it), style=style)
    return table


def _figures(it: Prediction) -> tuple[str, ...]:
    return f"{it.measured_ms:.1f}", f"{it.predicted_ms:.1f}", f"{it.error:+.1%}"


def _counts(predictions: Sequence[Prediction]) -> str:
    told = []
    for source, is_own in (("their own profile", True), ("the profile of another plan", False)):
        some = [it for it in predictions if (it.source == it.system) is is_own]
        close = sum(abs(it.error) <= BOUND for it in some)
        if some:
            told.append(f"From {source}: of {len(some)} predictions {close} are within {BOUND:.0%}.")
    return "\n".join(told)


def _markdown(predictions: Sequence[Prediction]) -> str:
    lines = [f"## {_TITLE}", "", "| cell | system | profile of | measured, ms | simulated, ms | error |"]
    lines += ["|---" * 6 + "|"]
    lines += [f"| {' | '.join((it.cell, it.system, it.source, *_figures(it)))} |" for it in predictions]
    return "\n".join((*lines, "", _counts(predictions))) + "\n"
