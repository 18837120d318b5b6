"""The snippets of docs/checkpoints.md run, as they stand there, on two ranks."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from support.pages import Snippet, execute, snippets, titles
from support.project import ROOT
from support.ranks import Ranks

PAGE = ROOT / "docs" / "checkpoints.md"


def execute_in(snippet: Snippet, folder: Path) -> None:
    before = os.getcwd()
    os.chdir(folder)
    try:
        execute(snippet)
    finally:
        os.chdir(before)


SNIPPETS = [snippet for snippet in snippets(PAGE) if snippet.mark == "two ranks"]  # tests/frameworks has the others


@pytest.mark.parametrize("snippet", [pytest.param(snippet, id=snippet.section) for snippet in SNIPPETS])
def test_a_snippet_holds(two_ranks: Ranks, tmp_path: Path, snippet: Snippet) -> None:
    two_ranks.run(execute_in, snippet, tmp_path)


def test_every_section_has_a_snippet_that_can_fail_and_is_in_the_contents() -> None:
    text = PAGE.read_text(encoding="utf-8")
    others = [snippet for snippet in snippets(PAGE) if snippet.mark == "with transformers"]
    assert text.count("```") == 2 * (len(SNIPPETS) + len(others))  # none has slipped through
    assert [snippet.section for snippet in SNIPPETS] == titles(text)
    assert all(any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(snippet.code))) for snippet in SNIPPETS)
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles(text)]
    assert re.findall(r"\]\(#([^)]*)\)", text) == anchors
