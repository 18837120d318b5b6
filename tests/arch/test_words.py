from __future__ import annotations

import re
from pathlib import Path

from support.project import ROOT, name_of

SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json"}
FOLDERS = ["src", "tests", "benchmarks", "examples", "docs", ".ci"]
# Places of one machine, and trackers that a reader of the repository cannot open. In brackets, so as not to find itself.
FOREIGN = re.compile(r"/w[o]rk/|/r[o]ot/|/h[o]me/|/o[p]t/|/t[m]p/bash|\bissue [0-9]+\b")


def project_files() -> list[Path]:
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in (*ROOT.iterdir(), *inside) if path.suffix in SUFFIXES or path.name in ("Makefile", "run"))


def test_files_speak_of_the_project_only() -> None:
    texts = {name_of(path): path.read_text() for path in project_files() if path.is_file()}
    assert {name: found for name, text in texts.items() if (found := FOREIGN.findall(text))} == {}
