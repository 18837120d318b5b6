"""A pytest plugin that records how long each test takes, whether it passes, and by the probes which blocks it enters.

A test that has passed before is left out, so that a recording goes on where it stopped.
"""

import json
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from mutants.blocks import HEADER_BYTES, MAX_TESTS


class _Recorder:
    def __init__(self, directory: Path) -> None:
        self._path = directory / "tests.jsonl"
        self._path.touch()
        self._rows: list[dict[str, Any]] = [json.loads(line) for line in self._path.read_text().splitlines()]
        with (directory / "hits").open("r+b") as file:
            self._hits = mmap.mmap(file.fileno(), 0)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        passed = {row["test"] for row in self._rows if row["passed"]}
        items[:] = [item for item in items if item.nodeid not in passed]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        num_blocks = (len(self._hits) - HEADER_BYTES) // MAX_TESTS
        begin = HEADER_BYTES + len(self._rows) * num_blocks
        self._hits[begin : begin + num_blocks] = bytes(num_blocks)  # of a test that was interrupted
        self._hits[:HEADER_BYTES] = begin.to_bytes(HEADER_BYTES, "little")
        self._rows.append({"test": nodeid, "seconds": 0.0, "passed": True})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._rows[-1]["seconds"] += report.duration
        self._rows[-1]["passed"] &= not report.failed

    def pytest_runtest_logfinish(self) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(self._rows[-1]) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(Path(os.environ["MUTANTS"])))
