"""Profiles as values and as files: what is written, what is read, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from support.errors import refusal, text_of
from support.strategies import spec
from undertow.cost import COLLECTIVES, CostCurve
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, Piece
from undertow.profile import Profile, profile_from_file, profile_from_json

CURVE = CostCurve(points=((1000, 60), (2000, 70)))
GIVEN = "must be a number of microseconds, zero or more, got"
TIMES = "A millisecond is 1000. NaN and infinity are not times."
ONCE = "buckets, the groups of a profile, do not fit the parameters.\n  a plan must hold each of its 3 parameters exactly once.\n"
MAKE = "\n  Make the plan from the parameters of this model."


def profile(**changes: Any) -> Profile:
    params = tuple(spec(name, 10) for name in ("a", "b", "c"))
    return Profile(**{"params": params, "ready_us": (40.0, 30.0, 10.0), "forward_us": 20.0, "backward_us": 40.0, **changes})


@pytest.mark.parametrize(
    ("changes", "used_us"),
    [
        ({}, (0.0, 5.0, 15.0)),
        ({"ready_us": (41.0, 30.0, 0.0)}, (0.0, 5.0, 20.0)),
        ({"ready_us": (0.0, 0.0, 0.0), "backward_us": 0.0}, (0.0, 0.0, 0.0)),
    ],
    ids=["as late as ready early", "ready behind backward by rounding: at once", "no backward: at once"],
)
def test_when_a_parameter_is_used_in_forward(changes: dict[str, Any], used_us: tuple[float, ...]) -> None:
    assert profile(**changes).used_us == used_us


@pytest.mark.parametrize(
    ("ready_us", "order"),
    [
        ((40.0, 30.0, 10.0), (2, 1, 0)),
        ((10.0, 30.0, 20.0), (0, 2, 1)),
        ((5.0, 5.0, 5.0), (2, 1, 0)),
        ((5.0, 4.0, 5.0), (1, 2, 0)),
    ],
)
def test_order_is_by_ready_time_and_of_equal_times_the_later_registered_first(
    ready_us: tuple[float, ...], order: tuple[int, ...]
) -> None:
    assert profile(ready_us=ready_us).order == order


def test_costs_are_those_of_its_curves() -> None:
    assert float(profile(curves={"all_reduce": CURVE}).costs().collective_us("all_reduce", 1500)) == 65


@pytest.mark.parametrize(
    "changes",
    [
        {"step_us": None},  # the time of the whole step may be unknown
        {"groups": ((2,), (1, 0))},
        {"groups": ((Piece(param=2, first=0, stop=4),), (Piece(param=2, first=4, stop=10), 1, 0))},
    ],
)
def test_what_a_profile_may_have(changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    assert getattr(profile(**changes), name) == value


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        *(
            pytest.param({field: value}, f"{field} {GIVEN} {shown}.\n  {TIMES}", id=f"{field} of {str(value)[:8]}")
            for field in ("forward_us", "backward_us", "update_us", "step_us")
            for value, shown in (
                *((value, repr(value)) for value in (-1.0, math.nan, math.inf, -math.inf, "5", [], True)),
                (10**400, "100000000000000000...0000000000000000000"),
            )
        ),
        # Needed, unlike that of the step.
        *(
            pytest.param({field: None}, f"{field} {GIVEN} None.\n  {TIMES}", id=f"{field} of None")
            for field in ("forward_us", "backward_us", "update_us")
        ),
        *(
            pytest.param(
                {"ready_us": (40.0, value, 10.0)},
                f"ready_us[1] ('b') {GIVEN} {value!r}.\n  {TIMES}",
                id=f"a ready time of {value}",
            )
            for value in (-0.5, math.nan, math.inf, None)
        ),
        pytest.param(
            {"ready_us": (40.0, 41.5, 10.0)},
            "ready_us[1] ('b') must not be after the end of backward, got 41.5.\n  backward_us is 40.0\n"
            "  Count from the beginning of backward; a gradient that never comes has backward_us.",
            id="ready behind the end of backward",
        ),
        pytest.param(
            {"params": tuple(spec(name, 10) for name in ("a", "b", "a"))},
            "params[2].name must differ from the name of params[0], got 'a'.\n"
            "  Name each parameter once; a tied one has one name and one gradient.",
            id="a name twice",
        ),
        *(
            pytest.param(
                {"ready_us": (1.0,) * num},
                f"ready_us must have a time for each of 3 parameters, got {num}.\n"
                "  Give a ready time for each parameter, in the order of registration.",
                id=f"{num} ready times",
            )
            for num in (0, 2, 4)
        ),
        *(
            pytest.param(
                {"num_ranks": num},
                f"num_ranks must be a whole number, 1 or more, got {num!r}.\n"
                "  Write a number such as 1, without a decimal point or quotes.",
                id=f"{num!r} ranks",
            )
            for num in (0, -1, 2.0, True)
        ),
        pytest.param(
            {"curves": {"gossip": CURVE}},
            f"curves has the unknown kind 'gossip'.\n  Kinds of collectives: {', '.join(COLLECTIVES)}.",
            id="costs of an unknown kind",
        ),
        pytest.param(
            {"strategy": "zero9"},
            "strategy 'zero9' does not exist.\n  strategy\n  Choose one of: 'ddp', 'zero1', 'zero2', 'hybrid'.",
            id="an unknown strategy",
        ),
        pytest.param(
            {"groups": ((2,), (1,))},
            f"{ONCE}  first difference: parameter 0 ('a') is in 0 slots{MAKE}",
            id="a parameter in no bucket",
        ),
        pytest.param(
            {"groups": ((2,), (1, 0, 2))},
            f"{ONCE}  first difference: parameter 2 ('c') is in 2 slots{MAKE}",
            id="a parameter in two buckets",
        ),
        pytest.param(
            {"groups": ((2, 1, 0, 3),)},
            "buckets, the groups of a profile, do not fit the parameters.\n  they name one that is not among the 3 parameters",
            id="a bucket of a parameter that there is not",
        ),
    ],
)
def test_what_no_model_has_is_refused_by_its_field(changes: dict[str, Any], text: str) -> None:
    assert text_of(ConfigError, lambda: profile(**changes)) == text


FORMAT = "docs/profiles.md has the format and an example."
MICROSECONDS = "A millisecond is 1000. NaN and infinity are not times."
POSITIVE, COUNT = (f"Write a number such as {number}, without a decimal point or quotes." for number in (1, 0))
COUNTED = "At most 9223372036854775807 can be counted."
HUGE = "100000000000000000...0000000000000000000"  # 10**400, shortened
SHAPES = 'Write "shape": [64, 3, 7, 7], "shape": 9408 (elements) or "bytes": 37632.'
FIELDS = (
    "undertow_profile, backward_us, params, name, strategy, forward_us, update_us, step_us, num_ranks, launch_us, "
    "copy_us_per_mb, skew, spread, contention, processors_us, network_us, costs, buckets"
)

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
    groups=((2, Piece(param=0, first=0, stop=2)), (1,), (Piece(param=0, first=2, stop=6),)),
    step_us=80.0,
)
WHOLE_TEXT = """\
{
  "undertow_profile": 1,
  "name": "the \\"small\\" one",
  "num_ranks": 4,
  "forward_us": 20,
  "backward_us": 41,
  "update_us": 3.5,
  "strategy": "zero2",
  "step_us": 80,
  "params": [
    {"name": "conv", "shape": [2, 3], "dtype": "bfloat16", "ready_us": 40.5, "device": "cuda:0"},
    {"name": "embedding", "shape": [100], "dtype": "float32", "ready_us": 30, "sparse": true},
    {"name": "head", "shape": [], "dtype": "bfloat16", "ready_us": 10.25, "device": "cuda:0"}
  ],
  "costs": {
    "all_reduce": [[0, 50], [1024, 60.5]],
    "all_gather": [[1024, 30]]
  },
  "buckets": [
    [2, [0, 0, 2]],
    [1],
    [[0, 2, 6]]
  ]
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


def test_a_file_has_a_line_for_each_parameter_curve_and_bucket(tmp_path: Path) -> None:
    WHOLE_PROFILE.save(tmp_path / "run.json")
    assert (tmp_path / "run.json").read_text() == WHOLE_PROFILE.to_json() == WHOLE_TEXT
    assert profile_from_file(tmp_path / "run.json") == WHOLE_PROFILE


def test_what_is_not_known_is_not_written() -> None:
    empty = Profile(params=(), ready_us=(), forward_us=1, backward_us=2)
    assert (profile_from_json(empty.to_json(), "run.json"), empty.to_json()) == (
        empty,
        '{\n  "undertow_profile": 1,\n  "name": "",\n  "num_ranks": 1,\n  "forward_us": 1,\n  "backward_us": 2,\n'
        '  "update_us": 0,\n  "strategy": "ddp",\n  "params": [\n\n  ]\n}\n',
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


@pytest.mark.parametrize(
    ("changes", "shape", "itemsize"),
    [
        ({"shape": 7}, (7,), 4),
        ({"shape": []}, (), 4),
        ({"shape": None, "bytes": 400}, (100,), 4),
        ({"shape": None, "bytes": 400, "dtype": "bfloat16"}, (200,), 2),
        ({"shape": None, "bytes": 0}, (0,), 4),
    ],
)
def test_a_size_may_be_a_shape_or_elements_or_bytes(changes: dict[str, Any], shape: tuple[int, ...], itemsize: int) -> None:
    assert read(param(**changes)).params[1] == ParamSpec(
        name="b", shape=shape, dtype={2: "bfloat16", 4: "float32"}[itemsize], itemsize=itemsize
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], f"a profile must be an object, got [].\n  {FORMAT}"),
        (5, f"a profile must be an object, got 5.\n  {FORMAT}"),
        (small(xyz=1), f"xyz is unknown.\n  Known: {FIELDS}."),
        (small(forward_ms=1), "forward_ms is unknown.\n  Did you mean 'forward_us'?"),
        ({"forward_us": 1}, f"undertow_profile is missing.\n  {FORMAT}"),
        ({"undertow_profile": 1, "forward_us": 1, "params": []}, f"backward_us is missing.\n  {FORMAT}"),
        (small(undertow_profile=2), f"undertow_profile must be 1, got 2.\n  {FORMAT}"),
        (small(undertow_profile=True), f"undertow_profile must be 1, got True.\n  {FORMAT}"),
        (small(undertow_profile="1"), f"undertow_profile must be 1, got '1'.\n  {FORMAT}"),
        (small(name=5), f"name must be a text, got 5.\n  {FORMAT}"),
        (small(strategy=None), f"strategy must be a text, got None.\n  {FORMAT}"),
        (small(strategy=[]), f"strategy must be a text, got [].\n  {FORMAT}"),
        (small(num_ranks=0), f"num_ranks must be a whole number, 1 or more, got 0.\n  {POSITIVE}"),
        (small(num_ranks=2.0), f"num_ranks must be a whole number, 1 or more, got 2.0.\n  {POSITIVE}"),
        (small(forward_us=-1), f"forward_us must be a number of microseconds, zero or more, got -1.\n  {MICROSECONDS}"),
        (small(backward_us=math.nan), f"backward_us must be a number of microseconds, zero or more, got nan.\n  {MICROSECONDS}"),
        (small(update_us=math.inf), f"update_us must be a number of microseconds, zero or more, got inf.\n  {MICROSECONDS}"),
        (small(step_us="1"), f"step_us must be a number of microseconds, zero or more, got '1'.\n  {MICROSECONDS}"),
        (small(step_us=None), f"step_us must be a number of microseconds, zero or more, got None.\n  {MICROSECONDS}"),
        (
            small(strategy="zero9"),
            "strategy 'zero9' does not exist.\n  strategy\n  Choose one of: 'ddp', 'zero1', 'zero2', 'hybrid'.",
        ),
        (small(params={}), f"params must be a list, got {{}}.\n  {FORMAT}"),
        (small(params=[7]), f"params[0] must be an object, got 7.\n  {FORMAT}"),
        (param(name=None), f"params[1].name is missing.\n  {FORMAT}"),
        (param(ready_us=None), f"params[1].ready_us is missing.\n  {FORMAT}"),
        (param(name=3), f"params[1].name must be a text, got 3.\n  {FORMAT}"),
        (param(redy_us=3), "params[1].redy_us is unknown.\n  Did you mean 'ready_us'?"),
        (
            param(weight=3),
            "params[1].weight is unknown.\n  Known: name, ready_us, shape, bytes, dtype, device, sparse.",
        ),
        (param(ready_us=-1), f"params[1].ready_us must be a number of microseconds, zero or more, got -1.\n  {MICROSECONDS}"),
        (
            param(ready_us=math.nan),
            f"params[1].ready_us must be a number of microseconds, zero or more, got nan.\n  {MICROSECONDS}",
        ),
        (param(ready_us=True), f"params[1].ready_us must be a number of microseconds, zero or more, got True.\n  {MICROSECONDS}"),
        (param(shape=None), f"params[1] must have either shape or bytes, got neither.\n  {SHAPES}"),
        (param(bytes=8), f"params[1] must have either shape or bytes, got both.\n  {SHAPES}"),
        (param(shape=None, bytes=-4), f"params[1].bytes must be a whole number, 0 or more, got -4.\n  {COUNT}"),
        (param(shape=None, bytes=6), f"params[1].bytes must be a multiple of the 4 bytes of an element, got 6.\n  {FORMAT}"),
        (param(shape=-5), f"params[1].shape must be a whole number, 0 or more, got -5.\n  {COUNT}"),
        (param(shape="5"), f"params[1].shape must be a whole number, 0 or more, got '5'.\n  {COUNT}"),
        (param(shape=[5, 2.5]), f"params[1].shape[1] must be a whole number, 0 or more, got 2.5.\n  {COUNT}"),
        (param(shape=[5, -1]), f"params[1].shape[1] must be a whole number, 0 or more, got -1.\n  {COUNT}"),
        (
            param(dtype="flot32"),
            "params[1].dtype must be one of float16, bfloat16, float32, float64, complex64, complex128, got 'flot32'.\n"
            "  Did you mean 'float32'?",
        ),
        (
            param(dtype=[4]),
            "params[1].dtype must be one of float16, bfloat16, float32, float64, complex64, complex128, got [4].\n"
            "  Known: float16, bfloat16, float32, float64, complex64, complex128.",
        ),
        (param(device=0), f"params[1].device must be a text, got 0.\n  {FORMAT}"),
        (param(sparse=1), f"params[1].sparse must be true or false, got 1.\n  {FORMAT}"),
        (small(costs=[]), f"costs must be an object, got [].\n  {FORMAT}"),
        (small(costs={"allreduce": []}), "costs.allreduce is unknown.\n  Did you mean 'all_reduce'?"),
        (small(costs={"all_reduce": 5}), f"costs.all_reduce must be a list, got 5.\n  {FORMAT}"),
        (
            small(costs={"all_reduce": [[1, 2], [3]]}),
            f"costs.all_reduce[1] must be [bytes, microseconds], got [3].\n  {FORMAT}",
        ),
        (small(costs={"all_reduce": [[1, "2"]]}), f"costs.all_reduce[0][1] must be a number, got '2'.\n  {FORMAT}"),
        (
            small(costs={"all_reduce": [[1, 2], [3, math.nan]]}),
            "costs.all_reduce is not a cost curve.\n  point 1 of a cost curve is impossible: (3, nan).\n"
            "  A point is a size of zero bytes or more and a time of more than zero microseconds.",
        ),
        (
            small(costs={"all_reduce": []}),
            "costs.all_reduce is not a cost curve.\n  a cost curve needs at least one point.\n  Measure one size or more.",
        ),
        (small(buckets=5), f"buckets must be a list, got 5.\n  {FORMAT}"),
        (small(buckets=[[1], 0]), f"buckets[1] must be a list, got 0.\n  {FORMAT}"),
        (
            small(buckets=[[1, "a"]]),
            f"buckets[0][1] must be a parameter's index or [index, first element, end], got 'a'.\n  {FORMAT}",
        ),
        (
            small(buckets=[[[1, 2]]]),
            f"buckets[0][0] must be a parameter's index or [index, first element, end], got [1, 2].\n  {FORMAT}",
        ),
        (small(buckets=[[1, 2]]), f"buckets[0][1] must be of one of the 2 parameters, counted from zero, got 2.\n  {FORMAT}"),
        (small(buckets=[[-1]]), f"buckets[0][0] must be of one of the 2 parameters, counted from zero, got -1.\n  {FORMAT}"),
        (
            small(buckets=[[1]]),
            "buckets, the groups of a profile, do not fit the parameters.\n"
            "  a plan must hold each of its 2 parameters exactly once.\n"
            "  first difference: parameter 0 ('a') is in 0 slots\n  Make the plan from the parameters of this model.",
        ),
        (
            small(buckets=[[0, [1, 4, 2]]]),
            f"buckets[0][1] must be a parameter's index or [index, first element, end], got [1, 4, 2].\n  {FORMAT}",
        ),
        (
            small(buckets=[[1], [0, 1]]),
            f"buckets[1][1] must be of a parameter that buckets[0][0] does not hold, got 1.\n  {FORMAT}",
        ),
        (
            param(ready_us=64),
            "params[1].ready_us must not be after the end of backward, got 64.\n  backward_us is 2.0\n"
            "  Count from the beginning of backward; a gradient that never comes has backward_us.",
        ),
        (
            param(name="a"),
            "params[1].name must differ from the name of params[0], got 'a'.\n"
            "  Name each parameter once; a tied one has one name and one gradient.",
        ),
        (param(shape=None, bytes=4 * 10**400), f"params[1].bytes is too large: {HUGE.replace('1', '4')}.\n  {COUNTED}"),
        (param(shape=10**400), f"params[1].shape is too large: {HUGE}.\n  {COUNTED}"),
        (param(shape=[10**400]), f"params[1].shape[0] is too large: {HUGE}.\n  {COUNTED}"),
        (param(shape=[2**31, 2**31]), f"params[1].shape, in bytes, is too large: {2**64}.\n  {COUNTED}"),
        (small(num_ranks=10**400), f"num_ranks is too large: {HUGE}.\n  {COUNTED}"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(data: Any, reason: str) -> None:
    assert refusal(lambda: read(data)) == f"run.json is not a profile.\n  {reason}"


@pytest.mark.parametrize(
    ("text", "start"),
    [
        *(
            (
                json.dumps(small()).replace('"forward_us": 1', f'"forward_us": {literal}'),
                "a profile.\n  forward_us must be a number of ",
            )
            for literal in ("NaN", "Infinity", "-Infinity", "1e999")
        ),
        *((text, "JSON.\n") for text in ("[" * 200_000, '{"undertow_profile": ' + "1" * 5000 + "}")),  # that no reader can take
        *((WHOLE_TEXT[:end], "JSON.\n  line ") for end in range(0, len(WHOLE_TEXT) - 3, 7)),  # cut short
    ],
    ids=lambda text: text[-24:],
)
def test_a_text_that_is_no_profile_is_refused(text: str, start: str) -> None:
    assert refusal(lambda: profile_from_json(text, "run.json")).startswith(f"run.json is not {start}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *(
            (json.dumps(small()).replace(one, twice), f"a profile.\n  {field} is given twice.\n  Leave one of the two out.")
            for one, twice, field in (
                ('"forward_us": 1', '"forward_us": 1, "forward_us": 2', "forward_us"),
                ('"name": "b"', '"name": "b", "name": "b"', "params[1].name"),
                ('"params"', '"costs": {"all_reduce": [[1, 2]], "all_reduce": [[1, 3]]}, "params"', "costs.all_reduce"),
            )
        ),
        *(
            (text, f"JSON.\n  {reason}\n  {FORMAT}")
            for text, reason in (
                (WHOLE_TEXT[: WHOLE_TEXT.index("ro2")], "line 8, column 15: Unterminated string starting at"),
                (WHOLE_TEXT[: WHOLE_TEXT.index("[\n    {")], "line 10, column 13: Expecting value"),
                ("", "line 1, column 1: Expecting value"),
                ("import torch", "line 1, column 1: Expecting value"),
                (WHOLE_TEXT + "{}", "line 25, column 1: Extra data"),
            )
        ),
    ],
    ids=lambda text: text[-24:],
)
def test_a_text_with_a_field_twice_or_that_is_no_json_is_refused_by_its_place(text: str, told: str) -> None:
    assert refusal(lambda: profile_from_json(text, "run.json")) == f"run.json is not {told}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read.\n  No such file or directory"),
        (b"\xff", "is not JSON.\n  'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    assert refusal(lambda: profile_from_file(path)) == f"{path} {text}\n  {FORMAT}"


def read_with(**fields: Any) -> Profile:
    plain = {"undertow_profile": 1, "forward_us": 10, "backward_us": 30, "params": [{"name": "a", "bytes": 4, "ready_us": 30}]}
    return profile_from_json(json.dumps({name: it for name, it in (plain | fields).items() if it is not None}), "run.json")


def test_times_of_parameters_in_backward_stand_for_when_they_are_ready() -> None:
    rows = [{"name": name, "bytes": 4, "backward_us": us} for name, us in (("a", 5), ("b", 10), ("c", 15))]
    assert read_with(params=rows).ready_us == (30, 25, 15)


def test_a_forward_that_is_not_given_is_a_guess() -> None:
    guessed = read_with(forward_us=None)
    assert (guessed.forward_us, guessed.is_forward_guessed, read_with().is_forward_guessed) == (15, True, False)


def test_costs_may_be_a_line_or_have_a_size_several_times() -> None:
    line, repeated = (
        read_with(costs={"all_reduce": it}).costs()
        for it in ({"alpha_us": 50, "beta_us_per_mb": 800}, [[1000, 30], [1000, 10], [1000, 20], [4000, 40]])
    )
    assert line.collective_us("all_reduce", [0, 1e6, 1e10]) == pytest.approx([50, 850, 50 + 8e6])
    assert repeated.collective_us("all_reduce", [1000, 4000]).tolist() == [20, 40]


def test_what_a_run_says_of_its_ranks_is_in_the_file() -> None:
    said = {"launch_us": 90.5, "copy_us_per_mb": 200, "skew": 0.01, "spread": 0.02, "contention": 0.1}
    said |= {"processors_us": 3.5, "network_us": 700}
    found = read_with(**said)
    assert {name: getattr(found, name) for name in said} == said
    assert profile_from_json(found.to_json(), "run.json") == found


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"skew": 0.5}, "skew must be a share, 0 to 0.2, got 0.5"),
        ({"contention": 1.5}, "contention must be a share, 0 to 0.99, got 1.5"),
        ({"spread": math.inf}, "spread must be a share, zero or more, got inf"),
        # The median of these would be a time.
        ({"costs": {"all_reduce": [[100, 5], [100, -3], [100, 7], [1000, 9]]}}, "a cost curve is impossible: (100, -3)"),
        ({"costs": {"all_reduce": [[100, 5], [100, 6], [100, math.nan], [1000, 9]]}}, "a cost curve is impossible: (100, nan)"),
        (
            {"params": [{"name": name, "bytes": 4, "backward_us": 1500} for name in "ab"]},
            "the sum of params[...].backward_us must be at most backward_us, 2000.0, got 3000.0",
        ),
    ],
)
def test_effects_and_repeated_times_that_cannot_be_are_refused(changed: dict[str, Any], text: str) -> None:
    fields = {"undertow_profile": 1, "backward_us": 2000, "params": [{"name": "a", "bytes": 4, "ready_us": 1000}]}
    with pytest.raises(ConfigError) as refused:
        profile_from_json(json.dumps(fields | changed), "x.json")
    assert text in str(refused.value)
