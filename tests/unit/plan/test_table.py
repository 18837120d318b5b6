"""Plans from files: saved ones, and tables written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.errors import text_of
from support.strategies import spec, specs_of_sizes
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, Plan, plan_from_groups
from undertow.plan.table import plan_from_source, source_from_file

MIB = 1024 * 1024
REMEDY = (
    "Give a file that save_plan() has written, or write a table of parameters: "
    '{"params": [{"name": "weight", "shape": [10, 20], "dtype": "float32"}]}'
)


def groups_of(plan: Plan) -> list[tuple[int, ...]]:
    return [bucket.params for bucket in plan.buckets]


def test_a_table_is_parameters_whose_size_comes_from_their_dtype(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    rows = [{"name": "a", "shape": [2, 3], "dtype": "bfloat16"}, {"name": "b", "shape": [], "dtype": "complex128"}]
    path.write_text(json.dumps({"params": rows}))
    assert source_from_file(path) == (
        ParamSpec(name="a", shape=(2, 3), dtype="bfloat16", itemsize=2),
        ParamSpec(name="b", shape=(), dtype="complex128", itemsize=16),
    )


def test_a_saved_plan_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved = plan_from_groups([spec("a", 5), spec("b", 7), spec("c", 9)], [(1,), (2, 0)], num_ranks=4)
    path.write_text(saved.to_json() + "\n")
    source = source_from_file(path)
    assert source == saved
    assert plan_from_source(source) == saved


def test_parameters_are_planned_in_reverse_for_two_ranks() -> None:
    plan = plan_from_source(specs_of_sizes(MIB, MIB, MIB), bucket_cap_mb=1)
    assert (groups_of(plan), plan.num_ranks) == ([(2,), (1,), (0,)], 2)


def test_a_saved_plan_is_laid_out_for_other_ranks() -> None:
    saved = plan_from_groups(specs_of_sizes(100, 200, 300), [(1,), (2, 0)], num_ranks=4)
    plan = plan_from_source(saved, num_ranks=3)
    assert (groups_of(plan), plan.num_ranks) == ([(1,), (2, 0)], 3)


def test_a_saved_plan_is_cut_anew_in_its_own_order() -> None:
    saved = plan_from_groups(specs_of_sizes(MIB, MIB, MIB), [(1, 2), (0,)], num_ranks=4)
    plan = plan_from_source(saved, bucket_cap_mb=1)
    assert (groups_of(plan), plan.num_ranks) == ([(1,), (2,), (0,)], 4)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], "expected an object, got list."),
        ({"params": 5}, '"params" must be a list, got int.'),
        ({"params": [7]}, "parameter 0 must have name, shape, dtype, got 7."),
        ({"params": [{"name": "a", "size": [1]}]}, "parameter 0 must have name, shape, dtype, got name, size."),
        ({"params": [{"name": 1, "shape": [1], "dtype": "float32"}]}, "the name of parameter 0 must be a text, got 1."),
        (
            {"params": [{"name": "a", "shape": 1, "dtype": "float32"}]},
            "the shape of parameter 'a' must be a list of sizes, got 1.",
        ),
        (
            {"params": [{"name": "a", "shape": [1], "dtype": "int8"}]},
            "the dtype of parameter 'a' must be one of float16, bfloat16, float32, float64, complex64, complex128, got 'int8'.",
        ),
        (
            {"params": [{"name": "a", "shape": [-1], "dtype": "float32"}]},
            "parameter 'a' has an impossible size: shape (-1,), 4 bytes per element.",
        ),
        ({"parameters": []}, "this is no saved plan: it has no 'format'."),
        (
            {"format": 1, "num_ranks": 2, "params": [spec("a", 5).to_dict()], "buckets": [[0, 0]]},
            "a plan must hold each of its 1 parameters exactly once. first difference: parameter 0 ('a') is in 2 slots",
        ),
    ],
)
def test_a_file_of_another_shape_is_refused_with_the_reason(tmp_path: Path, data: Any, reason: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    expected = f"{path} is neither a saved plan nor a table of parameters.\n  {reason}\n  {REMEDY}"
    assert text_of(ConfigError, lambda: source_from_file(path)) == expected


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    expected = f"{tmp_path / 'absent'} cannot be read.\n  No such file or directory\n  {REMEDY}"
    assert text_of(ConfigError, lambda: source_from_file(tmp_path / "absent")) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"import torch", "Expecting value: line 1 column 1 (char 0)"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_a_file_that_is_no_json_is_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    assert text_of(ConfigError, lambda: source_from_file(path)) == f"{path} is no JSON.\n  {reason}\n  {REMEDY}"
