"""The snippets of docs/migration.md run or at least parse, and its tables are complete as far as torch can tell."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from support.pages import Snippet, execute, snippets, titles
from support.project import ROOT
from support.ranks import Ranks

PAGE = ROOT / "docs" / "migration.md"
TEXT = PAGE.read_text(encoding="utf-8")
SNIPPETS = list(snippets(PAGE))
BEFORE, TWO_RANKS = "before", "two ranks"


def of_mark(mark: str) -> list[object]:
    return [pytest.param(snippet, id=snippet.section) for snippet in SNIPPETS if snippet.mark == mark]


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def named_in(rows: Iterable[str]) -> set[str]:
    """What stands in the first column, every name in its own backticks."""
    return {name for row in rows for name in re.findall(r"`([^`]*)`", row.split(" | ")[0])}


def table_rows(text: str, title: str) -> list[str]:
    """The rows of the table with this title above its first column."""
    return text.split(f"| {title} | here |\n| --- | --- |\n")[1].split("\n\n")[0].splitlines()


def arguments_of(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


@pytest.mark.parametrize("snippet", of_mark(TWO_RANKS))
def test_what_is_written_afterwards_runs(two_ranks: Ranks, snippet: Snippet) -> None:
    two_ranks.run(execute, snippet)


def test_every_way_has_both_sides_and_its_after_can_fail() -> None:
    assert TEXT.count("```") == 2 * len(SNIPPETS)  # none has slipped through
    ways = [title for title in titles(TEXT) if title.startswith("From ")]
    assert [(snippet.section, snippet.mark) for snippet in SNIPPETS] == [
        (way, mark) for way in ways for mark in (BEFORE, TWO_RANKS)
    ]
    for snippet in SNIPPETS:
        nodes = {type(node) for node in ast.walk(ast.parse(snippet.code))}
        assert (ast.Assert in nodes) == (snippet.mark == TWO_RANKS)


def test_the_contents_lead_to_every_section() -> None:
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles(TEXT)]
    contents = TEXT.split("Contents: ")[1].split("\n\n")[0]
    assert re.findall(r"\]\(#([^)]*)\)", contents) == anchors


def test_every_argument_of_torchs_constructor_has_a_row() -> None:
    rows = table_rows(section("From torch's DistributedDataParallel"), "argument")
    assert named_in(rows) == arguments_of(nn.parallel.DistributedDataParallel)


def test_everything_of_fully_shard_has_a_row() -> None:
    text = section("From FSDP2")
    assert named_in(table_rows(text, "argument of `fully_shard`")) == arguments_of(fully_shard)
    assert [name for name in sorted(arguments_of(MixedPrecisionPolicy)) if f"`{name}`" not in text] == []
    methods = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert named_in(table_rows(text, "method of `FSDPModule`")) == methods
