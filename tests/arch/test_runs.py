"""Runs of pytest that must not pass for good ones (an unknown marker, an unexpected skip), and one that is interrupted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.project import ROOT

CONFTEST = """
import pytest
from support import selection

pytest_addoption, pytest_sessionfinish = selection.add_option, selection.fail_if_unexpected

def pytest_terminal_summary(terminalreporter):
    selection.summarize(terminalreporter)

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "slow(why): takes long")
    selection.require_known(config)
"""
TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.skipif(True, reason="needs a torch of cheese")
def test_is_lost():
    pass

@pytest.mark.parametrize("name", ["b", "a"])
@pytest.mark.slow(why="of the data")
def test_has_no_data(name):
    pytest.skip(f"{name}.json is not in data; UNDERTOW_PUBLISHED_DATA names another folder")
"""


STAYS = """
import os, time
from support.ranks import in_ranks

@in_ranks(2)
def test_stays():
    open(f"{os.getpid()}.rank", "w").close()
    time.sleep(600.0)
"""


def variables(**more: str) -> dict[str, str]:
    """An environment in which pytest finds what is in this folder's parent."""
    paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTEST_ADDOPTS": "", **more}


def run(directory: Path, *options: str) -> tuple[int, str]:
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(directory), *options, str(directory)]
    done = subprocess.run(command, cwd=directory, env=variables(), capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["in one process", "with a worker"])
def test_skips_are_listed_and_an_unexpected_one_fails_the_run_on_demand(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, text = run(tmp_path, "--no-unexpected-skips", *options)
    told = (
        "1 passed, 3 skipped",
        "    1  needs a torch of cheese  (UNEXPECTED)\n",
        "    1  a.json is not in data; UNDERTOW_PUBLISHED_DATA names another folder\n",
    )
    assert (code, [part for part in told if part not in text]) == (1, []), text


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-unexpected-skips", "-k", "not lost")], ids=["on demand only", "expected ones"])
def test_other_runs_that_skip_pass(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert run(tmp_path, *options)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expression", "code", "line"),
    [
        ("nosuchmarker", 4, "ERROR: -m names 'nosuchmarker', and no marker is called so. pytest --markers lists them."),
        ("not slo", 4, "ERROR: -m names 'slo', and no marker is called so. Did you mean 'slow'?"),
        ("slow(why='of the data') and parametrize or not (slow or skipif)", 0, "1 passed, 2 skipped, 1 deselected"),
    ],
)
def test_an_unknown_marker_is_a_line_and_exit_code_4(tmp_path: Path, expression: str, code: int, line: str) -> None:
    found, text = run(tmp_path, "-m", expression)
    assert (found, line in text) == (code, True), text


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["in one process", "with a worker"])
def test_an_interrupted_run_leaves_no_process_behind(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(STAYS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "conftest", "--rootdir", str(tmp_path), *options]
    how = {"cwd": tmp_path, "env": variables(INTERRUPTED=str(tmp_path)), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **how) as process:
        wait_until(lambda: len(list(tmp_path.glob("*.rank"))) == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == pytest.ExitCode.INTERRUPTED, process.stdout.read()
    its_own = {"INTERRUPTED": str(tmp_path)}.items()
    wait_until(lambda: not any(its_own <= (it.info["environ"] or {}).items() for it in psutil.process_iter(["environ"])))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
