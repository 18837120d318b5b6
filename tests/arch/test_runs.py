"""Runs of pytest that must not pass for good ones: a marker that nobody has, a skip that nobody expects."""

import os
import subprocess
from pathlib import Path

import pytest

from support.project import ROOT
from support.warm import python

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
    pytest.skip(f"no virtual environment {name}; make bench-peers makes it")
"""


def run(directory: Path, *options: str) -> tuple[int, str]:
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_it.py").write_text(TESTS)
    command = [python(), "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(directory), *options, str(directory)]
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["in one process", "with a worker"])
def test_skips_are_listed_and_an_unexpected_one_fails_the_run_on_demand(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, text = run(tmp_path, "--no-unexpected-skips", *options)
    told = (
        "1 passed, 3 skipped",
        "    1  needs a torch of cheese  (UNEXPECTED)\n",
        "    1  no virtual environment a; make bench-peers makes it\n",
    )
    assert (code, [part for part in told if part not in text]) == (1, []), text
