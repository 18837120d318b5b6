"""Runs a suite in copies of its tree: once to record what each test enters, and then against mutants."""

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mutants.blocks import HEADER_BYTES, MAX_TESTS, Block, blocks_of, write_probes
from mutants.places import Mutant

NO_FAILURE = (0, 5)  # exit codes of pytest: all tests have passed, there was none
IGNORED = shutil.ignore_patterns(".git", ".venv*", "out", "build", "__pycache__", ".*_cache", ".hypothesis")
USAGE = 4
HANG_S, LIMIT_S = 120, 900  # of a test, and of a call of pytest

Row = dict[str, Any]


class Tree:
    """A copy of a suite's tree. All processes that run there have its directory in their environment."""

    def __init__(self, root: Path, directory: Path, arguments: list[str]) -> None:
        self.directory, self.tree, self._arguments = directory, directory / "tree", arguments
        if not self.tree.exists():
            shutil.copytree(root, self.tree, ignore=IGNORED)

    def pytest(self, *arguments: str, limit_s: float | None = None) -> tuple[int | None, list[str]]:
        path = (self.tree / "src", self.tree / "tests", self.tree, Path(__file__).parents[1])
        temporary, mine = self.directory / "t", {"MUTANTS": str(self.directory), "COLUMNS": "300"}
        temporary.mkdir(exist_ok=True)
        environment = os.environ | mine | {"PYTHONPATH": os.pathsep.join(map(str, path)), "TMPDIR": str(temporary)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *self._arguments, *arguments]
        with (self.directory / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=self.tree, env=environment, stdout=log, stderr=log)
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            for left in psutil.process_iter(["environ"]):
                if (left.info["environ"] or {}).get("MUTANTS") == mine["MUTANTS"]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        left.kill()
        shutil.rmtree(temporary, ignore_errors=True)
        return code, (self.directory / "log").read_text(encoding="utf-8", errors="replace").splitlines()

    def first_failure(self, tests: list[str]) -> tuple[str, str]:
        """Returns the test that fails first, and how; a crash and an error of an import are failures without a test."""
        picked = self.directory / "picked"
        picked.write_text("\n".join(tests), encoding="utf-8")
        code, said = self.pytest("-x", f"--timeout={HANG_S}", f"@{picked}", limit_s=LIMIT_S)
        summary = "".join(line for line in said if line.startswith(("FAILED ", "ERROR ")))
        if code == USAGE and not summary:
            raise RuntimeError(f"pytest does not know what it is to do: {said[-5:]}")
        test = max((test for test in tests if f" {test} - " in f" {summary} - "), key=len, default="")
        return test, "" if code in NO_FAILURE else f"{code}: {summary}"

    def result(self, mutant: Mutant, tests: list[str]) -> Row:
        """Returns how the tests meet a mutant; it is caught when a test fails twice."""
        path, began_s, unstable = self.tree / mutant.file, time.monotonic(), []
        source = path.read_text(encoding="utf-8")
        mutant.apply(self.tree)
        while True:
            test, failure = self.first_failure(tests) if tests else ("", "")
            if not test or self.first_failure([test])[1]:
                break
            unstable.append(test)
            tests = tests[tests.index(test) + 1 :]
        path.write_text(source, encoding="utf-8")
        seconds = round(time.monotonic() - began_s, 1)
        return {"mutant": mutant._asdict(), "test": test, "failure": failure, "unstable": unstable, "seconds": seconds}


def record(root: Path, directory: Path, arguments: list[str]) -> None:
    tree = Tree(root, directory.absolute(), arguments)
    if not (directory / "hits").exists():
        write_probes(tree.tree, tree.directory / "hits")
    print(*tree.pytest("-p", "mutants.recorder")[1], sep="\n")


def run(root: Path, reach: Path, mutants: list[Mutant], arguments: list[str], *, most: int, jobs: int) -> Iterator[Row]:
    blocks = blocks_of(root)
    hits = np.memmap(reach / "hits", dtype=np.uint8, mode="r", offset=HEADER_BYTES, shape=(MAX_TESTS, len(blocks)))
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory, ThreadPoolExecutor(jobs) as pool:
        trees: queue.Queue[Tree] = queue.Queue()
        for number in range(jobs):
            tree = Tree(root, Path(directory, str(number)), arguments)
            trees.put(tree)
        collected = set(tree.pytest("--collect-only")[1])
        recorded = [(row, hits[at]) for at, row in enumerate(rows(reach / "tests.jsonl")) if row["test"] in collected]

        def result(mutant: Mutant) -> Row:
            tests = reaching(mutant, root, blocks, recorded)
            tree = trees.get()
            try:
                return tree.result(mutant, tests[:most]) | {"reaching": len(tests), "tried": len(tests[:most])}
            finally:
                trees.put(tree)

        yield from pool.map(result, mutants)


def reaching(mutant: Mutant, root: Path, blocks: list[Block], recorded: list[tuple[Row, Any]]) -> list[str]:
    """Returns the sound tests that enter the mutant's block: quick ones first that enter little besides its file.

    Of tests that differ by their parameters one goes first, and the others follow those of other functions.
    """
    line = mutant.line_in(root)
    of_file = [number for number, (file, *_) in enumerate(blocks) if file == mutant.file]
    around = [number for number in of_file if blocks[number][1] <= line <= blocks[number][2]]
    block = max(around, key=lambda number: blocks[number][1])
    entering = [(row, hits) for row, hits in recorded if hits[block] and row["passed"]]
    costs = {row["test"]: (0.1 + row["seconds"]) * hits.sum() / hits[of_file].sum() for row, hits in entering}
    return in_turns(costs)


def in_turns(costs: dict[str, float]) -> list[str]:
    """Returns the tests by their costs, one of each function first."""
    functions: dict[str, list[str]] = defaultdict(list)
    for test in sorted(costs, key=costs.__getitem__):
        functions[test.split("[")[0]].append(test)
    return [test for turn in zip_longest(*functions.values()) for test in turn if test is not None]


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
