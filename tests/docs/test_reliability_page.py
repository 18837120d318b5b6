"""What docs/reliability.md quotes is what the library says, and its table is of tests that there are."""

from __future__ import annotations

import re

from support.pages import snippets
from support.project import ROOT
from undertow.runtime import faults
from undertow.runtime.faults import State
from undertow.runtime.links import Table
from undertow.runtime.nonfinite import Finding
from undertow.runtime.replicas import mismatch

PAGE = ROOT / "docs" / "reliability.md"
TEXT = PAGE.read_text(encoding="utf-8")
QUOTED = [snippet.code.rstrip("\n") for snippet in snippets(PAGE) if snippet.language == "text"]
ERRORS = {text.partition(":")[0]: text for text in QUOTED}
BUCKET = "bucket 0 ('last.bias')"


def test_the_error_of_the_page_is_ours() -> None:
    error = faults.failed(1, "ValueError: row 7 has no label").error("synchronisation 118, rank 0")
    assert ERRORS["PeerFailed"] == f"PeerFailed: {error}"


def test_the_report_of_the_page_is_ours() -> None:
    asking = State(rank=0, step=3, doing="", waits_for=BUCKET, waited_s=30.0, stack=[])
    (quoted,) = (text for text in QUOTED if text.startswith("rank 0 has waited"))
    line = quoted.split("\n")[-1].strip()
    late = State(rank=1, step=3, doing="in the forward of 'norm'", waits_for="", waited_s=0.0, stack=[line])
    assert quoted == faults.stall_text(asking, {0: asking, 1: late}, {}, ranks=range(2))


def test_the_error_where_the_process_groups_timeout_is_over_is_ours() -> None:
    (told,) = (text for text in QUOTED if text.startswith("rank 0 has waited"))
    assert ERRORS["StallTimeout"] == f"StallTimeout: {faults.timed_out(0, told).error('synchronisation 3, rank 0')}"


def test_what_the_page_says_of_links_is_ours() -> None:
    fault = faults.unreachable([2], by=0, silent_s=5.2)
    assert ERRORS["RankLost"] == f"RankLost: {fault.error('synchronisation 118, rank 0')}"
    table = Table()
    for rank, to in enumerate(
        ({"10.77.0.2": [28.6, 0.0, True]}, {}, {"10.77.0.1": [0.7, 57.9, True], "10.77.0.2": [0.7, 59.0, True]})
    ):
        table.hear(rank, {"at": [f"10.77.0.{rank + 1}"], "to": to})
    table._due_s = 0.0
    assert table.warning() in QUOTED


def test_what_the_page_says_of_numbers_is_ours() -> None:
    finding = Finding(params=("last.bias",), ranks=(1,), where="synchronisation 118, bucket 0")
    assert ERRORS["NonFiniteGradient"] == f"NonFiniteGradient: {finding.error()}"
    where = "synchronisation 199; 1 of 6 parameters differ"
    assert ERRORS["ReplicaMismatch"] == f"ReplicaMismatch: {mismatch('last.weight', {0: 5, 1: 5, 2: 7}, where=where)}"


def test_the_settings_of_the_page_work() -> None:
    codes = [snippet.code for snippet in snippets(PAGE) if snippet.language == "python"]
    assert len(codes) == 2
    for code in codes:
        exec(compile(code, str(PAGE), "exec"), {})


def test_every_test_of_the_table_exists_and_took_less_than_ten_seconds() -> None:
    rows = re.findall(r"^\| .* \| `\w+` \| [\d.]+ \| ([\d.]+) \| \d+ \| `(test_\w+)` \|$", TEXT, re.MULTILINE)
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "faults").glob("*.py"))
    assert len(rows) > 15
    assert [test for _, test in rows if f"def {test}(" not in tests] == []
    assert max(float(worst) for worst, _ in rows) < 10.0
