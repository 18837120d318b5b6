"""What was measured of a model, as a value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from support.errors import text_of
from support.strategies import spec
from undertow.cost import COLLECTIVES, CostCurve, link_from_text
from undertow.errors import ConfigError
from undertow.plan import Piece
from undertow.profile import Profile

CURVE = CostCurve(points=((1000, 60), (2000, 70)))
GIVEN = "must be a number of microseconds, zero or more, got"
TIMES = "A millisecond is 1000. NaN and infinity are no times."
ONCE = "buckets, the groups of a profile, do not fit the parameters.\n  a plan must hold each of its 3 parameters exactly once.\n"
MAKE = "\n  Make the plan from the parameters of this model."


def profile(**changes: Any) -> Profile:
    """Three parameters, of which the last is ready first."""
    params = tuple(spec(name, 10) for name in ("a", "b", "c"))
    given = {"params": params, "ready_us": (40.0, 30.0, 10.0), "forward_us": 20.0, "backward_us": 40.0}
    return Profile(**{**given, **changes})


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


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{field} of {str(value)[:8]}": ({field: value}, f"{field} {GIVEN} {shown}.\n  {TIMES}")
        for field in ("forward_us", "backward_us", "update_us", "step_us")
        for value, shown in (
            *((value, repr(value)) for value in (-1.0, math.nan, math.inf, -math.inf, "5", [], True)),
            (10**400, "100000000000000000...0000000000000000000"),
        )
    },
    # Needed, unlike that of the step.
    **{
        f"{field} of None": ({field: None}, f"{field} {GIVEN} None.\n  {TIMES}")
        for field in ("forward_us", "backward_us", "update_us")
    },
    **{
        f"a ready time of {value}": ({"ready_us": (40.0, value, 10.0)}, f"ready_us[1] ('b') {GIVEN} {value!r}.\n  {TIMES}")
        for value in (-0.5, math.nan, math.inf, None)
    },
    "ready behind the end of backward": (
        {"ready_us": (40.0, 41.5, 10.0)},
        "ready_us[1] ('b') must not be behind the end of backward, got 41.5.\n  backward_us is 40.0\n"
        "  Count from the beginning of backward; a gradient that never comes has backward_us.",
    ),
    "a name twice": (
        {"params": tuple(spec(name, 10) for name in ("a", "b", "a"))},
        "params[2].name must be another one than that of params[0], got 'a'.\n"
        "  Name each parameter once; a tied one has one name and one gradient.",
    ),
    **{
        f"{num} ready times": (
            {"ready_us": (1.0,) * num},
            f"ready_us must have a time for each of 3 parameters, got {num}.\n"
            "  Give a ready time for each parameter, in the order of registration.",
        )
        for num in (0, 2, 4)
    },
    **{
        f"{num!r} ranks": (
            {"num_ranks": num},
            f"num_ranks must be a whole number, 1 or more, got {num!r}.\n"
            "  Write a number such as 1, without a decimal point or quotes.",
        )
        for num in (0, -1, 2.0, True)
    },
    "costs of an unknown kind": (
        {"curves": {"gossip": CURVE}},
        f"curves has the unknown kind 'gossip'.\n  Kinds of collectives: {', '.join(COLLECTIVES)}.",
    ),
    "an unknown strategy": (
        {"strategy": "zero9"},
        "there is no strategy 'zero9'.\n  strategy\n  Choose one of: 'ddp', 'zero1', 'zero2', 'hybrid'.",
    ),
    "an unknown link": ({"link": "fast"}, text_of(ConfigError, lambda: link_from_text("fast"))),
    "a parameter in no bucket": (
        {"groups": ((2,), (1,))},
        f"{ONCE}  first difference: parameter 0 ('a') is in 0 slots{MAKE}",
    ),
    "a parameter in two buckets": (
        {"groups": ((2,), (1, 0, 2))},
        f"{ONCE}  first difference: parameter 2 ('c') is in 2 slots{MAKE}",
    ),
    "a bucket of a parameter that there is not": (
        {"groups": ((2, 1, 0, 3),)},
        "buckets, the groups of a profile, do not fit the parameters.\n  they name one that is not among the 3 parameters",
    ),
}


@pytest.mark.parametrize(("changes", "text"), REFUSALS.values(), ids=REFUSALS)
def test_what_no_model_has_is_refused_by_its_field(changes: dict[str, Any], text: str) -> None:
    assert text_of(ConfigError, lambda: profile(**changes)) == text
