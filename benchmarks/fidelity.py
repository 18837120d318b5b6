"""python -m benchmarks fidelity FILE ...: the simulator beside measured steps, from files of `benchmarks.shaped --json FILE`.

Each of Undertow's systems is simulated from its own profile: its compute times, its curve of costs, its buckets. The step is
compared with the steps of the profile, from the forward until all gradients were through. If a file has the defaults and other
plans, the steps of those are also simulated from the profile of the defaults, which has not seen them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.shaped.contenders import OURS
from undertow.lab.profile import Profile, profile_from_json
from undertow.lab.what_if import WhatIf
from undertow.plan import plan_from_groups

BOUND = 0.05
_TITLE = f"Simulated from profiles: errors of at most {BOUND:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A system of a case, measured and simulated; milliseconds."""

    case: str
    system: str
    source: str  # the system whose profile was simulated
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def main(arguments: Sequence[str]) -> int:
    """Prints the table; 0, or 1 if an error is above its bound, 2 without a profile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fidelity", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what benchmarks.shaped has written with --json")
    files: list[Path] = parser.parse_args(arguments).files
    console = Console()
    predictions = [each for path in files for each in _predictions(path)]
    if not predictions:
        console.print("These files have no profile. Time a system of Undertow: python -m benchmarks.shaped --json FILE")
        return 2
    console.print(_table(predictions))
    console.print(_counts(predictions), highlight=False)
    return int(any(abs(it.error) > BOUND for it in predictions))


def _predictions(path: Path) -> Iterator[Prediction]:
    """Every plan from its own profile, and from the profile of the defaults in the same case."""
    document = json.loads(path.read_text(encoding="utf-8"))
    case = f"{document['workload']}, {document['ranks']} ranks, {document['link']}"
    found = dict(_profiles(document["systems"], str(path)))
    for system, profile in found.items():
        for source in dict.fromkeys((system, OURS)):
            known = found.get(source)
            if known is not None and known.strategy == profile.strategy:
                yield _prediction(case, system, profile, source, known)


def _profiles(systems: Sequence[Mapping[str, Any]], where: str) -> Iterator[tuple[str, Profile]]:
    for system in systems:
        text = system["told"].get("profile")
        profile = None if text is None else profile_from_json(text, where)
        if profile is not None and profile.step_us is not None:
            yield system["system"], profile


def _prediction(case: str, system: str, profile: Profile, source: str, known: Profile) -> Prediction:
    assert profile.groups is not None  # measured under a plan
    assert profile.step_us is not None
    plan = plan_from_groups(known.params, profile.groups, num_ranks=known.num_ranks, wires=profile.wires)
    step_us = WhatIf.of(known).step(plan).step_us
    return Prediction(
        case=case,
        system=system,
        source=source,
        # Without the time between two steps, in which other systems take their turns.
        measured_ms=(profile.step_us - profile.update_us) / 1e3,
        predicted_ms=(step_us - known.update_us) / 1e3,
    )


def _table(predictions: Sequence[Prediction]) -> Table:
    table = Table(title=_TITLE, title_justify="left")
    for name in ("case", "system", "profile of"):
        table.add_column(name)
    for name in ("measured, ms", "simulated, ms", "error"):
        table.add_column(name, justify="right")
    for it in predictions:
        figures = (f"{it.measured_ms:.1f}", f"{it.predicted_ms:.1f}", f"{it.error:+.1%}")
        table.add_row(it.case, it.system, it.source, *figures, style="bold red" if abs(it.error) > BOUND else None)
    return table


def _counts(predictions: Sequence[Prediction]) -> str:
    told = []
    for source, is_own in (("their own profile", True), ("the profile of another plan", False)):
        some = [it for it in predictions if (it.source == it.system) is is_own]
        close = sum(abs(it.error) <= BOUND for it in some)
        if some:
            told.append(f"From {source}: of {len(some)} predictions {close} are within {BOUND:.0%}.")
    return "\n".join(told)
