"""The pages for those who change the library name only what exists."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.project import ROOT, SOURCES
from undertow.schedule import HYBRID, lower_data_parallel

ARCHITECTURE = ROOT / "docs" / "architecture.md"
DESIGN = ROOT / "docs" / "design"
PACKAGE = ROOT / "src" / "undertow"
PAGES = [ARCHITECTURE, *sorted(DESIGN.glob("*.md"))]
WORDS = {word for path in SOURCES for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
# Each page that shows a schedule, and the whole of it.
SCHEDULES = {
    ARCHITECTURE: lower_data_parallel(2),
    DESIGN / "sharded-optimizer.md": lower_data_parallel(2, HYBRID),
}


def members_of(cls: ast.ClassDef) -> Iterator[str]:
    """Methods and fields of a class, members of an enum, and attributes that its methods set."""
    for node in cls.body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    for node in ast.walk(cls):
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


@functools.cache
def classes() -> dict[str, tuple[set[str], list[str]]]:
    """The members of each class of the library, and the names of its bases."""
    found = dict[str, tuple[set[str], list[str]]]()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                members, bases = found.setdefault(node.name, (set(), []))
                members.update(members_of(node))
                bases += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


def has(cls: str, member: str) -> bool:
    members, bases = classes().get(cls, (set(), []))
    return member in members or any(has(base, member) for base in bases if base != cls)


def test_the_architecture_lists_every_page() -> None:
    assert sorted(set(re.findall(r"\]\(design/([\w-]+\.md)", ARCHITECTURE.read_text(encoding="utf-8")))) == [
        page.name for page in PAGES[1:]
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_classes_and_files_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    classes = re.findall(r"`([A-Z]\w*[a-z]\w*)", text)
    methods = re.findall(r"`[A-Z]\w*\.(\w+)`", text)
    paths = re.findall(r"`([a-z]\w*/[\w./]*)`", text)
    homes = (ROOT, ROOT / "src" / "undertow")
    assert (
        [name for name in (*classes, *methods) if name not in WORDS],
        [path for path in paths if not any((home / path).exists() for home in homes)],
    ) == ([], [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_methods_that_a_page_names_are_of_their_class(page: Path) -> None:
    named = re.findall(r"`([A-Z]\w*)\.(\w+)`", page.read_text(encoding="utf-8"))
    assert [f"{cls}.{member}" for cls, member in named if cls in classes() and not has(cls, member)] == []


@pytest.mark.parametrize("page", SCHEDULES, ids=lambda page: page.stem)
def test_the_schedule_on_a_page_is_lowered_so(page: Path) -> None:
    shown = re.findall(r"^\d\d +\S.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    lowered = [line.split() for line in SCHEDULES[page].to_text().splitlines()]
    assert len(shown) > 3
    assert [line for line in shown if line.split() not in lowered] == []


def test_the_map_of_tests_has_every_room_and_names_tests_that_exist() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1:3]
        for line in text.split("## If you change this, run that")[1].splitlines()
        if line.startswith("| `") and "`tests/" in line
    ]
    rooms = {room for mapped, _ in rows for room in re.findall(r"`([\w./]+)`", mapped)}
    places = [place for _, tests in rows for place in re.findall(r"tests/[\w./]+", tests)]
    found = {path.name for path in PACKAGE.iterdir()} | {f"lab/{path.name}" for path in (PACKAGE / "lab").iterdir()}
    no_rooms = {f"{wing}{name}" for wing in ("", "lab/") for name in ("__init__.py", "__pycache__")} | {"py.typed", "lab"}
    assert (found - rooms - no_rooms, rooms - found) == (set(), set())
    assert [place for place in places if not (ROOT / place).exists()] == []
