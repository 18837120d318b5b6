"""The snippets of docs/planning.md and docs/profiles.md run, as they stand there; what else these pages say is so."""

import ast
import re
from pathlib import Path

import pytest

from support.pages import Snippet, execute, snippets, titles
from support.project import ROOT
from undertow.profile import profile_from_file, profile_from_json
from undertow.profile.reader import FIELDS, PARAM_FIELDS

PLANNING, PROFILES = (ROOT / "docs" / f"{name}.md" for name in ("planning", "profiles"))
FOUND = {page: list(snippets(page)) for page in (PLANNING, PROFILES)}
(EXAMPLE,) = (snippet for snippet in FOUND[PROFILES] if snippet.language == "json")
PYTHON = [snippet for page in FOUND for snippet in FOUND[page] if snippet.language == "python"]


@pytest.mark.parametrize("snippet", PYTHON, ids=lambda snippet: f"{Path(snippet.page).stem}: {snippet.section}")
def test_a_snippet_holds(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("example.json").write_text(EXAMPLE.code)
    execute(snippet)


@pytest.mark.parametrize("page", FOUND, ids=lambda page: page.stem)
def test_no_snippet_has_slipped_through(page: Path) -> None:
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(FOUND[page]) > 0


def test_every_snippet_on_planning_can_fail() -> None:
    nodes = {snippet.line: [type(node) for node in ast.walk(ast.parse(snippet.code))] for snippet in FOUND[PLANNING]}
    assert [line for line in nodes if ast.Assert not in nodes[line]] == []


def test_what_torchs_buckets_expose_is_what_the_page_of_fidelity_has() -> None:
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    rows = (row.split("|")[1:-1] for row in page.splitlines() if row.startswith("|"))
    ratios = {tuple(map(str.strip, cells[:2])): cells[-1].strip() for cells in rows}
    fast, faster, slow = ratios["56 Gb/s", "5"], ratios["100 Gb/s", "5"], float(ratios["10 GbE", "20"])
    said = f"exposes {fast} and {faster} times as much as our fewer buckets on 56 and 100 Gb/s, and {slow - 1:.0%} more on 10 GbE"
    assert said.replace("%", " %") in PLANNING.read_text(encoding="utf-8")


def test_the_contents_of_planning_lead_to_every_section() -> None:
    text = PLANNING.read_text(encoding="utf-8")
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles(text)]
    assert re.findall(r"\]\(#([^)]*)\)", text) == anchors


def test_the_example_of_a_profile_is_written_as_we_write_it(tmp_path: Path) -> None:
    assert profile_from_json(EXAMPLE.code, "the example").to_json() == EXAMPLE.code
    (tmp_path / "example.json").write_text(EXAMPLE.code)
    assert profile_from_file(tmp_path / "example.json").num_ranks == 2


@pytest.mark.parametrize(("section", "fields"), [("The fields", FIELDS), ("A parameter", PARAM_FIELDS)])
def test_every_field_of_a_profile_has_a_row(section: str, fields: tuple[str, ...]) -> None:
    text = PROFILES.read_text(encoding="utf-8")
    assert section in titles(text)
    part = text.split(f"## {section}\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `([^`]*)`", part, re.MULTILINE)) == sorted(fields)
