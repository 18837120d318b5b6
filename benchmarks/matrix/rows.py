"""From the results of a cell's ranks to one row per system. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.matrix.catalog import SystemSpec

RankResult = Mapping[str, Any]
Row = dict[str, Any]
_MEASURED = ("backward_s", "step_s", "cpu_s", "sent_bytes")
_FACTS_OF_THE_ROW = ("collectives", "version", "buckets", "state_mb", "decision")


def rows_of_cell(specs: Sequence[SystemSpec], timed: Sequence[Sequence[RankResult]], errors: Mapping[str, str]) -> list[Row]:
    """Returns a row per system, in the order of `specs`. A system that could not be measured has its error there."""
    return [_row(spec, timed, errors) for spec in specs]


def spread_ms(samples_s: Sequence[float]) -> Row:
    return {
        "median": round(median(samples_s) * 1e3, 2),
        "min": round(min(samples_s) * 1e3, 2),
        "max": round(max(samples_s) * 1e3, 2),
    }


def slowest(ranks: Sequence[RankResult], system: str, measured: str) -> list[float]:
    """Step by step, the largest over ranks."""
    return [max(values) for values in zip(*(rank["systems"][system][measured] for rank in ranks), strict=True)]


def _row(spec: SystemSpec, timed: Sequence[Sequence[RankResult]], errors: Mapping[str, str]) -> Row:
    row: Row = {"system": spec.name, "title": spec.title, "variant": None, "error": None, "note": spec.note}
    measured = {job.name: _pooled(job.name, timed) for job in spec.jobs()}
    found = {name: pooled for name, pooled in measured.items() if pooled["step_s"]}
    if not found:
        row["error"] = _error_of(spec, timed, errors) or "not measured"
        return row
    if (failed := _error_of(spec, timed, errors)) is not None:
        row["note"] = f"{spec.note} In one run it failed: {' '.join(failed.split())}".strip()
    compared = "step_s" if spec.is_sharded else "backward_s"
    variant = min(found, key=lambda name: median(found[name][compared]))
    if len(measured) > 1:
        row["variant"] = variant
        row["variants_ms"] = {name: spread_ms(pooled[compared]) for name, pooled in found.items()}
    return row | _figures(spec, found[variant])


def profiles_of(timed: Sequence[Sequence[RankResult]]) -> dict[str, str]:
    """Returns the profiles of Undertow's systems, by the names of their variants; of the last run that each was in."""
    found = {}
    for ranks in timed:
        for name, report in ranks[0]["systems"].items():
            if (profile := report.get("facts", {}).get("profile")) is not None:
                found[name] = profile
    return found


def _pooled(name: str, timed: Sequence[Sequence[RankResult]]) -> dict[str, Any]:
    """Returns all steps of one variant, from every run that it was in."""
    pooled: dict[str, Any] = {"facts": {}, **{measured: [] for measured in _MEASURED}}
    for ranks in timed:
        if not all("step_s" in rank["systems"].get(name, {}) for rank in ranks):
            continue
        for measured in _MEASURED:
            pooled[measured] += slowest(ranks, name, measured)
        pooled["facts"] = ranks[0]["systems"][name]["facts"]
    return pooled


def _figures(spec: SystemSpec, pooled: Mapping[str, Any]) -> Row:
    return {
        "num_steps": len(pooled["step_s"]),
        "backward_ms": spread_ms(pooled["backward_s"]),
        "step_ms": spread_ms(pooled["step_s"]),
        "samples_ms": {name: [round(it * 1e3, 2) for it in pooled[f"{name}_s"]] for name in ("backward", "step")},
        "is_sharded": spec.is_sharded,
        "cpu_ms": round(median(pooled["cpu_s"]) * 1e3, 2),
        "sent_mb": round(median(pooled["sent_bytes"]) / 1e6, 2) if pooled["sent_bytes"] else None,
        **{key: pooled["facts"].get(key) for key in _FACTS_OF_THE_ROW},
    }


def _error_of(spec: SystemSpec, timed: Sequence[Sequence[RankResult]], errors: Mapping[str, str]) -> str | None:
    names = tuple(dict.fromkeys((spec.name, *(job.name for job in spec.jobs()))))
    told = [errors[name] for name in names if name in errors]
    told += [
        str(rank["systems"][name]["error"])
        for ranks in timed
        for rank in ranks
        for name in names
        if "error" in rank["systems"].get(name, {})
    ]
    return told[0] if told else None
