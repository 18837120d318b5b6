"""Tests that are killed leave no processes."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from support.project import ROOT

pytestmark, PATIENCE_S = pytest.mark.slow, 120.0


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


def started_by(tests: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All that has inherited the name of the folder of their servers; some have other parents."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            owner = Path(process.environ().get("WARM_PYTHONS", ""), "owner")
            if process.pid != tests.pid and owner.is_file() and owner.read_text() == str(tests.pid):
                found.append(process)
    return found


def test_killed_tests_leave_no_process() -> None:
    """Not even one that is stopped."""
    with lasting("test_with_a_rank_that_is_stopped") as tests:
        awaited(tests, lambda: stopped(started_by(tests)))
        processes = started_by(tests)
        assert len(processes) >= 3  # two ranks, and the server that they are forked off
        tests.kill()
        tests.wait(PATIENCE_S)
        assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
