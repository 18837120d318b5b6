"""The commands of all pages: programs read them as they stand there, and those that need no cluster run."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import typer
from torch.distributed.run import parse_args

from support.cli import Undertow
from support.pages import snippets
from support.project import DOCS, ROOT, SOURCES
from undertow.lab.cli.app import app
from undertow.lab.runner.command import main as run

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
TEXTS = {page: page.read_text(encoding="utf-8") for page in [*PAGES, *SOURCES]}
COMMANDS = [
    line
    for page in PAGES
    for block in snippets(page)
    if block.language == "sh"
    for line in re.sub(r"\\\n +", "", block.code).splitlines()
]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
# The file that the quickstart's demo has written before.
WRITTEN = "out/profile-undertow.json"


def words_of(command: str) -> list[str]:
    """Without variables, comments, and the folder of the quickstart's environment."""
    words = shlex.split(command, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]]


def those_of(program: str) -> list[str]:
    return sorted({command for command in COMMANDS if words_of(command)[0] == program})


def require_read(words: list[str]) -> None:
    """Raises unless the command `undertow` has these options."""
    if words[0] == "run":
        with mock.patch("os.execve") as started:
            run(words[1:])
        assert started.call_args.args[1][0] == words[1]
    else:
        typer.main.get_command(app).commands[words[0]].make_context(words[0], words[1:], resilient_parsing=True)


def test_every_command_is_tested() -> None:
    """tests/arch/test_wheel.py installs, and tests/frameworks runs the program of Ray."""
    programs = {words_of(command)[0] for command in COMMANDS}
    assert programs <= {"git", "make", "undertow", "torchrun", "sbatch", "kubectl", "python", "python3", "pip"}


@pytest.mark.parametrize("command", those_of("undertow"))
def test_undertow_reads_the_command(command: str) -> None:
    require_read(words_of(command)[1:])


@pytest.mark.deep
@pytest.mark.parametrize(
    "command", [it for it in those_of("undertow") if words_of(it)[1] in ("simulate", "links", "docs", "plan")]
)
def test_a_command_that_needs_no_ranks_runs_as_shown(
    command: str, undertow: Undertow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder, or in one that has what the page's command before it writes."""
    monkeypatch.chdir(tmp_path)
    if WRITTEN in command:
        Path(WRITTEN).parent.mkdir()
        Path(WRITTEN).write_bytes((ROOT / "examples" / "profiles" / "gpt2.json").read_bytes())
    code, printed, told = undertow(shlex.join(words_of(command)[1:]))
    assert (code, printed == "") == (0, False), told


@pytest.mark.parametrize("command", those_of("torchrun"))
def test_torchrun_reads_the_command(command: str) -> None:
    read = parse_args(words_of(command)[1:])
    assert (read.module, read.training_script) in ((False, "train.py"), (False, "quickstart.py"), (True, "undertow"))


@pytest.mark.parametrize("command", [*those_of("sbatch"), *those_of("kubectl"), *those_of("python")])
def test_files_that_a_command_names_exist(command: str) -> None:
    """tests/frameworks/test_clusters.py and tests/faults/test_nodes.py test the files."""
    assert [word for word in words_of(command) if word.startswith("examples/") and not (ROOT / word).exists()] == []


@pytest.mark.parametrize("command", those_of("make"))
def test_make_knows_its_targets(command: str) -> None:
    done = subprocess.run(["make", "-n", *words_of(command)[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout == "") == (0, False), done.stderr


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_extras_that_a_page_or_an_error_names_exist(page: Path) -> None:
    named = re.findall(r"pip install ['\"](?:undertow|\.)\[([\w,]+)\]", TEXTS[page])
    assert {extra for names in named for extra in names.split(",")} <= EXTRAS
