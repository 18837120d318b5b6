"""Cells of the benchmark matrix that take a moment."""

import multiprocessing.spawn
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.matrix.catalog import SYSTEMS, SystemSpec, workload_from_text
from benchmarks.matrix.cell import Cell, CellResult, Effort, measure_cell
from benchmarks.matrix.rows import rows_of_cell

from support.namespaces import needs_namespaces  # noqa: F401  # for the tests of this folder
from support.warm import python

SMALL = Effort(num_turns=1)
Rows = dict[str, dict[str, Any]]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has ranks forked off a process that has torch, instead of new interpreters."""
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(python()))


@pytest.fixture
def measure() -> Callable[..., Rows]:
    def measure_rows(
        *systems: str | SystemSpec,
        kind: str,
        link: str = "1gbit",
        name: str = "replay@0.01",
        effort: Effort = SMALL,
        num_ranks: int = 2,
    ) -> Rows:
        specs = tuple(SYSTEMS[system] if isinstance(system, str) else system for system in systems)
        place = {"workload": workload_from_text(name), "num_ranks": num_ranks, "link": link, "kind": kind}
        result: CellResult = measure_cell(Cell(**place, systems=specs, effort=effort), lambda _line: None)
        return {row["system"]: row for row in rows_of_cell(specs, result.timed, result.errors)}

    return measure_rows
