"""The snippets of docs/checkpoints.md run, as they stand there, on two ranks."""

from __future__ import annotations

import ast
import contextlib
import re
from pathlib import Path

import pytest

from support.pages import Snippet, execute, snippets, titles
from support.project import ROOT
from support.ranks import in_ranks

PAGE = ROOT / "docs" / "checkpoints.md"
SNIPPETS = [snippet for snippet in snippets(PAGE) if snippet.mark == "two ranks"]  # tests/frameworks has the others


@in_ranks(2)
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.section)
def test_a_snippet_holds(tmp_path: Path, snippet: Snippet) -> None:
    with contextlib.chdir(tmp_path):
        execute(snippet)


def test_every_section_has_a_snippet_that_can_fail_and_is_in_the_contents() -> None:
    text = PAGE.read_text(encoding="utf-8")
    others = [snippet for snippet in snippets(PAGE) if snippet.mark == "with transformers"]
    assert text.count("```") == 2 * (len(SNIPPETS) + len(others))  # none has slipped through
    assert [snippet.section for snippet in SNIPPETS] == titles(text)
    assert all(any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(snippet.code))) for snippet in SNIPPETS)
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles(text)]
    assert re.findall(r"\]\(#([^)]*)\)", text) == anchors
