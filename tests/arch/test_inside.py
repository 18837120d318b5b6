"""Tests reach inside of the library through tests/support/inside.py alone, but for the unit tests of those very modules."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.project import ROOT, SOURCES, name_of

TESTS = ROOT / "tests"
ALLOWED = (TESTS / "unit", TESTS / "support" / "inside.py", TESTS / "arch" / "test_inside.py")
INNER = {"current_plan", "compiled"}  # public names on the way to private objects
OTHERS = {"torch", "dist", "nn"}  # whose private names are not ours


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_in(tree: ast.AST) -> set[str]:
    """The private names of functions, classes, variables and attributes that a file defines."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_of_self(node)}
    return {name for name in names if is_private(name)}


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


# What torch's classes call so is part of their interface, which ours has too.
OF_TORCH = defined_in(ast.parse(inspect.getsource(torch.nn.parallel.distributed))) | {
    "_rebuild_buckets",
    "_delay_all_reduce",
}  # of its reducer
LIBRARY = set().union(*(defined_in(ast.parse(path.read_text())) for path in SOURCES)) - OF_TORCH - {"_parameters"}


def reaches(path: Path) -> list[str]:
    """Each place of a file that reaches inside, as "line: name"."""
    tree = ast.parse(path.read_text())
    private = LIBRARY - defined_in(tree)
    return [f"{node.lineno}: {name}" for node in ast.walk(tree) for name in reached_by(node, private)]


def reached_by(node: ast.AST, private: set[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names if alias.name.startswith("undertow.runtime"))
        case ast.ImportFrom(module=str(module)) if module.startswith("undertow"):
            yield from (alias.name for alias in node.names if module.startswith("undertow.runtime") or is_private(alias.name))
        case ast.Attribute(attr=name) if not is_of_self(node) and not is_of_others(node):
            yield from (found for found in (name,) if found in private or found in INNER)
        case ast.Constant(value=str(text)) if text.startswith("undertow.runtime") or text in private:  # of a patch
            yield text


def is_of_others(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in OTHERS


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(TESTS.rglob("*.py")) if not any(path.is_relative_to(place) for place in ALLOWED)],
    ids=name_of,
)
def test_a_file_does_not_reach_inside(path: Path) -> None:
    assert reaches(path) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from undertow.runtime.comm.group import OwnGroup", ["1: OwnGroup"]),
        ("import undertow.runtime", ["1: undertow.runtime"]),
        ("from undertow.sync import _private", ["1: _private"]),
        ("ddp.sync._engine.plan", ["1: _engine"]),
        ("ddp.sync.current_plan", ["1: current_plan"]),
        ("patch('undertow.runtime.comm.group.x')", ["1: undertow.runtime.comm.group.x"]),
        ("setattr(exchanges, '_send', late)", ["1: _send"]),
        ("class Mine:\n    def f(self):\n        self._engine = 1\n        return self._engine", []),
        ("torch._engine", []),
        ("from undertow import attach", []),
    ],
)
def test_reaching_inside_is_found(text: str, found: list[str], tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(text)
    assert reaches(path) == found
