from __future__ import annotations

import ast

from support.project import SOURCES, name_of

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def test_a_file_can_be_read_in_one_sitting() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_a_function_can_be_seen_at_once() -> None:
    lengths = {
        f"{name_of(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}
