"""The example of docs/profiles.md is a profile, and the snippets there run."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.pages import Snippet, execute, snippets, titles
from support.project import ROOT
from undertow.profile import profile_from_file, profile_from_json
from undertow.profile.reader import FIELDS, PARAM_FIELDS

PAGE = ROOT / "docs" / "profiles.md"
SNIPPETS = list(snippets(PAGE))
(EXAMPLE,) = (snippet for snippet in SNIPPETS if snippet.language == "json")


def test_the_example_is_written_as_we_write_it() -> None:
    assert profile_from_json(EXAMPLE.code, "the example").to_json() == EXAMPLE.code


@pytest.mark.parametrize(
    "snippet", [pytest.param(snippet, id=snippet.section) for snippet in SNIPPETS if snippet.language == "python"]
)
def test_a_snippet_holds(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("example.json").write_text(EXAMPLE.code)
    assert profile_from_file("example.json").num_ranks == 2
    execute(snippet)


def test_no_snippet_has_slipped_through() -> None:
    assert PAGE.read_text(encoding="utf-8").count("```") == 2 * len(SNIPPETS)


@pytest.mark.parametrize(("section", "fields"), [("The fields", FIELDS), ("A parameter", PARAM_FIELDS)])
def test_every_field_has_a_row(section: str, fields: tuple[str, ...]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert section in titles(text)
    part = text.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line.split("`")[1] for line in part.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(fields)
