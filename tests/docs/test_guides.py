"""The commands of the guides: the programs read them as they stand there, and those that need no cluster run."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from support.pages import snippets
from support.project import ROOT

PAGES = ("several-nodes", "slow-networks")


def commands(program: str) -> Iterator[str]:
    for page in PAGES:
        for snippet in snippets(ROOT / "docs" / f"{page}.md"):
            if snippet.language == "sh":
                yield from (line for line in snippet.code.splitlines() if program in shlex.split(line))


def test_every_command_is_tested() -> None:
    shown = [
        line
        for page in PAGES
        for it in snippets(ROOT / "docs" / f"{page}.md")
        if it.language == "sh"
        for line in it.code.splitlines()
    ]
    assert sorted(shown) == sorted(line for name in ("undertow", "torchrun", "sbatch", "kubectl") for line in commands(name))


@pytest.mark.slow
@pytest.mark.parametrize("command", list(commands("undertow")))
def test_the_simulator_runs_as_shown(command: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout == "") == (0, False), done.stderr


@pytest.mark.parametrize("command", list(commands("torchrun")))
def test_torchrun_reads_the_command(command: str) -> None:
    read = parse_args(shlex.split(command)[1:])
    assert (read.nnodes, read.nproc_per_node, read.max_restarts, read.training_script) == ("2", "4", 3, "train.py")


@pytest.mark.parametrize("program", ["sbatch", "kubectl"])
def test_files_that_a_command_names_exist(program: str) -> None:
    """tests/frameworks/test_clusters.py and tests/faults/test_nodes.py test the files."""
    (command,) = commands(program)
    assert [word for word in shlex.split(command) if word.startswith("examples/") and not (ROOT / word).exists()] == []
