"""The snippets of the pages run as they stand there, and what the pages quote and list is what the library and torch have."""

import ast
import contextlib
import importlib
import inspect
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from support.pages import Snippet, execute, snippets, titles
from support.project import DOCS, ROOT, SOURCES
from support.ranks import Ranks
from support.warm import python
from undertow import UndertowError
from undertow.lab.profile import FIELDS, PARAM_FIELDS, profile_from_file, profile_from_json

RANKS = {"two ranks": "two_ranks", "three ranks": "three_ranks", "four ranks": "four_ranks"}
FAILS, SCRIPT, BEFORE = "two ranks, fails", "script", "before"
# What becomes of each library has a page, which shows a script before and after.
LIBRARIES = [f"migration/{name}" for name in ("torch-ddp", "megatron", "deepspeed", "fsdp2", "horovod")]
FILES = {
    name: ROOT / "docs" / f"{name}.md"
    for name in (
        *("concepts", *LIBRARIES, "sharded-optimizer", "report", "uneven-data", "reproducibility", "slow-networks"),
        *("troubleshooting", "profiles", "reliability", "traces"),
    )
}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
SNIPPETS = {name: list(snippets(path)) for name, path in FILES.items()}
TROUBLES = TEXTS["troubleshooting"]
(EXAMPLE,) = (snippet for snippet in SNIPPETS["profiles"] if snippet.language == "json")
FINGERPRINT = re.compile(r"fingerprint [0-9a-f]{4}")  # other settings, and versions of torch, have other ones
# Texts that are cut at the ends of lines are whole here.
SOURCE = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in SOURCES))
# Of each page: the marks of its snippets in Python; those under which a snippet asserts something; its contents, if any.
PAGES: dict[str, tuple[set[str], set[str], str]] = {
    "concepts": (
        {"two ranks", "four ranks"},
        {"two ranks", "four ranks"},
        TEXTS["concepts"].split("Contents: ")[1].split("\n\n")[0],
    ),
    "sharded-optimizer": ({"two ranks", "four ranks"}, {"two ranks", "four ranks"}, ""),
    "report": ({"two ranks"}, {"two ranks"}, ""),
    "uneven-data": ({"two ranks"}, {"two ranks"}, ""),
    "reproducibility": ({"three ranks"}, {"three ranks"}, ""),
    "troubleshooting": (
        {"two ranks", FAILS, SCRIPT},
        {"two ranks"},
        TROUBLES.split("Contents: ")[1].split("\n\n")[0],
    ),
}


def with_ids(page: str, pairs: Iterable[tuple[Snippet, ...]], marks: Iterable[str]) -> list[object]:
    return [
        pytest.param(*pair, id=f"{page}: {pair[0].section}, {pair[0].line}")
        for pair in pairs
        if pair[0].mark in marks and pair[0].language == "python"
    ]


def run(snippet: Snippet, directory: Path) -> None:
    with contextlib.chdir(directory):
        execute(snippet)  # whose names stay in the rank


@pytest.mark.parametrize(
    "snippet",
    # tests/docs/test_as_printed.py runs those of the profiles
    [
        it
        for page, found in SNIPPETS.items()
        if page != "profiles"
        for it in with_ids(page, zip(found, strict=True), ("", *RANKS))
    ],
)
def test_a_snippet_holds(
    request: pytest.FixtureRequest, snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if snippet.mark in RANKS:
        request.getfixturevalue(RANKS[snippet.mark]).run(run, snippet, tmp_path)
    else:
        execute(snippet)


def error_of(snippet: Snippet) -> str:
    try:
        execute(snippet)
    except UndertowError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("snippet", "quoted"), with_ids("troubleshooting", pairwise(SNIPPETS["troubleshooting"]), [FAILS]))
def test_a_snippet_fails_with_the_words_of_the_page(two_ranks: Ranks, snippet: Snippet, quoted: Snippet) -> None:
    said, told = (FINGERPRINT.sub("fingerprint", it) for it in (two_ranks.run(error_of, snippet)[0], quoted.code.rstrip("\n")))
    assert (quoted.language, said) == ("text", told)


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_the_script_of_the_page_prints_its_tables(tmp_path: Path) -> None:
    (snippet,) = (snippet for snippet in SNIPPETS["troubleshooting"] if snippet.mark == SCRIPT)
    script = tmp_path / "slow.py"
    assert "in range(40):" in snippet.code
    script.write_text(snippet.code.replace("in range(40):", "in range(8):"))  # of 0.6 s each
    launch = [python(), "-m", "torch.distributed.run", "--nproc-per-node=2", str(script), "25"]
    done = subprocess.run(
        launch,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, "Where a step goes: rank 0" in done.stdout, "bucket_cap_mb=25.0 is set" in done.stdout) == (
        0,
        True,
        True,
    ), done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_is_run_and_can_fail_and_contents_are_complete(page: str) -> None:
    marks, asserting, contents = PAGES[page]
    python = [snippet for snippet in SNIPPETS[page] if snippet.language not in ("text", "diff")]
    assert {(snippet.language, snippet.mark) for snippet in python} == {("python", mark) for mark in marks}
    nodes = {snippet.line: set(map(type, ast.walk(ast.parse(snippet.code)))) for snippet in python}
    assert [it.line for it in python if (ast.Assert in nodes[it.line]) != (it.mark in asserting)] == []
    assert not contents or re.findall(r"\]\(#([^)]*)\)", contents) == [
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles(TEXTS[page])
    ]


@pytest.mark.parametrize("page", LIBRARIES)
def test_every_migration_shows_both_sides(page: str) -> None:
    found = [(snippet.language, snippet.mark) for snippet in SNIPPETS[page] if snippet.language != "diff"]
    assert found == [("python", BEFORE), ("python", "two ranks")]
    assert "assert " in SNIPPETS[page][-1].code


def named_in(text: str, title: str) -> set[str]:
    """The first column of the table with this title above it, every name in its own backticks."""
    rows = text.split(f"| {title} | here |\n| --- | --- |\n")[1].split("\n\n")[0].splitlines()
    return {name for row in rows for name in re.findall(r"`([^`]*)`", row.split(" | ")[0])}


def arguments_of(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def test_everything_of_torchs_constructor_and_of_fully_shard_has_a_row() -> None:
    of_torch, of_fsdp = TEXTS["migration/torch-ddp"], TEXTS["migration/fsdp2"]
    assert (
        named_in(of_torch, "argument"),
        named_in(of_fsdp, "argument of `fully_shard`"),
        [name for name in sorted(arguments_of(MixedPrecisionPolicy)) if f"`{name}`" not in of_fsdp],
    ) == (arguments_of(nn.parallel.DistributedDataParallel), arguments_of(fully_shard), [])
    assert named_in(of_fsdp, "method of `FSDPModule`") == {name for name in vars(FSDPModule) if not name.startswith("_")}


def shown_in(page: str) -> set[str]:
    """The first column of a printed report."""
    return set(re.findall(r"^ *([a-z][a-z ]*?)  +\d+\.\d(?:  .*)?$", page, re.MULTILINE))


def test_the_reasons_of_a_plan_are_the_librarys() -> None:
    table = TROUBLES.split("| it says | because of |\n| --- | --- |\n")[1].split("\n\n")[0]
    quoted = [row.split("`")[1] for row in table.splitlines()]
    assert len(quoted) > 5
    assert [text for text in quoted if not all(part in SOURCE for part in text.split("..."))] == []


def test_the_rows_columns_and_advice_of_the_report_are_explained_and_are_the_librarys() -> None:
    page = TEXTS["report"]
    shown = shown_in(page)
    explained = {name for cells in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cells)}
    assert len(shown) == 8
    assert shown | {"MB", "ready", "launched", "done", "wire", "waited", "largest parameter +others"} <= explained
    assert [name for name in sorted(explained) if not any(f'"{indent}{name}"' in SOURCE for indent in ("", "  ", "    "))] == []
    quoted = re.findall(r"^> (.*)$", page, re.MULTILINE)
    assert len(quoted) == 9
    assert [text for text in quoted if not all(part in SOURCE for part in text.split("..."))] == []


def test_the_example_of_a_profile_is_written_as_we_write_it(tmp_path: Path) -> None:
    assert profile_from_json(EXAMPLE.code, "the example").to_json() == EXAMPLE.code
    (tmp_path / "example.json").write_text(EXAMPLE.code)
    assert profile_from_file(tmp_path / "example.json").num_ranks == 2


@pytest.mark.parametrize(("section", "fields"), [("The fields", FIELDS), ("A parameter", PARAM_FIELDS)])
def test_every_field_of_a_profile_has_a_row(section: str, fields: tuple[str, ...]) -> None:
    assert section in titles(TEXTS["profiles"])
    assert sorted(
        re.findall(r"^\| `([^`]*)`", TEXTS["profiles"].split(f"## {section}\n")[1].split("\n## ")[0], re.MULTILINE)
    ) == sorted(fields)


# The reference of docs/reference has every public name, and every one has something to say.


MODULES = ["undertow", "undertow.plan", "undertow.lab.cost", "undertow.lab.profile", "undertow.lab.simulate", "undertow.trace"]
SHOWN = [
    name
    for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_shown_once(module: str) -> None:
    assert sorted(
        [name for name in SHOWN if name.rpartition(".")[0] == module and name not in [*MODULES, "undertow.errors"]]
    ) == sorted({f"{module}.{name}" for name in importlib.import_module(module).__all__})


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    pages = [str(page.relative_to(ROOT / "docs")) for page in DOCS]
    assert sorted(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == pages


# The settings of docs/reliability.md work, and its table is of tests that there are; tests/unit has its quotes of errors.


def test_every_test_of_the_table_exists_and_took_less_than_ten_seconds() -> None:
    pattern = r"^\| .* \| `\w+` \| [\d.]+ \| ([\d.]+) \| \d+ \| `(test_\w+)` \|$"
    rows = re.findall(pattern, TEXTS["reliability"], re.MULTILINE)
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "faults").glob("*.py"))
    assert len(rows) > 7
    assert [test for worst, test in rows if f"def {test}(" not in tests or float(worst) >= 10.0] == []
