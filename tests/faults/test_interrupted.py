"""Tests that are interrupted leave no processes and no namespaces."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from benchmarks.matrix.links import NAMESPACES, PREFIX, remove_abandoned

from support.project import ROOT

pytestmark, PATIENCE_S = pytest.mark.slow, 120.0
SIGNALS = (signal.SIGINT, signal.SIGKILL)


@contextlib.contextmanager
def lasting(name: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    path = Path(__file__).with_name("lasting.py")
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, f"{path}::{name}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    ) as tests:
        try:
            yield tests
        finally:
            tests.kill()


def awaited(tests: subprocess.Popen[bytes], look: Callable[[], Sequence[object]]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not look():
        assert tests.poll() is None, "the tests have ended"
        assert time.monotonic() < until_s, "nothing has been found"
        time.sleep(0.05)


def stopped(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.status() == psutil.STATUS_STOPPED]


@pytest.mark.parametrize(
    ("number", "name", "options"),
    [
        (signal.SIGKILL, "test_with_a_rank_that_is_stopped", ()),
        (signal.SIGINT, "test_with_ranks_of_a_pool", ("-n", "1")),
    ],
)
def test_interrupted_tests_leave_no_process(number: signal.Signals, name: str, options: tuple[str, ...]) -> None:
    """Not even one that is stopped."""
    with lasting(name, *options) as tests:
        of_tests = psutil.Process(tests.pid)
        awaited(tests, lambda: stopped(of_tests.children(recursive=True)))
        processes = of_tests.children(recursive=True)
        assert len(processes) >= 3  # two ranks, and the server that they are forked off
        tests.send_signal(number)
        tests.wait(PATIENCE_S)
        assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
    assert number is not signal.SIGINT or tests.returncode == pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.root
@pytest.mark.usefixtures("needs_namespaces")
def test_interrupted_tests_leave_no_namespace(number: signal.Signals) -> None:
    """Those of tests that are killed go when the next ones begin."""
    with lasting("test_with_namespaces") as tests:

        def namespaces() -> list[str]:
            return [path.name for path in NAMESPACES.glob(f"{PREFIX}{tests.pid}-*")]

        awaited(tests, lambda: stopped([psutil.Process(tests.pid)]))
        assert namespaces()
        tests.send_signal(number)
        tests.send_signal(signal.SIGCONT)
        tests.wait(PATIENCE_S)
        if number is signal.SIGKILL:
            assert remove_abandoned()[1] is None
        assert namespaces() == []
