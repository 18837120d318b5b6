import os
import re
import subprocess
from collections import Counter

import pytest

from support.project import ROOT
from support.warm import python
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


def test_the_readme_and_the_page_on_torchs_class_give_the_recorded_numbers() -> None:
    recorded, readme = record.read(), (ROOT / "README.md").read_text(encoding="utf-8")
    num_of = Counter(each.result for each in recorded.values())
    num_run = num_of["pass"] + num_of["fail"]
    assert f" {num_of['pass']} of the {num_run} tests" in readme
    page = (ROOT / "docs/migration/torch-ddp.md").read_text(encoding="utf-8")
    text, *rows = page.split("## Torch's own tests\n")[1].split("\n## ")[0].split("\n|")
    assert re.findall(r"(\d+) (?:tests|of them)|these (\d+)|: (\d+) pass", text) == [
        (str(len(recorded)), "", ""),
        (str(num_run), "", ""),
        ("", str(num_run), ""),
        ("", "", str(num_of["pass"])),
    ]
    of_reasons = Counter((each.result, each.why) for each in recorded.values())
    assert sorted(int(row.split("|")[1]) for row in rows[2:]) == sorted(of_reasons.values())
    failing = {name for name, each in recorded.items() if each.result == "fail"}
    assert set(re.findall(r"`(test_\w+)`", "".join(rows))) == failing


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchs_own_tests_have_the_recorded_results() -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run([python(), "-m", "torch_suite"], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
