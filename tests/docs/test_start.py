"""The first pages of the documentation: their snippets and commands run; tables of figures are those that are recorded."""

import ast
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from benchmarks import figures

from support.pages import Snippet, snippets
from support.project import ROOT
from support.warm import python

NAMES = ("index", "quickstart", "faq", "comparison", "benchmarks", "studies")
TEXTS = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}
SNIPPETS = {name: list(snippets(ROOT / "docs" / f"{name}.md")) for name in NAMES}
ALL = [snippet for found in SNIPPETS.values() for snippet in found]
BLOCKS = [re.sub(r"\\\n +", "", it.code) for it in ALL if it.language == "sh"]
COMMANDS = [line.split("  ")[0] for block in BLOCKS for line in block.splitlines()]
(SCRIPT,) = (snippet for snippet in ALL if snippet.mark == "script")
TABLES = figures.tables()
TORCH = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
# Tests elsewhere run these, in forms that take less time: tests/arch/test_wheel.py, tests/dist/test_scripts.py, tests/bench.
INSTALLED = ["python3 -m venv .venv", ".venv/bin/pip install '.[cli,page]'"]
STARTED = [".venv/bin/torchrun --nproc-per-node=2 quickstart.py", ".venv/bin/undertow demo"]
SIMULATED = [
    ".venv/bin/undertow simulate out/profile-undertow.json --ranks 16 --link 25gbit",
    ".venv/bin/undertow simulate gpt2 --ranks 64 --per-node 8 --link 25gbit",
]


@pytest.mark.parametrize(
    "snippet", [it for it in ALL if it.mark == "two ranks"], ids=lambda it: f"{Path(it.page).stem}: {it.section}, {it.line}"
)
def test_a_snippet_can_fail(snippet: Snippet) -> None:
    """tests/docs/test_as_printed.py runs it."""
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(snippet.code)))


def test_no_snippet_or_command_has_slipped_through() -> None:
    assert {(it.language, it.mark) for it in ALL} == {("python", "two ranks"), ("python", "script"), ("text", ""), ("sh", "")}
    others = [it for it in COMMANDS if not it.startswith("make ")]
    assert sorted(others) == sorted([*INSTALLED, *STARTED, *SIMULATED])


@pytest.mark.slow
def test_the_quickstart_trains(tmp_path: Path) -> None:
    (tmp_path / "quickstart.py").write_text(SCRIPT.code)
    done = subprocess.run(
        [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "quickstart.py", "20"],
        cwd=tmp_path,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, (tmp_path / "quickstart.pt").exists()) == (0, True), done.stderr
    loss = re.search(r"step  20  loss (\d\.\d+)", done.stdout)
    assert loss is not None
    assert float(loss[1]) < 4.0  # a guess has 5.5
    assert "Where a step goes: rank 0" in done.stdout
    assert "The plan: " in done.stdout


@pytest.mark.parametrize(
    ("target", "extras"),
    {
        "demo": ["cli"],
        "test": ["test"],
        "test-all": ["test", "integrations"],
        "works-with": ["test", "integrations"],
        "lint": ["lint"],
        "docs": ["docs"],
        "bench": ["bench"],
    }.items(),
)
def test_a_target_installs_torch_alone_and_then_its_own_extras(target: str, extras: list[str], tmp_path: Path) -> None:
    command = ["make", "-n", f"VENV={tmp_path / 'none'}", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    installed = re.findall(r"-m pip .* (torch==\S+.*)$", done.stdout, re.MULTILINE)
    assert list(dict.fromkeys(installed)) == [TORCH, *(f"{TORCH} --editable '.[{extra}]'" for extra in extras)]


def test_pages_have_the_figures_that_make_figures_writes() -> None:
    assert figures.FIGURES.read_text(encoding="utf-8") == figures.text_of(TABLES)
    for page in figures.PAGES:
        assert page.read_text(encoding="utf-8") == figures.filled(page.read_text(encoding="utf-8"), TABLES), "run make figures"


def test_every_table_is_on_a_page_and_the_readme_begins_with_the_changed_import_alone() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in figures.PAGES)
    assert sorted(re.findall(r"<!-- figures: ([\w-]+) -->", text)) == sorted(TABLES)
    assert [line[1] for line in TABLES["readme"][:2]] == ["changed", "the import alone"]


def test_results_of_a_run_replace_those_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, run = tmp_path / "recorded.json", tmp_path / "bench.jsonl"
    recorded.write_text(json.dumps({"one": {"rows": [{"a": 0}]}, "other": {"rows": []}}))
    lines = [{"date": "today", "commit": "c0"}, {"part": "one", "a": 1}, {"part": "one", "a": 2}]
    run.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(figures, "RECORDED", recorded)
    figures.record(run)
    assert json.loads(recorded.read_text()) == {
        "one": {"date": "today", "commit": "c0", "rows": [{"a": 1}, {"a": 2}]},
        "other": {"rows": []},
    }


def test_three_pages_say_in_the_same_words_how_to_install() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (told,) = re.findall(r"Undertow needs Python .* Training needs neither\.", readme)
    assert [name for name in ("index", "quickstart") if told not in " ".join(TEXTS[name].split())] == []


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (len(text.splitlines()) <= 100, len(text.split()) <= 1200) == (True, True)
