"""The commands of the guides: the programs read them as they stand there, and those that need no cluster run."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from support.cli import Undertow
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


@pytest.mark.deep
@pytest.mark.parametrize("command", list(commands("undertow")))
def test_the_simulator_runs_as_shown(command: str, undertow: Undertow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    code, printed, _ = undertow(command.removeprefix("undertow "))
    assert (code, printed == "") == (0, False)


@pytest.mark.parametrize("command", list(commands("torchrun")))
def test_torchrun_reads_the_command(command: str) -> None:
    read = parse_args(shlex.split(command)[1:])
    assert (read.nnodes, read.nproc_per_node, read.max_restarts, read.training_script) == ("2", "4", 3, "train.py")


@pytest.mark.parametrize("program", ["sbatch", "kubectl"])
def test_files_that_a_command_names_exist(program: str) -> None:
    """tests/frameworks/test_clusters.py and tests/faults/test_nodes.py test the files."""
    (command,) = commands(program)
    assert [word for word in shlex.split(command) if word.startswith("examples/") and not (ROOT / word).exists()] == []
