"""No module leads back to itself, and no class name is given twice."""

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from support.project import ROOT, SOURCES

PACKAGE = ROOT / "src" / "undertow"


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Not while tests are collected, which every worker does."""
    return {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in SOURCES}


def imports(path: Path, tree: ast.AST) -> Iterator[Path]:
    """Yields the files of undertow that a file imports from, also under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("undertow"):
            module = Path(*node.module.split(".")[1:])
            found = {module.with_suffix(".py") if module.name else module, module / "__init__.py"}
            found |= {module / f"{alias.name}.py" for alias in node.names}
            yield from (trees().keys() & found) - {path}


def in_circles() -> set[Path]:
    """Files that lead back to themselves."""
    edges = {path: set(imports(path, tree)) for path, tree in trees().items()}
    reached: dict[Path, set[Path]] = defaultdict(set)
    for path in edges:
        left = [path]
        while left:
            new = edges[left.pop()] - reached[path]
            reached[path] |= new
            left += new
    return {path for path in edges if path in reached[path]}


def test_no_module_is_in_a_circle_of_imports() -> None:
    assert in_circles() == set()


def test_no_class_name_is_given_twice() -> None:
    names = Counter(node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []
