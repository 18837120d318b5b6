"""Collects how long each fault took to be told; `--reliability PATH` writes them as a table."""

import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import pytest

from support import processes
from support.namespaces import needs_namespaces  # noqa: F401  # for the tests of this folder
from support.processes import Ended

Record = Callable[[str, Sequence[Ended]], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seed", default=0, type=int, help="of the faults that are injected at random")
    parser.addoption("--exits", default=1, type=int, help="how often the example runs, and has to end well")
    parser.addoption("--reliability", default=None, help="file that gets a table of the faults and of the seconds they took")


@pytest.fixture(scope="session", autouse=True)
def ends_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM ends the tests as Ctrl-C does, so that what they have started is ended and their namespaces are removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def soak_seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--soak-seed", default=0)


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str, str], list[float]]]:
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    path = request.config.getoption("--reliability", default=None)
    processes.PATIENCE = 1.0 if path else processes.PATIENCE  # what users wait for
    yield found
    if path is None:
        return
    rows = ["| fault | the others raise | median s | worst s | times | test |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for (fault, kind, test), seconds in found.items():
        rows.append(f"| {fault} | `{kind}` | {median(seconds):.2f} | {max(seconds):.2f} | {len(seconds)} | `{test}` |")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.fixture
def record(request: pytest.FixtureRequest, times: dict[tuple[str, str, str], list[float]]) -> Record:
    def note(fault: str, survivors: Sequence[Ended]) -> None:
        for outcome in survivors:
            times[fault, outcome.kind, request.node.originalname].append(outcome.seconds)

    return note
