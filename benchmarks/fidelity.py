"""python -m benchmarks fidelity: the simulator beside what the matrix has measured; reads OUT/matrix.jsonl and OUT/profiles.

Run the matrix first, with our systems. Two tables:

- every cell simulated from its own profile: its compute times, its curve of costs, its buckets; beside the step as it was
  measured in the steps of the profile, from its forward until all gradients were through;
- every cell simulated from the profile of the same workload, ranks and system on *one* link: its compute times, and its costs
  with the wire of that link taken out and that of the cell's put in. Of the cell's own run only the buckets are used.

In the second table a cell's figure is that of the matrix: until gradients are averaged, or of a sharded system a whole step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.matrix.finished import profile_name, title_of
from undertow.cost import Costs, RingCosts, TransferredCosts, link_from_text
from undertow.plan import plan_from_groups
from undertow.profile import Profile, profile_from_file
from undertow.schedule import strategy_named
from undertow.simulate import simulate
from undertow.trace import StepRecord

BASE_LINK = "1gbit"
OWN_BOUND, OTHER_BOUND = 0.05, 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A cell of the matrix, measured and simulated; milliseconds."""

    cell: str
    system: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def main(arguments: Sequence[str]) -> int:
    """Prints and writes the tables; 0, or 1 if an error is above its bound, 2 without a matrix, or without a profile of it."""
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
    rows = [variant for row in measured for variant in _variants(row)]
    own, other = list(own_predictions(rows, out)), list(other_predictions(rows, out))
    if not own and not other:
        console.print(
            f"{out / 'profiles'} has no profile of a cell in {out / 'matrix.jsonl'}. Run the matrix with a system of ours: "
            f"python -m benchmarks matrix --workload replay --system ours --out {out}",
            markup=False,
            soft_wrap=True,  # a command is copied
        )
        return 2
    tables = (("From its own profile", own, OWN_BOUND), (f"From the profile of {BASE_LINK}", other, OTHER_BOUND))
    for title, predictions, bound in tables:
        console.print(_table(title, predictions, bound))
    (out / "fidelity.md").write_text("".join(_markdown(*table) for table in tables), encoding="utf-8")
    console.print(f"Written: {out / 'fidelity.md'}", highlight=False)
    return int(any(abs(it.error) > bound for _, predictions, bound in tables for it in predictions))


def _variants(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each variant that was measured, not for the best one only."""
    if not row.get("variants_ms"):
        yield row
        return
    compared = "step_ms" if row["is_sharded"] else "backward_ms"
    for variant, times in row["variants_ms"].items():
        yield {**row, "variant": variant, compared: times}


def own_predictions(rows: Sequence[dict[str, Any]], out: Path) -> Iterator[Prediction]:
    """Every cell from what was measured in it."""
    for row in rows:
        profile = _profile(row, out)
        if profile is not None:
            it = _prediction(row, profile, profile, profile.costs())
            if profile.step_us is not None:
                record = _simulated(profile, profile, profile.costs(), num_ranks=row["ranks"])
                # Without what lies between two steps: in the matrix that is the turns of all other systems.
                measured_us, predicted_us = (step_us - profile.update_us for step_us in (profile.step_us, record.step_us))
                yield replace(it, measured_ms=measured_us / 1e3, predicted_ms=predicted_us / 1e3)


def other_predictions(rows: Sequence[dict[str, Any]], out: Path) -> Iterator[Prediction]:
    """Every cell from what was measured on the base link."""
    for row in rows:
        here = _profile(row, out)
        base = None if row["link"] == BASE_LINK else _profile({**row, "link": BASE_LINK}, out)
        if here is None or base is None:
            continue
        was, wanted = (RingCosts(link_from_text(link), num_ranks=row["ranks"]) for link in (BASE_LINK, row["link"]))
        costs = TransferredCosts(measured=base.costs(), was=was, wanted=wanted)
        yield _prediction(row, base, here, costs)


def _prediction(row: dict[str, Any], profile: Profile, planned: Profile, costs: Costs) -> Prediction:
    record = _simulated(profile, planned, costs, num_ranks=row["ranks"])
    until_averaged_us = max(bucket.waited[1] for bucket in record.buckets)
    return Prediction(
        cell=title_of(row),
        system=row["variant"] or row["system"],
        measured_ms=row["step_ms" if row["is_sharded"] else "backward_ms"]["median"],
        predicted_ms=(record.step_us if row["is_sharded"] else until_averaged_us) / 1e3,
    )


def _simulated(profile: Profile, planned: Profile, costs: Costs, *, num_ranks: int) -> StepRecord:
    assert planned.groups is not None  # measured under a plan
    plan = plan_from_groups(planned.params, planned.groups, num_ranks=num_ranks)
    return simulate(profile, plan, strategy_named(profile.strategy), costs)


def _profile(row: dict[str, Any], out: Path) -> Profile | None:
    path = out / "profiles" / profile_name(row, row["variant"] or row["system"])
    return profile_from_file(path) if path.exists() else None


def _table(title: str, predictions: Sequence[Prediction], bound: float) -> Table:
    table = Table(title=f"{title}: errors of at most {bound:.0%}", title_justify="left")
    for name in ("cell", "system"):
        table.add_column(name)
    for name in ("measured, ms", "simulated, ms", "error"):
        table.add_column(name, justify="right")
    for it in predictions:
        style = "bold red" if abs(it.error) > bound else None
        table.add_row(it.cell, it.system, f"{it.measured_ms:.1f}", f"{it.predicted_ms:.1f}", f"{it.error:+.1%}", style=style)
    return table


def _markdown(title: str, predictions: Sequence[Prediction], bound: float) -> str:
    lines = [f"## {title}: errors of at most {bound:.0%}", ""]
    lines += ["| cell | system | measured, ms | simulated, ms | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {it.cell} | {it.system} | {it.measured_ms:.1f} | {it.predicted_ms:.1f} | {it.error:+.1%} |" for it in predictions
    ]
    return "\n".join(lines) + "\n\n"
