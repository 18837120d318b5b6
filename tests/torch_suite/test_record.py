import os
import re
import subprocess
import sys

import pytest

from support.project import ROOT
from torch_suite import record
from torch_suite.record import Expected

EXPECTED = {"a": Expected("pass", ""), "b": Expected("fail", "torch demands an error")}


@pytest.mark.parametrize(
    ("name", "result", "line"),
    [
        ("a", "pass", ""),
        ("a", "fail", "a: fail; recorded is pass"),
        ("b", "pass", "b passes now; it is recorded as a failure: torch demands an error"),
        ("c", "pass", "c is not in expected.txt: record its result (pass), or leave it out and say why"),
    ],
)
def test_a_result_that_is_not_the_recorded_one_is_told(name: str, result: str, line: str) -> None:
    assert record.difference(name, result, EXPECTED) == line


def test_a_recorded_test_that_torch_does_not_have_is_told() -> None:
    assert record.missing({"a", "c"}, EXPECTED) == ["b is recorded, and this torch does not have it"]


def test_whatever_does_not_pass_has_its_reason() -> None:
    recorded = record.read()
    assert (
        {each.result for each in recorded.values()},
        [name for name, each in recorded.items() if (each.result == "pass") == bool(each.why)],
    ) == ({"pass", "fail", record.LEFT_OUT}, [])


def test_the_readme_gives_the_recorded_numbers() -> None:
    results = [each.result for each in record.read().values()]
    num_passed, num_run = results.count("pass"), len(results) - results.count(record.LEFT_OUT)
    assert re.search(rf"\b{num_passed} of the {num_run}\b", (ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchs_own_tests_have_the_recorded_results() -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run([sys.executable, "-m", "torch_suite"], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
