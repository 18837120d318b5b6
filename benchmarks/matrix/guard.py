"""Ratios of a run beside recorded ones: a report of what has become worse, no timed test. Pure but for the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.matrix.catalog import BARE, OWN
from benchmarks.matrix.finished import title_of

RECORDED = Path(__file__).parent / "recorded.json"
WORSE_BY = 0.10
_LIMIT = "limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One ratio, smaller is better; `recorded` is None for one that has not been recorded."""

    name: str
    recorded: float | None
    measured: float

    @property
    def change(self) -> float | None:
        return None if self.recorded is None else self.measured / self.recorded - 1

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
            ratios[f"{place}: {own['system']} / {_LIMIT}"] = own["over_limit"]
            for name in [name for name in rows if name not in (*OWN, BARE)]:
                measured = "step_ms" if own["is_sharded"] or rows[name]["is_sharded"] else "backward_ms"
                ratio = own[measured]["median"] / rows[name][measured]["median"]
                ratios[f"{place}: {own['system']} / {name}"] = round(ratio, 4)
    return ratios


def compare(measured: Mapping[str, float], recorded: Mapping[str, float]) -> list[Change]:
    return [Change(name=name, recorded=recorded.get(name), measured=ratio) for name, ratio in measured.items()]


def report(changes: Sequence[Change]) -> str:
    """What became worse, first; a line when nothing did."""
    known = [change for change in changes if change.recorded is not None]
    worse = [change for change in known if change.is_worse]
    lines = [f"{len(known)} of {len(changes)} ratios have a recorded one; worse by more than {WORSE_BY:.0%}: {len(worse)}"]
    lines += [f"  WORSE  {it.name}: {it.measured:.3f}, recorded {it.recorded:.3f} ({it.change:+.0%})" for it in worse]
    return "\n".join(lines)


def read_recorded(path: Path = RECORDED) -> dict[str, float]:
    if not path.exists():
        return {}
    ratios: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["ratios"]
    return ratios


def record(measured: Mapping[str, float], machine: Mapping[str, Any], path: Path = RECORDED) -> None:
    """Writes the ratios into the file, beside those of cells that were not measured now."""
    ratios = dict(sorted({**read_recorded(path), **measured}.items()))
    path.write_text(json.dumps({"machine": dict(machine), "ratios": ratios}, indent=2) + "\n", encoding="utf-8")
