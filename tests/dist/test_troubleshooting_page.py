"""The snippets of docs/troubleshooting.md run, and what it quotes is what the library says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from support.pages import Snippet, execute, snippets, titles
from support.project import ROOT, SOURCES
from support.ranks import Ranks
from undertow import UndertowError

PAGE = ROOT / "docs" / "troubleshooting.md"
TEXT = PAGE.read_text(encoding="utf-8")
SNIPPETS = list(snippets(PAGE))
TWO_RANKS, THREE_RANKS, FAILS, SCRIPT = "two ranks", "three ranks", "two ranks, fails", "script"
FINGERPRINT = re.compile(r"fingerprint [0-9a-f]{4}")  # other settings, and versions of torch, have other ones
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)


def of_mark(mark: str) -> list[object]:
    return [pytest.param(snippet, id=f"{snippet.section}, {snippet.line}") for snippet in SNIPPETS if snippet.mark == mark]


def failures() -> list[object]:
    """Each snippet that fails, with what the page says it says."""
    pairs = [(snippet, quoted) for snippet, quoted in pairwise(SNIPPETS) if snippet.mark == FAILS]
    return [pytest.param(snippet, quoted, id=f"{snippet.section}, {snippet.line}") for snippet, quoted in pairs]


def error_of(snippet: Snippet) -> str:
    """How the snippet ends on this rank; empty if well."""
    try:
        execute(snippet)
    except UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("snippet", of_mark(TWO_RANKS))
def test_a_snippet_of_two_ranks_holds(two_ranks: Ranks, snippet: Snippet) -> None:
    two_ranks.run(execute, snippet)


@pytest.mark.parametrize("snippet", of_mark(THREE_RANKS))
def test_a_snippet_of_three_ranks_holds(three_ranks: Ranks, snippet: Snippet) -> None:
    three_ranks.run(execute, snippet)


@pytest.mark.parametrize(("snippet", "quoted"), failures())
def test_a_snippet_fails_with_the_words_of_the_page(two_ranks: Ranks, snippet: Snippet, quoted: Snippet) -> None:
    assert quoted.language == "text"
    said, shown = (
        FINGERPRINT.sub("fingerprint", text) for text in (two_ranks.run(error_of, snippet)[0], quoted.code.rstrip("\n"))
    )
    assert said == shown


def test_the_script_of_the_page_prints_its_tables(tmp_path: Path) -> None:
    (snippet,) = (snippet for snippet in SNIPPETS if snippet.mark == SCRIPT)
    script = tmp_path / "slow.py"
    script.write_text(snippet.code.replace("range(40)", "range(3)"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script), "25"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Where a step goes: rank 0" in done.stdout
    assert "bucket_cap_mb=25.0 was asked for" in done.stdout


def test_every_snippet_is_run_and_can_fail() -> None:
    assert TEXT.count("```") == 2 * len(SNIPPETS)  # none has slipped through
    python = [snippet for snippet in SNIPPETS if snippet.language != "text"]
    assert {(snippet.language, snippet.mark) for snippet in python} == {
        ("python", mark) for mark in (TWO_RANKS, THREE_RANKS, FAILS, SCRIPT)
    }
    with_asserts = [any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(snippet.code))) for snippet in python]
    assert with_asserts == [snippet.mark in (TWO_RANKS, THREE_RANKS) for snippet in python]


def test_the_contents_lead_to_every_section() -> None:
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles(TEXT)]
    contents = TEXT.split("Contents: ")[1].split("\n\n")[0]
    assert re.findall(r"\]\(#([^)]*)\)", contents) == anchors


def test_the_rows_of_the_printed_reports_are_ours() -> None:
    rows = set(re.findall(r"^│ +([a-z][a-z ]*?) +│ +[\d.]+ │", TEXT, re.MULTILINE))
    assert len(rows) == 10
    assert [
        row for row in sorted(rows) if f'"{row}"' not in SOURCE and f'"  {row}"' not in SOURCE and f'"    {row}"' not in SOURCE
    ] == []


def test_the_reasons_of_a_plan_are_ours() -> None:
    table = TEXT.split("| it says | because of |\n| --- | --- |\n")[1].split("\n\n")[0]
    quoted = [row.split("`")[1] for row in table.splitlines()]
    assert len(quoted) > 8
    assert [text for text in quoted if not all(part in SOURCE for part in text.split("..."))] == []
