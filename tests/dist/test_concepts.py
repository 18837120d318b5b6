"""The snippets of docs/concepts.md run, as they stand there."""

from __future__ import annotations

import ast
import re

import pytest
import torch

from support.pages import Snippet, execute, snippets, titles
from support.project import ROOT
from support.ranks import Ranks

PAGE = ROOT / "docs" / "concepts.md"
TWO_RANKS, FOUR_RANKS, NEEDS_A_GPU = "two ranks", "four ranks", "needs a GPU"


def of_mark(*marks: str) -> list[object]:
    """The snippets under one of these marks, each with its section as the test's id."""
    needs_device = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    return [
        pytest.param(snippet, id=snippet.section, marks=needs_device if snippet.mark == NEEDS_A_GPU else ())
        for snippet in snippets(PAGE)
        if snippet.mark in marks
    ]


@pytest.mark.parametrize("snippet", of_mark("", NEEDS_A_GPU))
def test_a_snippet_of_one_process_holds(snippet: Snippet) -> None:
    execute(snippet)


@pytest.mark.parametrize("snippet", of_mark(TWO_RANKS))
def test_a_snippet_of_two_ranks_holds(two_ranks: Ranks, snippet: Snippet) -> None:
    two_ranks.run(execute, snippet)


@pytest.mark.parametrize("snippet", of_mark(FOUR_RANKS))
def test_a_snippet_of_four_ranks_holds(four_ranks: Ranks, snippet: Snippet) -> None:
    four_ranks.run(execute, snippet)


def test_every_section_has_a_snippet_and_every_snippet_can_fail() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = list(snippets(PAGE))
    assert text.count("```") == 2 * len(found)  # none has slipped through
    assert {snippet.section for snippet in found} == set(titles(text))
    assert {snippet.language for snippet in found} == {"python"}
    assert {snippet.mark for snippet in found} == {"", TWO_RANKS, FOUR_RANKS, NEEDS_A_GPU}
    nodes = {snippet.line: [type(node) for node in ast.walk(ast.parse(snippet.code))] for snippet in found}
    assert [line for line in nodes if ast.Assert not in nodes[line]] == []


def test_the_contents_lead_to_every_section() -> None:
    text = PAGE.read_text(encoding="utf-8")
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles(text)]
    assert re.findall(r"\]\(#([^)]*)\)", text) == anchors
