"""The recorded cases, docs/matrix/matrix.jsonl: a line for each system in each workload, number of ranks and link.

The harness that measured them is in the history, at commit fae10cab, and docs/benchmarks.md has its method. Some of its systems
have other names in `benchmarks.shaped`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean

from benchmarks.part import Row, Table

RECORD = Path(__file__).parents[1] / "docs" / "matrix" / "matrix.jsonl"
_ALIKE = 0.03  # a smaller difference says nothing here
_LINKS = {"1gbit": "1 Gb/s", "5gbit": "5 Gb/s", "none": "unshaped"}
_BASELINES = ("bare", "per-parameter")  # neither Undertow's nor peers
_OURS = "ours"  # begins the names of Undertow's systems
_TORCH, _BEST = "torch-ddp", "torch-ddp-best"
_WHOLE = (_OURS, "ours-untuned", "ours-ordered")  # Undertow's without shards
_TITLES = {
    _TORCH: "torch DDP, defaults",
    _BEST: "torch DDP, best of six bucket sizes",
    "megatron-ddp": "Megatron-core DDP, best of seven bucket sizes",
    _OURS: "**Undertow, defaults**",
    "ours-zero1": "**Undertow, sharded optimizer**",
    "megatron-distopt": "Megatron-core distributed optimizer, best of its bucket sizes",
    "torch-zero": "torch ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2 per layer (made for device streams)",
    "deepspeed-zero1": "DeepSpeed ZeRO-1 (made for device streams)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload on a number of ranks over one link, with the median step of each system that was measured."""

    workload: str
    num_ranks: int
    link: str
    has_turns: bool  # of several steps; older cases timed one step a turn
    steps_ms: Mapping[str, float]  # by system

    @property
    def own(self) -> tuple[str, ...]:
        return tuple(name for name in self.steps_ms if name.startswith(_OURS))

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(name for name in self.steps_ms if not name.startswith(_OURS) and name not in _BASELINES)

    @property
    def favored_shards(self) -> bool:
        """True if the way of timing was to the advantage of sharded modes (docs/studies.md)."""
        return self.workload in ("gpt", "resnet") and not self.has_turns

    def ratio(self, own: Sequence[str], others: Sequence[str]) -> float:
        """Returns the fastest of `own` over the fastest of `others`."""
        return min(self.steps_ms[name] for name in own) / min(self.steps_ms[name] for name in others)


def recorded() -> list[Case]:
    """Returns the cases in which all systems were measured."""
    _machine, *rows = map(json.loads, RECORD.read_text(encoding="utf-8").splitlines())
    by_place: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_place[row["workload"], row["ranks"], row["link"]].append(row)
    cases = [_case(of_case) for of_case in by_place.values()]
    return [case for case in cases if {_OURS, _BEST} <= case.steps_ms.keys()]


def _case(rows: Sequence[Row]) -> Case:
    first = rows[0]
    return Case(
        workload=first["workload"],
        num_ranks=first["ranks"],
        link=first["link"],
        has_turns="steps_per_turn" in first["conditions"],
        steps_ms={row["system"]: row["step_ms"]["median"] for row in rows if row["error"] is None},
    )


def summary(cases: Sequence[Case]) -> Table:
    """Returns how often Undertow was faster and slower, and by how much."""
    favored = [case for case in cases if case.favored_shards]
    careful = [case.ratio(_WHOLE if case.favored_shards else case.own, case.peers) for case in cases]
    by_link = [
        _line(f"the same, {title}", [case.ratio([_OURS], [_TORCH]) for case in cases if case.link == link])
        for link, title in _LINKS.items()
    ]
    return [
        [f"step time, {len(cases)} cases", "faster", "within 3 %", "slower", "range", "geometric mean"],
        _line("**defaults / torch DDP's defaults**", [case.ratio([_OURS], [_TORCH]) for case in cases]),
        *by_link,
        _line("defaults / torch DDP's best of six bucket sizes", [case.ratio([_OURS], [_BEST]) for case in cases]),
        _line("defaults / the fastest peer", [case.ratio([_OURS], case.peers) for case in cases]),
        _line("fastest of Undertow's five modes / the fastest peer", [case.ratio(case.own, case.peers) for case in cases]),
        _line(f"the same, without sharded modes in {len(favored)} cases whose timing favored them", careful),
    ]


def _line(name: str, ratios: Sequence[float]) -> list[str]:
    faster = sum(it < 1 - _ALIKE for it in ratios)
    slower = sum(it > 1 + _ALIKE for it in ratios)
    counts = (faster, len(ratios) - faster - slower, slower)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return [name, *map(str, counts), spread, f"{exp(mean(map(log, ratios))):.2f}"]


def one_case(cases: Sequence[Case]) -> Table:
    """Returns the steps of systems on timed layers over 1 Gb/s, the slowest first."""
    steps = {case.num_ranks: case.steps_ms for case in cases if (case.workload, case.link) == ("replay", "1gbit")}
    rows = [[title, *(f"{steps[ranks][name]:.0f}" for ranks in (2, 4))] for name, title in _TITLES.items()]
    return [["whole step over 1 Gb/s, ms", "2 ranks", "4 ranks"], *sorted(rows, key=lambda row: int(row[1]), reverse=True)]
