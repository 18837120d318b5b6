"""The search of the built site finds the right page first: the theme's own worker answers, in node."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.project import ROOT

NODE = shutil.which("node")
# The page that has to come first, and the section of it that has to be found.
FIRST = {
    "slurm": "several-nodes/#slurm",
    "kubernetes": "several-nodes/#kubernetes",
    "no_sync": "slow-networks/#gradient-accumulation-no_sync",
    "gradient accumulation": "slow-networks/#gradient-accumulation-no_sync",
    "EMA": "sharded-optimizer/#resume-and-ema",
    "NaN": "reliability/#nan-inf-and-replica-checks",
    "hang": "troubleshooting/#it-hangs",
    "install": "quickstart/#install",
    "checkpoint": "checkpoints/",
}


def run(*command: str | Path) -> str:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: make docs installs it")
@pytest.mark.skipif(NODE is None, reason="needs node, which is not installed")
def test_the_search_of_the_site_finds_the_right_page_first(tmp_path: Path) -> None:
    run(sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path)
    found = json.loads(run(NODE, ROOT / "tests" / "docs" / "search.js", tmp_path, *FIRST))
    firsts = {query: pages[0] if pages else [] for query, pages in found.items()}
    assert {query: firsts[query] for query, section in FIRST.items() if section not in firsts[query]} == {}
