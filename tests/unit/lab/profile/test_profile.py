"""Profiles as values and as files: what is written, what is read, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from support.errors import refusal, text_of
from support.strategies import spec
from undertow.errors import ConfigError
from undertow.lab.cost import CostCurve
from undertow.lab.profile import Profile, profile_from_file, profile_from_json
from undertow.plan import ParamSpec


def profile(**changes: Any) -> Profile:
    params = tuple(spec(name, 10) for name in ("a", "b", "c"))
    return Profile(**{"params": params, "ready_us": (40.0, 30.0, 10.0), "forward_us": 20.0, "backward_us": 40.0, **changes})


@pytest.mark.parametrize(
    ("changes", "used_us"),
    [
        ({}, (0.0, 5.0, 15.0)),
        ({"ready_us": (41.0, 30.0, 0.0)}, (0.0, 5.0, 20.0)),
    ],
    ids=[
        "as late as ready early",
        "ready behind backward by rounding: at once",
    ],
)
def test_when_a_parameter_is_used_in_forward(changes: dict[str, Any], used_us: tuple[float, ...]) -> None:
    assert profile(**changes).used_us == used_us


@pytest.mark.parametrize(
    ("ready_us", "order"),
    [
        ((40.0, 30.0, 10.0), (2, 1, 0)),
        ((10.0, 30.0, 20.0), (0, 2, 1)),
        ((5.0, 4.0, 5.0), (1, 2, 0)),
    ],
)
def test_order_is_by_ready_time_and_of_equal_times_the_later_registered_first(
    ready_us: tuple[float, ...], order: tuple[int, ...]
) -> None:
    assert profile(ready_us=ready_us).order == order


FORMAT = "The command `undertow docs profiles` shows the format and an example."
NO_FILE = "Give a file that save_profile() has written, or the example gpt2. `undertow docs profiles` shows the format."


def number(name: str, shown: str, limit: str = "zero or more") -> str:
    return f"{name} must be a number, {limit}, got {shown}.\n  {FORMAT}"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        *(({"update_us": value}, number("update_us", repr(value))) for value in (-1.0, math.nan, math.inf, "5", True, None)),
        ({"backward_us": 10**400}, number("backward_us", "100000000000000000...0000000000000000000")),
        ({"skew": 0.5}, number("skew", "0.5", "0 to 0.2")),
        ({"contention": 1.5}, number("contention", "1.5", "0 to 0.99")),
        *(
            ({"ready_us": (40.0, value, 10.0)}, number("ready_us of params[1] ('b')", repr(value)))
            for value in (-0.5, math.nan, None)
        ),
        (
            {"ready_us": (40.0, 41.5, 10.0)},
            "ready_us of params[1] ('b') must not be after the end of backward, got 41.5.\n  backward_us is 40.0\n"
            "  Count from the beginning of backward; a gradient that never arrives has backward_us.",
        ),
        (
            {"params": tuple(spec(name, 10) for name in ("a", "b", "a"))},
            "the name of params[2] ('a') must differ from the names before it.\n"
            "  Name each parameter once; a tied one has one name and one gradient.",
        ),
        (
            {"ready_us": (1.0,) * 4},
            "ready_us must have a time for each of 3 parameters, got 4.\n"
            "  Give a ready time for each parameter, in the order of registration.",
        ),
        *(
            ({"num_ranks": num}, f"num_ranks must be a whole number, 1 or more, got {num!r}.\n  {FORMAT}")
            for num in (0, 2.0, True, 2**63)
        ),
        ({"name": 5}, f"name must be a text, got 5.\n  {FORMAT}"),
        (
            {"strategy": "zero9"},
            "strategy 'zero9' does not exist.\n  strategy\n  Choose one of: 'ddp', 'zero1', 'zero2', 'hybrid'.",
        ),
        ({"wire": "int4"}, "wire int4 is unknown.\n  Did you mean 'int8'? Choose one of: 'bfloat16', 'float16', 'int8', 'auto'."),
        ({"param_wire": "auto"}, "param_wire auto is unknown.\n  Choose one of: 'bfloat16', 'int8'."),
        (
            {"groups": ((2, 1, 0),), "wires": ("int8", None)},
            "wires must have the format of each of 1 buckets, got ['int8', None].\n"
            "  Formats are null (full width), bfloat16, float16, int8.",
        ),
    ],
)
def test_a_profile_of_no_model_is_refused_by_its_field(changes: dict[str, Any], text: str) -> None:
    assert text_of(ConfigError, lambda: profile(**changes)) == text


FIELDS = (
    "undertow_profile, name, num_ranks, forward_us, backward_us, update_us, strategy, wire, param_wire, step_us, "
    "launch_us, copy_us_per_mb, skew, contention, processors_us, network_us, params, costs, buckets, wires"
)
INDICES = "Give each bucket the indices of its parameters, such as [2, 0]."
POINT = "A point is a size of zero bytes or more and a time of more than zero microseconds."
SIZES = "Sizes are zero or more, an element has at least one byte, and all of them fit into 64 bits."

WHOLE_PROFILE = Profile(
    params=(
        ParamSpec(name="conv", shape=(2, 3), dtype="bfloat16", itemsize=2, device="cuda:0"),
        ParamSpec(name="embedding", shape=(100,), dtype="float32", itemsize=4, is_sparse=True),
        ParamSpec(name="head", shape=(), dtype="bfloat16", itemsize=2, device="cuda:0"),
    ),
    ready_us=(40.5, 30.0, 10.25),
    forward_us=20.0,
    backward_us=41.0,
    update_us=3.5,
    name='the "small" one',
    num_ranks=4,
    curves={"all_reduce": CostCurve(points=((0, 50), (1024, 60.5))), "all_gather": CostCurve(points=((1024, 30),))},
    strategy="zero2",
    wire="auto",
    param_wire="int8",
    groups=((2, 0), (1,)),
    wires=("int8", None),
    step_us=80.0,
)
WHOLE_TEXT = """\
{
  "undertow_profile": 1,
  "name": "the \\"small\\" one",
  "num_ranks": 4,
  "forward_us": 20.0,
  "backward_us": 41.0,
  "update_us": 3.5,
  "strategy": "zero2",
  "wire": "auto",
  "param_wire": "int8",
  "step_us": 80.0,
  "params": [
    {"name": "conv", "shape": [2, 3], "dtype": "bfloat16", "ready_us": 40.5, "device": "cuda:0"},
    {"name": "embedding", "shape": [100], "dtype": "float32", "ready_us": 30.0, "sparse": true},
    {"name": "head", "shape": [], "dtype": "bfloat16", "ready_us": 10.25, "device": "cuda:0"}
  ],
  "costs": {"all_reduce": [[0.0, 50.0], [1024.0, 60.5]], "all_gather": [[1024.0, 30.0]]},
  "buckets": [
    [2, 0],
    [1]
  ],
  "wires": ["int8", null]
}
"""


def small(**changes: Any) -> dict[str, Any]:
    return {
        "undertow_profile": 1,
        "forward_us": 1,
        "backward_us": 2,
        "params": [{"name": "a", "shape": 5, "ready_us": 2}, {"name": "b", "shape": [2, 3], "ready_us": 1}],
        **changes,
    }


def param(**changes: Any) -> dict[str, Any]:
    """A profile whose second parameter has these fields, without those that are None."""
    row = {"name": "b", "shape": [2, 3], "ready_us": 1, **changes}
    return small(
        params=[{"name": "a", "shape": 5, "ready_us": 2}, {name: value for name, value in row.items() if value is not None}]
    )


def read(data: Any) -> Profile:
    return profile_from_json(json.dumps(data), "run.json")


def test_a_file_has_a_line_for_each_parameter_and_bucket(tmp_path: Path) -> None:
    WHOLE_PROFILE.save(tmp_path / "run.json")
    assert (tmp_path / "run.json").read_text() == WHOLE_PROFILE.to_json() == WHOLE_TEXT
    assert profile_from_file(tmp_path / "run.json") == WHOLE_PROFILE


def test_what_is_not_known_is_not_written() -> None:
    empty = Profile(params=(), ready_us=(), forward_us=1, backward_us=2)
    assert (profile_from_json(empty.to_json(), "run.json"), empty.to_json()) == (
        empty,
        '{\n  "undertow_profile": 1,\n  "name": "",\n  "num_ranks": 1,\n  "forward_us": 1,\n  "backward_us": 2,\n'
        '  "update_us": 0.0,\n  "strategy": "ddp",\n  "params": [\n\n  ]\n}\n',
    )


def test_a_file_by_hand_may_leave_out_what_is_not_known() -> None:
    assert read(small()) == Profile(
        params=(
            ParamSpec(name="a", shape=(5,), dtype="float32", itemsize=4),
            ParamSpec(name="b", shape=(2, 3), dtype="float32", itemsize=4),
        ),
        ready_us=(2, 1),
        forward_us=1,
        backward_us=2,
    )


@pytest.mark.parametrize(("shape", "sizes"), [(7, (7,)), ([], ()), ([2, 0], (2, 0))])
def test_a_shape_may_be_a_number_of_elements(shape: Any, sizes: tuple[int, ...]) -> None:
    assert read(param(shape=shape, dtype="bfloat16")).params[1] == ParamSpec(name="b", shape=sizes, dtype="bfloat16", itemsize=2)


def impossible(shape: str) -> str:
    return f"parameter 'b' has an impossible size: shape {shape}, 4 bytes per element.\n  {SIZES}"


def described(device: str, sparse: str, name: str = "'b'") -> str:
    return (
        f"parameter {name} has an impossible description: dtype 'float32', "
        f"device {device}, sparse {sparse}.\n  Name, dtype and device are texts; whether it is sparse is true or false."
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], f"a profile must be an object, got [].\n  {FORMAT}"),
        (small(xyz=1), f"xyz is unknown.\n  Known: {FIELDS}."),
        (small(forward_ms=1), "forward_ms is unknown.\n  Did you mean 'forward_us'?"),
        ({"forward_us": 1}, f"undertow_profile is missing.\n  {FORMAT}"),
        ({"undertow_profile": 1, "backward_us": 1, "params": []}, f"forward_us is missing.\n  {FORMAT}"),
        (small(undertow_profile=2), f"undertow_profile must be 1, got 2.\n  {FORMAT}"),
        (small(backward_us="1"), number("backward_us", "'1'")),
        (param(name=None), f"params[1].name is missing.\n  {FORMAT}"),
        (param(weight=3), "params[1].weight is unknown.\n  Known: name, ready_us, shape, dtype, device, sparse, whole."),
        (param(name=3), described("'cpu'", "False", "3")),
        (param(shape="5"), impossible("('5',)")),
        (param(shape=[2**31, 2**31]), impossible("(2147483648, 2147483648)")),
        (param(dtype="flot32"), "params[1].dtype flot32 is unknown.\n  Did you mean 'float32'?"),
        (
            param(dtype=[4]),
            "params[1].dtype [4] is unknown.\n  Known: float16, bfloat16, float32, float64, complex64, complex128.",
        ),
        (small(costs={"allreduce": []}), "costs.allreduce is unknown.\n  Did you mean 'all_reduce'?"),
        (
            small(costs={"all_reduce": 5}),
            f"costs.all_reduce is not a cost curve.\n  costs.all_reduce must be a list, got 5.\n  {FORMAT}",
        ),
        *(
            (
                small(costs={"all_reduce": [[1, 2], point]}),
                f"costs.all_reduce is not a cost curve.\n  point 1 of a cost curve is impossible: {point}.\n  {POINT}",
            )
            for point in ([3], [3, "4"], [3, -4], [3, True])
        ),
        (small(buckets=[[1, "a"]]), f"buckets[0] must be a list of parameters' indices, got [1, 'a'].\n  {INDICES}"),
        (small(wires="int8"), f"wires must be a list, got 'int8'.\n  {FORMAT}"),
        (
            small(buckets=[[1]]),
            "a plan must hold each of its 2 parameters exactly once.\n"
            "  first difference: parameter 0 ('a') is in 0 slots\n  Make the plan from the parameters of this model.",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(data: Any, reason: str) -> None:
    assert refusal(lambda: read(data)) == f"run.json is not a profile.\n  {reason}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps(small()).replace('"forward_us": 1', '"forward_us": 1, "forward_us": 2'), "'forward_us' is given twice"),
        (WHOLE_TEXT[: WHOLE_TEXT.index("ro2")], "Unterminated string starting at: line 8 column 15 (char 155)"),
        *((WHOLE_TEXT[:end], "") for end in range(0, len(WHOLE_TEXT) - 3, 97)),  # cut short
    ],
    ids=lambda text: text[-24:],
)
def test_a_text_that_is_not_json_is_refused_by_its_place(text: str, reason: str) -> None:
    assert refusal(lambda: profile_from_json(text, "run.json")).startswith(f"run.json is not JSON.\n  {reason}")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, f"cannot be read.\n  No such file or directory\n  {NO_FILE}"),
        (b"\xff", f"is not JSON.\n  'utf-8' codec can't decode byte 0xff in position 0: invalid start byte\n  {FORMAT}"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    assert refusal(lambda: profile_from_file(path)) == f"{path} {text}"


@pytest.mark.parametrize(
    ("wire", "contained"), [(None, None), ("int8", "int8"), ("auto", None)], ids=["full width", "int8", "measured before auto"]
)
def test_costs_contain_the_coding_of_the_format_that_was_measured(wire: str | None, contained: str | None) -> None:
    costs = profile(wire=wire, param_wire="bfloat16").costs()
    assert costs.wires == {"all_reduce": contained, "reduce_scatter": contained, "all_gather": "bfloat16"}


def test_measurements_of_the_ranks_are_in_the_file() -> None:
    measured = {"launch_us": 90.5, "copy_us_per_mb": 200, "skew": 0.01, "contention": 0.1}
    measured |= {"processors_us": 3.5, "network_us": 700}
    found = read(small(**measured))
    assert {name: getattr(found, name) for name in measured} == measured
    assert profile_from_json(found.to_json(), "run.json") == found
