from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.project import ROOT, name_of

SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json"}
FOLDERS = ["src", "tests", "benchmarks", "examples", "docs", ".ci"]
# Places of one machine, and trackers that a reader of the repository cannot open. In brackets, so as not to find itself.
FOREIGN = re.compile(r"/w[o]rk/|/r[o]ot/|/h[o]me/|/o[p]t/|/t[m]p/bash|\bissue [0-9]+\b")


def project_files() -> list[Path]:
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in (*ROOT.iterdir(), *inside) if path.suffix in SUFFIXES or path.name in ("Makefile", "run"))


@pytest.mark.parametrize("path", [path for path in project_files() if path.is_file()], ids=name_of)
def test_files_speak_of_the_project_only(path: Path) -> None:
    found = [line for line in path.read_text().splitlines() if FOREIGN.search(line)]
    assert found == []
