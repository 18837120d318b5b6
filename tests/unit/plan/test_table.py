"""Plans from files: saved ones, and tables written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.errors import refusal
from support.strategies import spec, specs_of_sizes
from undertow.plan import ParamSpec, Plan, plan_from_groups
from undertow.plan.table import plan_from_source, source_from_file

MIB = 1024 * 1024
EQUAL = specs_of_sizes(MIB, MIB, MIB)
REMEDY = (
    "Give a file that save_plan() has written, or write a table of parameters: "
    '{"params": [{"name": "weight", "shape": [10, 20], "dtype": "float32"}]}'
)


def test_a_table_is_parameters_whose_size_comes_from_their_dtype(tmp_path: Path) -> None:
    rows = [{"name": "a", "shape": [2, 3], "dtype": "bfloat16"}, {"name": "b", "shape": [], "dtype": "complex128"}]
    (tmp_path / "table.json").write_text(json.dumps({"params": rows}))
    assert source_from_file(tmp_path / "table.json") == (
        ParamSpec(name="a", shape=(2, 3), dtype="bfloat16", itemsize=2),
        ParamSpec(name="b", shape=(), dtype="complex128", itemsize=16),
    )


def test_a_saved_plan_is_read_as_it_was(tmp_path: Path) -> None:
    saved = plan_from_groups([spec("a", 5), spec("b", 7), spec("c", 9)], [(1,), (2, 0)], num_ranks=4)
    (tmp_path / "plan.json").write_text(saved.to_json() + "\n")
    source = source_from_file(tmp_path / "plan.json")
    assert source == plan_from_source(source) == saved


@pytest.mark.parametrize(
    ("plan", "groups", "num_ranks"),
    [
        (plan_from_source(EQUAL, bucket_cap_mb=1), ((2,), (1,), (0,)), 2),
        (plan_from_source(plan_from_groups(EQUAL, [(1,), (2, 0)], num_ranks=4), num_ranks=3), ((1,), (2, 0)), 3),
        (plan_from_source(plan_from_groups(EQUAL, [(1, 2), (0,)], num_ranks=4), bucket_cap_mb=1), ((1,), (2,), (0,)), 4),
    ],
    ids=["parameters in reverse for two ranks", "laid out for other ranks", "cut anew in its own order"],
)
def test_a_plan_of_a_source(plan: Plan, groups: tuple[tuple[int, ...], ...], num_ranks: int) -> None:
    assert (plan.groups, plan.num_ranks) == (groups, num_ranks)


def table(**row: Any) -> bytes:
    return json.dumps({"params": [row]}).encode()


NEITHER = "is neither a saved plan nor a table of parameters"


@pytest.mark.parametrize(
    ("content", "what", "reason"),
    [
        (None, "cannot be read", "No such file or directory"),
        (b"import torch", "is no JSON", "Expecting value: line 1 column 1 (char 0)"),
        (b"\xff", "is no JSON", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[]", NEITHER, "expected an object, got list."),
        (b'{"params": 5}', NEITHER, '"params" must be a list, got int.'),
        (b'{"params": [7]}', NEITHER, "parameter 0 must have name, shape, dtype, got 7."),
        (table(name="a", size=[1]), NEITHER, "parameter 0 must have name, shape, dtype, got name, size."),
        (table(name=1, shape=[1], dtype="float32"), NEITHER, "the name of parameter 0 must be a text, got 1."),
        (table(name="a", shape=1, dtype="float32"), NEITHER, "the shape of parameter 'a' must be a list of sizes, got 1."),
        (
            table(name="a", shape=[1], dtype="int8"),
            NEITHER,
            "the dtype of parameter 'a' must be one of float16, bfloat16, float32, float64, complex64, complex128, got 'int8'.",
        ),
        (
            table(name="a", shape=[-1], dtype="float32"),
            NEITHER,
            "parameter 'a' has an impossible size: shape (-1,), 4 bytes per element.",
        ),
        (b'{"parameters": []}', NEITHER, "this is no saved plan: it has no 'format'."),
        (
            json.dumps({"format": 1, "num_ranks": 2, "params": [spec("a", 5).to_dict()], "buckets": [[0, 0]]}).encode(),
            NEITHER,
            "a plan must hold each of its 1 parameters exactly once. first difference: parameter 0 ('a') is in 2 slots",
        ),
    ],
)
def test_a_file_that_is_neither_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, what: str, reason: str) -> None:
    path = tmp_path / "wrong.json"
    if content is not None:
        path.write_bytes(content)
    assert refusal(lambda: source_from_file(path)) == f"{path} {what}.\n  {reason}\n  {REMEDY}"
