"""Cells of the benchmark matrix as ranks and rows would make them, without ranks."""

from typing import Any

from benchmarks.matrix.catalog import SYSTEMS
from benchmarks.matrix.rows import rows_of_cell

MS = 1e-3


def played(backward_ms: list[float], **more: Any) -> dict[str, Any]:
    num_turns = len(backward_ms)
    return {
        "backward_s": [ms * MS for ms in backward_ms],
        "step_s": [(ms + 1) * MS for ms in backward_ms],
        "cpu_s": [0.002] * num_turns,
        "sent_bytes": [4e6] * num_turns,
        "facts": {"collectives": 2, "version": "1"},
        **more,
    }


def rank_result(systems: dict[str, Any], num_turns: int = 2) -> dict[str, Any]:
    """What a rank brings back of a run with these systems and the bare model."""
    return {"num_params": 500_000, "systems": {"bare": played([20.0] * num_turns), **systems}}


def cell(*names: str, errors: dict[str, str] | None = None, num_turns: int = 2, **systems: Any) -> dict[str, Any]:
    result = rank_result({name.replace("_", "-"): report for name, report in systems.items()}, num_turns)
    timed = [[result, result]]
    return {
        "workload": "replay",
        "workload_title": "replay: layers",
        "num_params": 500_000,
        "ranks": 2,
        "link": "1gbit",
        "kind": "shaped",
        "device": "cpu",
        "conditions": {"date": "2026-01-01", "load_average": 0.5, "load_average_after": 0.7},
        "rows": rows_of_cell([SYSTEMS[name] for name in names], timed, errors or {}),
        "profiles": {},
    }
