"""Settings and fixtures of all tests."""

import contextlib
import gc
import multiprocessing
import shlex
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from support import selection, warm
from support.cli import Ended, Undertow
from support.ranks import RankPools, Ranks
from undertow.lab.cli import main

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=50, print_blob=True)
POOLS, SERVERS = RankPools(), contextlib.ExitStack()
gc.disable()  # until tests are collected: each time it would look through all of torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="products of two parameters but in slow tests, and more examples")
    selection.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    selection.require_known(config)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells have it for what they start in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist have those of the process that starts them
        SERVERS.enter_context(warm.servers())
        named = config.getoption("tx", None) or []
        config.option.tx = [f"popen//python={warm.python()}" if it == "popen" else it for it in named]
    # Workers, and the servers off which they fork ranks, are forked off one process that has torch.
    warm.start_new_interpreters()
    multiprocessing.set_executable(warm.python())
    settings.load_profile("thorough" if config.getoption("thorough") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_thorough = config.getoption("thorough")
    once = {item for item in items if not is_thorough or item.get_closest_marker("slow")}
    kept = selection.without_products(item for item in items if item in once)
    kept |= selection.without_products((item for item in items if item not in once), together=2)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted((item for item in items if item in kept), key=_place)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _place(item: pytest.Item) -> int:
    if item.get_closest_marker("timeout"):
        return 0  # tests with a time limit of their own take longest: begun last, they would run when all others are over
    mark = item.get_closest_marker("in_ranks")
    # Tests of one pool with a name stand side by side, so that few workers of pytest-xdist make that pool.
    return 1 if mark is not None and mark.kwargs["pool"] else 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("in_ranks")
    if mark is not None:
        metafunc.fixturenames.append("num_ranks")
        # A test with parameters of its own meets every number of ranks with some of their values; another one is for the first.
        further = [pytest.mark.deep] if metafunc.definition.get_closest_marker("parametrize") is None else []
        first, *others = mark.args
        sizes = [pytest.param(first), *(pytest.param(size, marks=further) for size in others)]
        metafunc.parametrize("num_ranks", sizes, ids=[f"{size} ranks" for size in mark.args])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("in_ranks")
    if mark is None:
        return None
    POOLS.run(pyfuncitem, pyfuncitem.callspec.params["num_ranks"], **mark.kwargs)
    return True


def pytest_unconfigure() -> None:
    POOLS.close()
    SERVERS.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    selection.fail_if_unexpected(session)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    selection.summarize(terminalreporter)


@pytest.fixture(scope="session")
def pools() -> RankPools:
    return POOLS


@pytest.fixture(scope="session")
def two_ranks() -> Ranks:
    return POOLS.of_size(2)


@pytest.fixture(scope="session")
def three_ranks() -> Ranks:
    return POOLS.of_size(3)


@pytest.fixture(scope="session")
def four_ranks() -> Ranks:
    return POOLS.of_size(4)


@pytest.fixture
def fresh_pair() -> Iterator[Ranks]:
    """Two ranks of the test's own, which may be left in any state."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def undertow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Undertow:
    """Calls the command with a line of arguments and more of them, in a terminal that is wide enough for all it prints."""

    def call(line: str, *more: object, columns: int = 200) -> Ended:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["undertow", *shlex.split(line), *map(str, more)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code, *capsys.readouterr())  # type: ignore[arg-type]

    return call
