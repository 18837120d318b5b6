"""The scripts of the first pages run as they are printed: new interpreters in an empty folder, and no names but their own."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from support.pages import Snippet, snippets
from support.project import ROOT
from support.warm import python

PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("index", "faq", "profiles", "quickstart"))]
SCRIPTS = [snippet for page in PAGES for snippet in snippets(page) if snippet.language == "python"]
ALONE = "profiles.md"  # its scripts use no ranks
TRAINS = "script"  # the quickstart's, which tests/docs/test_start.py runs with fewer steps
pytestmark = pytest.mark.slow


def files_of(script: Snippet) -> dict[str, str]:
    """The files that a script reads, from the blocks of the page; the line above the script has to name each."""
    lines = Path(script.page).read_text(encoding="utf-8").splitlines()
    above = " ".join(lines[max(0, script.line - 5) : script.line - 1])
    names = re.findall(r'"([\w./-]+\.json)"', script.code)
    assert [name for name in names if f"`{name}`" not in above] == [], "the page does not say which file the block needs"
    found = [snippet.code for snippet in snippets(Path(script.page)) if snippet.language == "json"]
    assert all(map(json.loads, found))
    return dict(zip(names, found, strict=False))


@pytest.mark.parametrize(
    "script",
    [it for it in SCRIPTS if it.mark != TRAINS],
    ids=lambda it: f"{Path(it.page).stem}: {it.section}, {it.line}",
)
def test_a_script_runs_as_printed(script: Snippet, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script.code)
    for name, text in files_of(script).items():
        (tmp_path / name).write_text(text)
    launch = [] if Path(script.page).name == ALONE else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [python(), *launch, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_script_has_ranks_or_needs_none() -> None:
    """`init_process_group` tells: a block that makes no group runs alone."""
    assert len(SCRIPTS) == 8
    for script in SCRIPTS:
        assert ("init_process_group" in script.code) == (Path(script.page).name != ALONE), (script.page, script.line)
