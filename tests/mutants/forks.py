"""Mutants of code that is imported already, each in a fork of one pytest process: for tests that start no processes.

First all tests run once, in a fork too, with a probe ahead of each statement that a mutant changes.
"""

import ast
import gc
import json
import os
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mutants.places import Mutant
from mutants.running import Row, in_turns

LIMIT_S = 60  # of processor time, for all tests of a mutant
TEST_LIMIT_S, HANG_S = 10, 60  # of processor time, and of time, for one test if they are counted


class Forks:
    """A pytest plugin that runs, instead of all tests, those that reach a mutant until one fails; `tell` gets its row.

    If it counts, it runs all tests that reach a mutant, each in a fork, and the row has those that fail.
    """

    def __init__(
        self, root: Path, mutants: Sequence[Mutant], tell: Callable[[Row], object], *, most: int, jobs: int, counts: bool
    ) -> None:
        self._root, self._mutants, self._tell = root, mutants, tell
        self._most, self._jobs, self._counts = most, jobs, counts

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        recorded: list[tuple[str, float, list[int]]] = in_fork(lambda: self._record(items))[0]
        caught: Counter[str] = Counter()

        def row(number: int, mutant: Mutant) -> Row:
            costs = {test: seconds / (1 + caught[test]) for test, seconds, hits in recorded if number in hits}
            tests = in_turns(costs)
            tried = [items[test] for test in (tests if self._counts else tests[: self._most])]
            began_s = time.monotonic()
            found, code = in_fork(lambda: self._failing(mutant, tried))
            failing = found or []
            test = failing[0] if failing else ""
            caught[test] += 1
            failure = f"{code}: {test}" if test or code else ""
            seconds = round(time.monotonic() - began_s, 1)
            about_tests = {"unstable": [], "seconds": seconds, "reaching": len(tests), "tried": len(tried)}
            counted = {"failing": failing} if self._counts else {}
            return {"mutant": mutant._asdict(), "test": test, "failure": failure} | about_tests | counted

        with ThreadPoolExecutor(self._jobs) as pool:
            for done in pool.map(row, range(len(self._mutants)), self._mutants):
                self._tell(done)
        return True

    def _record(self, items: dict[str, pytest.Item]) -> list[tuple[str, float, list[int]]]:
        """Returns the sound tests, their seconds, and the numbers of the mutants that they reach."""
        hits: set[int] = set()
        for file in {mutant.file for mutant in self._mutants}:
            path = (self._root / file).resolve()
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for number, mutant in enumerate(self._mutants):
                if mutant.file == file:
                    add_probe(tree, mutant.line_in(self._root), number)
            exchange_code(path, compile(ast.fix_missing_locations(tree), str(path), "exec"), hit=hits.add)
        recorded = []
        for test, item in items.items():
            hits.clear()
            began_s = time.process_time()
            if not fails(item):
                recorded.append((test, time.process_time() - began_s, sorted(hits)))
        return recorded

    def _failing(self, mutant: Mutant, items: list[pytest.Item]) -> list[str]:
        """Returns the first test that fails, or all."""
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        path = (self._root / mutant.file).resolve()
        lines = path.read_text(encoding="utf-8").splitlines()
        lines[mutant.line_in(self._root) - 1] = mutant.after
        exchange_code(path, compile("\n".join(lines), str(path), "exec"))
        if self._counts:
            return [item.nodeid for item in items if in_fork(partial(fails_in_time, item))[0] is not False]
        return list(islice((item.nodeid for item in items if fails(item)), 1))


def fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False))


def fails_in_time(item: pytest.Item) -> bool:
    """Ends this process if the test runs for too long, or hangs."""
    resource.setrlimit(resource.RLIMIT_CPU, (TEST_LIMIT_S, TEST_LIMIT_S))
    signal.alarm(HANG_S)
    return fails(item)


def in_fork(call: Callable[[], Any]) -> tuple[Any, int]:
    """Returns the result of `call` in a fork, None if it has none, and the exit code."""
    said, say = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            with os.fdopen(say, "w") as file:
                json.dump(call(), file)
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(say)
    with os.fdopen(said) as file:
        text = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return json.loads(text) if text else None, code


def add_probe(tree: ast.Module, line: int, number: int) -> None:
    """Calls `_hit(number)` ahead of the innermost statement of that line."""
    bodies = [getattr(node, name, None) for node in ast.walk(tree) for name in ("body", "orelse", "finalbody")]
    around = [
        (statement.end_lineno - statement.lineno, -statement.lineno, place, body)
        for body in bodies
        if isinstance(body, list)
        for place, statement in enumerate(body)
        if statement.lineno <= line <= statement.end_lineno and not isinstance(statement, ast.FunctionDef)
    ]
    *_, place, body = min(around, key=lambda each: each[:2])
    body[place:place] = ast.parse(f"_hit({number})").body


def exchange_code(path: Path, code: CodeType, *, hit: object = None) -> None:
    """Gives all functions of a file the code that they have in another version of it."""
    new = {key(inner): inner for inner in codes_in(code)}
    gc.unfreeze()  # to find all functions
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename == str(path):
            function.__globals__["_hit"] = hit
            function.__code__ = new[key(function.__code__)]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_in(inner)


def key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno
