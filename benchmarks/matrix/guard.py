"""Ratios of a run beside recorded ones: a report of what has become worse, no timed test. Pure but for the file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.matrix.catalog import BARE, OWN
from benchmarks.matrix.finished import title_of

RECORDED = Path(__file__).parent / "recorded.json"
WORSE_BY = 0.10
_LIMIT = "limit"
# What defaults are held to on the machine of docs/benchmarks.md; of the real model with no spread allowed.
TARGETS = {
    "replay, 2 ranks, 1gbit (shaped): ours / limit": 1.03,
    "replay, 4 ranks, 1gbit (shaped): ours / limit": 1.03,
    "replay, 2 ranks, 1gbit (shaped): ours / torch-ddp": 0.82,
    "replay, 4 ranks, 1gbit (shaped): ours / torch-ddp": 0.86,
    "gpt, 2 ranks, 1gbit (shaped): ours / limit": 1.15,
    "gpt, 2 ranks, 1gbit (shaped): ours / torch-ddp-best": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One ratio, smaller is better; `recorded` is None for one that has not been recorded, `measured` for one that is lost."""

    name: str
    recorded: float | None
    measured: float | None

    @property
    def change(self) -> float | None:
        return None if self.recorded is None or self.measured is None else self.measured / self.recorded - 1

    @property
    def is_worse(self) -> bool:
        return self.change is not None and self.change > WORSE_BY


def ratios_of(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each of ours over its limit and over every peer, cell by cell; whole steps where an update of either communicates."""
    ratios = {}
    for cell in cells:
        rows = {row["system"]: row for row in cell["rows"] if row["error"] is None}
        place = title_of(cell)
        for own in [rows[name] for name in OWN if name in rows]:
            ratios[_name(place, own["system"], _LIMIT)] = own["over_limit"]
            for name in [name for name in rows if name not in (*OWN, BARE)]:
                measured = "step_ms" if own["is_sharded"] or rows[name]["is_sharded"] else "backward_ms"
                ratio = own[measured]["median"] / rows[name][measured]["median"]
                ratios[_name(place, own["system"], name)] = round(ratio, 4)
    return ratios


def names_of(place: str, systems: Collection[str]) -> set[str]:
    """Of the ratios that the cell with this title has where all of `systems` have a figure."""
    others = [_LIMIT, *(name for name in systems if name not in (*OWN, BARE))]
    return {_name(place, own, other) for own in OWN if own in systems for other in others}


def _name(place: str, own: str, other: str) -> str:
    return f"{place}: {own} / {other}"


def compare(measured: Mapping[str, float], recorded: Mapping[str, float], *, expected: Collection[str] = ()) -> list[Change]:
    """What was measured beside what is recorded, then what is recorded and `expected` and was not measured."""
    lost = sorted(recorded.keys() & set(expected) - measured.keys())
    return [Change(name=name, recorded=recorded.get(name), measured=measured.get(name)) for name in (*measured, *lost)]


def report(changes: Sequence[Change]) -> str:
    """What became worse, first, and what has no value any more; a line when there is neither."""
    lost = [change for change in changes if change.measured is None]
    known = [change for change in changes if change.measured is not None and change.recorded is not None]
    if changes and not known and not lost:
        return "nothing to compare with: of these cells no ratio is recorded (see benchmarks/matrix/recorded.json)"
    worse = [change for change in known if change.is_worse]
    counted = f"{len(known)} of {len(changes) - len(lost)} ratios have a recorded one"
    lines = [f"{counted}; worse by more than {WORSE_BY:.0%}: {len(worse)}; lost: {len(lost)}"]
    lines += [f"  WORSE  {it.name}: {it.measured:.3f}, recorded {it.recorded:.3f} ({it.change:+.0%})" for it in worse]
    lines += [f"  LOST  {it.name}, recorded {it.recorded:.3f}" for it in lost]
    return "\n".join(lines)


def held_to(measured: Mapping[str, float]) -> list[str]:
    """A line for each target of which there is a figure."""
    return [
        f"  {'met   ' if measured[name] <= wanted else 'MISSED'}  {name}: {measured[name]:.3f}, wanted at most {wanted:.2f}"
        for name, wanted in TARGETS.items()
        if name in measured
    ]


def read_recorded(path: Path = RECORDED) -> dict[str, float]:
    if not path.exists():
        return {}
    ratios: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["ratios"]
    return ratios


def record(measured: Mapping[str, float], machine: Mapping[str, Any], path: Path = RECORDED) -> None:
    """Writes the ratios into the file, beside those of cells that were not measured now."""
    ratios = dict(sorted({**read_recorded(path), **measured}.items()))
    path.write_text(json.dumps({"machine": dict(machine), "ratios": ratios}, indent=2) + "\n", encoding="utf-8")
