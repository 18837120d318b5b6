"""Every block of the pages says in its first line how it runs, and runs so: as printed, in an empty folder."""

import ast
import builtins
import importlib.util
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from docs.test_snippets import FAILS, FILES, RANKS
from frameworks.recipes import require_installed
from support.pages import Snippet, snippets
from support.processes import example, free_port, run_ranks
from support.project import DOCS, ROOT
from support.warm import python

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
BLOCKS = [snippet for page in PAGES for snippet in snippets(page)]
SCRIPTS = [block for block in BLOCKS if block.language == "python"]
COMMAND = re.compile(r"# (?:torchrun --nproc-per-node=(\d) |python )((?:script|quickstart|slow)\.py.*)\n")
PART = re.compile(r"# Part of a script\.(?: It needs: ([\w, \n#]+)\.)?\n")
PATIENCE_S = 240.0
IN_RANKS_THAT_STAY = {str(path) for name, path in FILES.items() if name != "profiles"}
# These have tests of their own: the long tutorial with fewer steps, Ray's job, and the script over a slow link (test_start.py,
# tests/frameworks/test_ray.py, test_snippets.py).
ELSEWHERE = ("quickstart.py", "ray.train.torch", "slow.py")
# Of packages that tests have not.
FRAMEWORKS = {"lightning": "lightning", "accelerate": "accelerate", "transformers": "transformers"}


def id_of(block: Snippet) -> str:
    return f"{Path(block.page).stem}: {block.section}, {block.line}"


def free_names(code: str) -> list[str]:
    """The names that a block reads and does not make, in alphabetical order."""
    made, read = set(vars(builtins)), set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(ctx=ast.Load()):
                read.add(node.id)
            case ast.Name():
                made.add(node.id)
            case ast.Import() | ast.ImportFrom():
                made |= {(name.asname or name.name).split(".")[0] for name in node.names}
            case ast.FunctionDef() | ast.ClassDef():
                made.add(node.name)
            case ast.arg():
                made.add(node.arg)
    return sorted(read - made)


def files_of(script: Snippet) -> dict[str, str]:
    """The files that a script reads, from the blocks of the page; the lines above the script have to name each."""
    lines = Path(script.page).read_text(encoding="utf-8").splitlines()
    above = " ".join(lines[max(0, script.line - 5) : script.line - 1])
    names = re.findall(r'profile_from_file\("([\w./-]+\.json)"\)', script.code)
    assert [name for name in names if f"`{name}`" not in above] == [], "the page does not say which file the block needs"
    found = [snippet.code for snippet in snippets(Path(script.page)) if snippet.language == "json"]
    assert all(map(json.loads, found))
    return dict(zip(names, found, strict=False))


def run_as_printed(script: Snippet, folder: Path) -> tuple[int | None, str]:
    """Runs the command in the first line of the script; the exit code, and what is on stderr.

    Ranks are forked with torchrun's variables, but for scripts that fail and the one of the first page: torchrun takes longer.
    """
    command = COMMAND.match(script.code)
    assert command is not None
    num_ranks, rest = command.groups()
    name, *arguments = shlex.split(rest)
    (folder / name).write_text(script.code)
    for file, text in files_of(script).items():
        (folder / file).write_text(text)
    if num_ranks and script.mark != FAILS and Path(script.page).stem != "index":
        how = partial(example, folder / name, port=free_port(), folder=folder, arguments=arguments)
        ranks = run_ranks(how, int(num_ranks), is_script=True, patience_s=PATIENCE_S)
        return max((rank.exit_code or 0 for rank in ranks), key=abs), "\n".join(rank.log for rank in ranks)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks else []
    done = subprocess.run(
        [python(), *launch, name, *arguments],
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stderr


def as_printed() -> Iterator[Snippet]:
    """Of a page whose scripts tests/docs/test_snippets.py runs in ranks that stay, the first one."""
    seen: set[str] = set()
    for block in SCRIPTS:
        if not COMMAND.match(block.code) or "README" in block.page or any(name in block.code for name in ELSEWHERE):
            continue
        if block.mark not in RANKS or block.page not in IN_RANKS_THAT_STAY or block.page not in seen:
            yield block
        seen.add(block.page)


@pytest.mark.parametrize("block", SCRIPTS, ids=id_of)
def test_a_block_says_how_it_runs_or_what_it_needs(block: Snippet) -> None:
    part = PART.match(block.code)
    named = re.findall(r"\w+", part[1] or "") if part else []
    assert part or COMMAND.match(block.code), (
        "its first line: # torchrun ..., # python script.py, # Part of a script. It needs: ..."
    )
    assert sorted(named) == free_names(block.code)


@pytest.mark.parametrize("block", SCRIPTS, ids=id_of)
def test_a_script_with_ranks_makes_its_group(block: Snippet) -> None:
    """Ray and Lightning start their ranks themselves."""
    command = COMMAND.match(block.code)
    assert ("init_process_group(" in block.code) == (command is not None and command[1] is not None)


def test_every_block_has_a_language() -> None:
    known = {"python", "sh", "text", "json", "diff"}
    assert [id_of(block) for block in BLOCKS if block.language not in known] == []
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("```") == 2 * len(list(snippets(page))), page


@pytest.mark.slow
@pytest.mark.parametrize("script", list(as_printed()), ids=id_of)
def test_a_script_runs_as_printed(script: Snippet, tmp_path: Path) -> None:
    for name in re.findall(r"^(?:from|import) (\w+)", script.code, re.MULTILINE):
        if name in FRAMEWORKS:
            require_installed(name)
    code, said = run_as_printed(script, tmp_path)
    if script.mark == FAILS:
        shown = BLOCKS[BLOCKS.index(script) + 1].code.splitlines()[0]  # tests/docs/test_snippets.py compares the rest
        assert (code, shown in said) == (1, True), said
    else:
        assert code == 0, said


@pytest.mark.parametrize("block", [it for it in SCRIPTS if PART.match(it.code)], ids=id_of)
def test_the_modules_and_names_that_a_part_imports_exist(block: Snippet) -> None:
    """The other libraries of the migrations are not installed; tests of each feature run the other parts with stand-ins."""
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and importlib.util.find_spec((node.module or "").split(".")[0]) is not None:
            exec(compile(ast.Module([node], []), block.page, "exec"), {})
