"""The snippets of docs/planning.md run, as they stand there."""

from __future__ import annotations

import ast
import re

import pytest

from support.pages import Snippet, execute, snippets, titles
from support.project import ROOT

PAGE, FIDELITY = ROOT / "docs" / "planning.md", ROOT / "docs" / "fidelity.md"


@pytest.mark.parametrize("snippet", [pytest.param(snippet, id=snippet.section) for snippet in snippets(PAGE)])
def test_a_snippet_holds(snippet: Snippet) -> None:
    execute(snippet)


def test_every_snippet_can_fail() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = list(snippets(PAGE))
    assert text.count("```") == 2 * len(found) > 0  # none has slipped through
    nodes = {snippet.line: [type(node) for node in ast.walk(ast.parse(snippet.code))] for snippet in found}
    assert [line for line in nodes if ast.Assert not in nodes[line]] == []


def test_what_torchs_buckets_expose_is_what_the_page_of_fidelity_has() -> None:
    rows = (row.split("|")[1:-1] for row in FIDELITY.read_text(encoding="utf-8").splitlines() if row.startswith("|"))
    ratios = {tuple(map(str.strip, cells[:2])): cells[-1].strip() for cells in rows}
    fast, faster, slow = ratios["56 Gb/s", "5"], ratios["100 Gb/s", "5"], float(ratios["10 GbE", "20"])
    said = f"exposes {fast} and {faster} times as much as our fewer buckets on 56 and 100 Gb/s, and {slow - 1:.0%} more on 10 GbE"
    assert said.replace("%", " %") in PAGE.read_text(encoding="utf-8")


def test_the_contents_lead_to_every_section() -> None:
    text = PAGE.read_text(encoding="utf-8")
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles(text)]
    assert re.findall(r"\]\(#([^)]*)\)", text) == anchors
