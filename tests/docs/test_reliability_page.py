"""The settings of docs/reliability.md work, and its table is of tests that there are; tests/unit has its quotes of errors."""

import re

from support.pages import execute, snippets
from support.project import ROOT

PAGE = ROOT / "docs" / "reliability.md"


def test_the_settings_of_the_page_work() -> None:
    codes = [snippet for snippet in snippets(PAGE) if snippet.language == "python"]
    assert len(codes) == 2
    for snippet in codes:
        execute(snippet)


def test_every_test_of_the_table_exists_and_took_less_than_ten_seconds() -> None:
    pattern = r"^\| .* \| `\w+` \| [\d.]+ \| ([\d.]+) \| \d+ \| `(test_\w+)` \|$"
    rows = re.findall(pattern, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "faults").glob("*.py"))
    assert len(rows) > 15
    assert [test for _, test in rows if f"def {test}(" not in tests] == []
    assert max(float(worst) for worst, _ in rows) < 10.0
