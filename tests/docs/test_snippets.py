"""The snippets of the pages run as they stand there, and what the pages quote and list is what the library and torch have."""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from support.pages import Snippet, execute, snippets, titles
from support.project import ROOT, SOURCES
from support.ranks import Ranks
from undertow import UndertowError

RANKS = {"two ranks": "two_ranks", "three ranks": "three_ranks", "four ranks": "four_ranks"}
GPU, FAILS, SCRIPT, BEFORE = "needs a GPU", "two ranks, fails", "script", "before"
FILES = {name: ROOT / "docs" / f"{name}.md" for name in ("concepts", "migration", "troubleshooting")}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
SNIPPETS = {name: list(snippets(path)) for name, path in FILES.items()}
MIGRATION, TROUBLES = TEXTS["migration"], TEXTS["troubleshooting"]
FINGERPRINT = re.compile(r"fingerprint [0-9a-f]{4}")  # other settings, and versions of torch, have other ones
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
# Of each page: the marks of its snippets in Python; those under which a snippet asserts something; its contents.
PAGES: dict[str, tuple[set[str], set[str], str]] = {
    "concepts": ({"", "two ranks", "four ranks", GPU}, {"", "two ranks", "four ranks", GPU}, TEXTS["concepts"]),
    "migration": ({BEFORE, "two ranks"}, {"two ranks"}, MIGRATION.split("Contents: ")[1].split("\n\n")[0]),
    "troubleshooting": (
        {"two ranks", "three ranks", FAILS, SCRIPT},
        {"two ranks", "three ranks"},
        TROUBLES.split("Contents: ")[1].split("\n\n")[0],
    ),
}
NEEDS_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def with_ids(page: str, pairs: Iterable[tuple[Snippet, ...]], marks: Iterable[str]) -> list[object]:
    return [
        pytest.param(*pair, id=f"{page}: {pair[0].section}, {pair[0].line}", marks=NEEDS_A_GPU if pair[0].mark == GPU else ())
        for pair in pairs
        if pair[0].mark in marks and pair[0].language == "python"
    ]


def run(snippet: Snippet) -> None:
    execute(snippet)  # whose names stay in the rank


@pytest.mark.parametrize(
    "snippet", [it for page, found in SNIPPETS.items() for it in with_ids(page, zip(found, strict=True), ("", GPU, *RANKS))]
)
def test_a_snippet_holds(request: pytest.FixtureRequest, snippet: Snippet) -> None:
    if snippet.mark in RANKS:
        request.getfixturevalue(RANKS[snippet.mark]).run(run, snippet)
    else:
        execute(snippet)


def error_of(snippet: Snippet) -> str:
    try:
        execute(snippet)
    except UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("snippet", "quoted"), with_ids("troubleshooting", pairwise(SNIPPETS["troubleshooting"]), [FAILS]))
def test_a_snippet_fails_with_the_words_of_the_page(two_ranks: Ranks, snippet: Snippet, quoted: Snippet) -> None:
    said = two_ranks.run(error_of, snippet)[0]
    assert quoted.language == "text"
    assert FINGERPRINT.sub("fingerprint", said) == FINGERPRINT.sub("fingerprint", quoted.code.rstrip("\n"))


@pytest.mark.slow
def test_the_script_of_the_page_prints_its_tables(tmp_path: Path) -> None:
    (snippet,) = (snippet for snippet in SNIPPETS["troubleshooting"] if snippet.mark == SCRIPT)
    script = tmp_path / "slow.py"
    script.write_text(snippet.code.replace("range(40)", "range(3)"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script), "25"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Where a step goes: rank 0" in done.stdout
    assert "bucket_cap_mb=25.0 was asked for" in done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_is_run_and_can_fail_and_contents_are_complete(page: str) -> None:
    marks, asserting, contents = PAGES[page]
    assert TEXTS[page].count("```") == 2 * len(SNIPPETS[page])  # none has slipped through
    python = [snippet for snippet in SNIPPETS[page] if snippet.language != "text"]
    assert {(snippet.language, snippet.mark) for snippet in python} == {("python", mark) for mark in marks}
    nodes = {snippet.line: set(map(type, ast.walk(ast.parse(snippet.code)))) for snippet in python}
    assert [it.line for it in python if (ast.Assert in nodes[it.line]) != (it.mark in asserting)] == []
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles(TEXTS[page])]
    assert re.findall(r"\]\(#([^)]*)\)", contents) == anchors


def test_concepts_have_a_snippet_each_and_every_way_of_migrating_has_both_sides() -> None:
    assert {snippet.section for snippet in SNIPPETS["concepts"]} == set(titles(TEXTS["concepts"]))
    ways = [title for title in titles(MIGRATION) if title.startswith("From ")]
    sides = [(snippet.section, snippet.mark) for snippet in SNIPPETS["migration"]]
    assert sides == [(way, mark) for way in ways for mark in (BEFORE, "two ranks")]


# The first column of the table with this title above it, every name in its own backticks.
def named_in(text: str, title: str) -> set[str]:
    rows = text.split(f"| {title} | here |\n| --- | --- |\n")[1].split("\n\n")[0].splitlines()
    return {name for row in rows for name in re.findall(r"`([^`]*)`", row.split(" | ")[0])}


def arguments_of(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def test_everything_of_torchs_constructor_and_of_fully_shard_has_a_row() -> None:
    of_torch, of_fsdp = (
        MIGRATION.split(f"\n## {title}\n")[1].split("\n## ")[0]
        for title in ("From torch's DistributedDataParallel", "From FSDP2")
    )
    assert named_in(of_torch, "argument") == arguments_of(nn.parallel.DistributedDataParallel)
    assert named_in(of_fsdp, "argument of `fully_shard`") == arguments_of(fully_shard)
    assert [name for name in sorted(arguments_of(MixedPrecisionPolicy)) if f"`{name}`" not in of_fsdp] == []
    methods = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert named_in(of_fsdp, "method of `FSDPModule`") == methods


def test_the_rows_of_printed_reports_and_the_reasons_of_a_plan_are_the_librarys() -> None:
    rows = set(re.findall(r"^│ +([a-z][a-z ]*?) +│ +[\d.]+ │", TROUBLES, re.MULTILINE))
    assert len(rows) == 10
    assert [row for row in sorted(rows) if not any(f'"{indent}{row}"' in SOURCE for indent in ("", "  ", "    "))] == []
    table = TROUBLES.split("| it says | because of |\n| --- | --- |\n")[1].split("\n\n")[0]
    quoted = [row.split("`")[1] for row in table.splitlines()]
    assert len(quoted) > 8
    assert [text for text in quoted if not all(part in SOURCE for part in text.split("..."))] == []
