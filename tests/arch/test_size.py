from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.project import SOURCES, name_of

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_function_can_be_seen_at_once(path: Path) -> None:
    functions = (
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = {f"{node.name}, line {node.lineno}": (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}
