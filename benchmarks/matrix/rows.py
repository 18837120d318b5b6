"""From what the ranks of a cell brought back to one row per system. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.matrix.catalog import BARE, SystemSpec
from benchmarks.matrix.limit import Compute, Wire, barrier_limit_s, limit_s, wire_from_calibration

RankResult = Mapping[str, Any]
Row = dict[str, Any]
_FACTS_OF_THE_ROW = ("collectives", "version", "buckets", "state_mb", "decision")


def rows_of_cell(
    specs: Sequence[SystemSpec],
    timed: Sequence[Sequence[RankResult]],
    start_up: Mapping[str, Sequence[RankResult]],
    errors: Mapping[str, str],
) -> list[Row]:
    """A row per system, in the order of `specs`; what could not be measured is a row with its error."""
    limits = [_limits_of_run(ranks) for ranks in timed]
    rows = [_row(spec, timed, limits, errors) for spec in specs]
    for row in rows:
        row |= _start_up(start_up.get(row["system"], ()))
    return rows


def link_of_cell(timed: Sequence[Sequence[RankResult]]) -> Row:
    """What the calibrations of the cell's runs have measured: medians, slowest rank of each."""
    wires = [_wire(ranks) for ranks in timed]
    if not wires:
        return {"megabytes_per_s": None, "small_ms": None}
    return {
        "megabytes_per_s": round(median(wire.megabytes_per_s for wire in wires), 1),
        "small_ms": round(median(wire.least_s for wire in wires) * 1e3, 3),
    }


def spread_ms(samples_s: Sequence[float]) -> Row:
    return {
        "median": round(median(samples_s) * 1e3, 2),
        "min": round(min(samples_s) * 1e3, 2),
        "max": round(max(samples_s) * 1e3, 2),
    }


def slowest(ranks: Sequence[RankResult], system: str, measured: str) -> list[float]:
    """Step by step, the largest over ranks."""
    return [max(values) for values in zip(*(rank["systems"][system][measured] for rank in ranks), strict=True)]


def _row(spec: SystemSpec, timed: Sequence[Sequence[RankResult]], limits: Sequence[Row], errors: Mapping[str, str]) -> Row:
    row: Row = {"system": spec.name, "title": spec.title, "variant": None, "error": None, "note": spec.note}
    measured = {job.name: _pooled(job.name, timed, limits) for job in spec.jobs()}
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
    """What our systems have measured of the workload, by the names of their variants; of the last run each was in."""
    found = {}
    for ranks in timed:
        for name, report in ranks[0]["systems"].items():
            if (profile := report.get("facts", {}).get("profile")) is not None:
                found[name] = profile
    return found


def _pooled(name: str, timed: Sequence[Sequence[RankResult]], limits: Sequence[Row]) -> dict[str, Any]:
    """All steps of one variant, and the limits and the bare model of the runs it was in."""
    pooled: dict[str, Any] = {"backward_s": [], "step_s": [], "cpu_s": [], "sent_bytes": [], "facts": {}}
    pooled |= {"turns_s": [], "runs": [], "limit_s": [], "barrier_limit_s": []}
    pooled |= {"bare_backward_s": [], "bare_step_s": [], "bare_cpu_s": []}
    for run, (ranks, limit) in enumerate(zip(timed, limits, strict=True)):
        if not limit or not all("step_s" in rank["systems"].get(name, {}) for rank in ranks):
            continue
        for measured in ("backward_s", "step_s", "cpu_s", "sent_bytes"):
            pooled[measured] += slowest(ranks, name, measured)
        pooled["turns_s"] += _medians_of_turns(slowest(ranks, name, "step_s"), len(ranks[0]["systems"][name]["cpu_s"]))
        pooled["runs"].append(run)
        pooled["facts"] = ranks[0]["systems"][name]["facts"]
        for measured, values in limit.items():
            pooled[measured] += values
    return pooled


def _medians_of_turns(steps_s: Sequence[float], num_turns: int) -> list[float]:
    size = len(steps_s) // num_turns
    return [median(steps_s[first : first + size]) for first in range(0, len(steps_s), size)]


def _figures(spec: SystemSpec, pooled: Mapping[str, Any]) -> Row:
    backward_s, step_s = median(pooled["backward_s"]), median(pooled["step_s"])
    limits = {name: median(pooled[name]) for name in ("limit_s", "barrier_limit_s")}
    achieved_over_limit = step_s / limits["barrier_limit_s"] if spec.is_sharded else backward_s / limits["limit_s"]
    bare_s = median(pooled["bare_step_s" if spec.is_sharded else "bare_backward_s"])
    return {
        "num_steps": len(pooled["step_s"]),
        "backward_ms": spread_ms(pooled["backward_s"]),
        "step_ms": spread_ms(pooled["step_s"]),
        "samples_ms": {name: [round(it * 1e3, 2) for it in pooled[f"{name}_s"]] for name in ("backward", "step")},
        "turns_ms": [round(it * 1e3, 2) for it in pooled["turns_s"]],  # whole steps, the median of each turn
        "runs": pooled["runs"],  # systems of the same runs took turns
        **{f"{name.removesuffix('_s')}_ms": round(limit * 1e3, 2) for name, limit in limits.items()},
        "is_sharded": spec.is_sharded,
        "over_limit": None if spec.name == BARE else round(achieved_over_limit, 4),
        "exposed_ms": round(((step_s if spec.is_sharded else backward_s) - bare_s) * 1e3, 2),
        "host_cpu_ms": round((median(pooled["cpu_s"]) - median(pooled["bare_cpu_s"])) * 1e3, 2),
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


def _limits_of_run(ranks: Sequence[RankResult]) -> Row:
    """Limits round by round, from the bare model of the run and the speed of its link."""
    if not all("step_s" in rank["systems"].get(BARE, {}) for rank in ranks):
        return {}
    wire = _wire(ranks)
    sizes = [num_bytes for _, num_bytes in ranks[0]["params"]]
    bare_step_s, bare_backward_s = slowest(ranks, BARE, "step_s"), slowest(ranks, BARE, "backward_s")
    rounds = [
        # Of the update a rank has its share to do.
        Compute(ready_s=ready_s, used_s=used_s, backward_s=backward_s, update_s=(step_s - backward_s) / len(ranks))
        for ready_s, used_s, backward_s, step_s in zip(
            _slowest_by_param(ranks, "ready_s", max),
            _slowest_by_param(ranks, "used_s", min),
            bare_backward_s,
            bare_step_s,
            strict=True,
        )
    ]
    return {
        "limit_s": [max(limit_s(it.ready_s, sizes, wire), it.backward_s) for it in rounds],
        "barrier_limit_s": [barrier_limit_s(it, sizes, wire) for it in rounds],
        "bare_backward_s": bare_backward_s,
        "bare_step_s": bare_step_s,
        "bare_cpu_s": slowest(ranks, BARE, "cpu_s"),
    }


def _slowest_by_param(ranks: Sequence[RankResult], measured: str, choose: Any) -> list[list[float]]:
    rounds = zip(*(rank["systems"][BARE][measured] for rank in ranks), strict=True)
    return [[choose(times) for times in zip(*of_ranks, strict=True)] for of_ranks in rounds]


def _wire(ranks: Sequence[RankResult]) -> Wire:
    """Of the slowest rank: a collective is done when it is done everywhere."""
    wires = [wire_from_calibration(rank["calibration"]) for rank in ranks]
    return Wire(seconds_per_byte=max(wire.seconds_per_byte for wire in wires), least_s=max(wire.least_s for wire in wires))


def _start_up(ranks: Sequence[RankResult]) -> Row:
    """Of the slowest rank, alone in its process: the import with torch, wrapping, the first step; the peaks of memory."""
    reports = [(rank, *next(iter(rank["systems"].items()))) for rank in ranks]
    if not reports or any("first_step_s" not in report for _, _, report in reports):
        return {}
    return {
        "start_up_of": reports[0][1],  # of a sweep its first variant, not the best one
        "import_ms": round(max(rank["torch_import_s"] + report["import_s"] for rank, _, report in reports) * 1e3),
        "wrap_ms": round(max(report["wrap_s"] for _, _, report in reports) * 1e3),
        "first_step_ms": round(max(report["first_step_s"] for _, _, report in reports) * 1e3),
        **{name: _largest([rank[name] for rank, _, _ in reports]) for name in ("peak_rss_mb", "peak_device_mb")},
    }


def _largest(of_ranks: Sequence[float | None]) -> int | None:
    return max((round(value) for value in of_ranks if value is not None), default=None)
