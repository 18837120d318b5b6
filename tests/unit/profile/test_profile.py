"""What was measured of a model, as a value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from support.errors import text_of
from support.strategies import spec
from undertow.cost import COLLECTIVES, CostCurve
from undertow.errors import ConfigError
from undertow.plan import Piece
from undertow.profile import Profile

CURVE = CostCurve(points=((1000, 60), (2000, 70)))


def profile(**changes: Any) -> Profile:
    """Three parameters, of which the last is ready first."""
    given = {
        "params": tuple(spec(name, 10) for name in ("a", "b", "c")),
        "ready_us": (40.0, 30.0, 10.0),
        "forward_us": 20.0,
        "backward_us": 40.0,
    }
    return Profile(**{**given, **changes})


def test_a_parameter_is_used_in_forward_as_late_as_it_is_ready_early_in_backward() -> None:
    assert profile().used_us == (0.0, 5.0, 15.0)


def test_a_parameter_that_is_ready_behind_backward_by_rounding_is_used_at_once() -> None:
    assert profile(ready_us=(41.0, 30.0, 0.0)).used_us == (0.0, 5.0, 20.0)


def test_without_a_backward_all_is_used_at_once() -> None:
    assert profile(ready_us=(0.0, 0.0, 0.0), backward_us=0.0).used_us == (0.0, 0.0, 0.0)


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


def test_a_profile_without_curves_has_no_costs() -> None:
    assert text_of(ConfigError, lambda: profile().costs().collective_us("all_reduce", 1)) == (
        "what all_reduce costs was not measured.\n  measured: nothing\n  Measure it, or name a link."
    )


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, "5", [], True, 10**400])
@pytest.mark.parametrize("field", ["forward_us", "backward_us", "update_us", "step_us"])
def test_a_time_that_is_none_is_refused_by_its_field(field: str, value: Any) -> None:
    text = text_of(ConfigError, lambda: profile(**{field: value}))
    assert text.startswith(f"{field} must be a number of microseconds, zero or more, got ")
    assert text.endswith(".\n  A millisecond is 1000. NaN and infinity are no times.")


@pytest.mark.parametrize("field", ["forward_us", "backward_us", "update_us"])
def test_a_time_that_a_step_needs_is_given(field: str) -> None:
    assert text_of(ConfigError, lambda: profile(**{field: None})).startswith(f"{field} must be a number of microseconds")


def test_the_time_of_the_whole_step_may_be_unknown() -> None:
    assert profile(step_us=None).step_us is None


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf, None])
def test_a_ready_time_that_is_none_is_refused_by_its_parameter(value: Any) -> None:
    assert text_of(ConfigError, lambda: profile(ready_us=(40.0, value, 10.0))) == (
        f"ready_us[1] ('b') must be a number of microseconds, zero or more, got {value!r}.\n"
        "  A millisecond is 1000. NaN and infinity are no times."
    )


def test_no_gradient_is_ready_behind_the_end_of_backward() -> None:
    assert text_of(ConfigError, lambda: profile(ready_us=(40.0, 41.5, 10.0))) == (
        "ready_us[1] ('b') must not be behind the end of backward, got 41.5.\n  backward_us is 40.0\n"
        "  Count from the beginning of backward; a gradient that never comes has backward_us."
    )


def test_no_two_parameters_have_the_same_name() -> None:
    assert text_of(ConfigError, lambda: profile(params=tuple(spec(name, 10) for name in ("a", "b", "a")))) == (
        "params[2].name must be another one than that of params[0], got 'a'.\n"
        "  Name each parameter once; a tied one has one name and one gradient."
    )


@pytest.mark.parametrize("ready_us", [(), (1.0, 2.0), (1.0, 2.0, 3.0, 4.0)])
def test_each_parameter_has_a_ready_time(ready_us: tuple[float, ...]) -> None:
    assert text_of(ConfigError, lambda: profile(ready_us=ready_us)) == (
        f"ready_us must have a time for each of 3 parameters, got {len(ready_us)}.\n"
        "  Give a ready time for each parameter, in the order of registration."
    )


@pytest.mark.parametrize("num_ranks", [0, -1, 2.0, True])
def test_a_run_has_one_rank_or_more(num_ranks: Any) -> None:
    assert text_of(ConfigError, lambda: profile(num_ranks=num_ranks)) == (
        f"num_ranks must be a whole number, 1 or more, got {num_ranks!r}.\n"
        "  Write a number such as 1, without a decimal point or quotes."
    )


def test_costs_of_an_unknown_kind_are_refused() -> None:
    assert text_of(ConfigError, lambda: profile(curves={"gossip": CURVE})) == (
        f"curves has the unknown kind 'gossip'.\n  Kinds of collectives: {', '.join(COLLECTIVES)}."
    )


def test_an_unknown_link_is_refused() -> None:
    assert text_of(ConfigError, lambda: profile(link="fast")).startswith("there is no link 'fast'.\n")


def test_an_unknown_strategy_is_refused() -> None:
    assert text_of(ConfigError, lambda: profile(strategy="zero9")) == (
        "there is no strategy 'zero9'.\n  strategy\n  Choose one of: 'ddp', 'zero1', 'zero2', 'hybrid'."
    )


@pytest.mark.parametrize(
    "groups", [((2,), (1, 0)), ((Piece(param=2, first=0, stop=4),), (Piece(param=2, first=4, stop=10), 1, 0))]
)
def test_buckets_may_hold_parameters_and_pieces_of_them(groups: Any) -> None:
    assert profile(groups=groups).groups == groups


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (
            ((2,), (1,)),
            "a plan must hold each of its 3 parameters exactly once.\n  first difference: parameter 0 ('a') is in 0 slots\n"
            "  Make the plan from the parameters of this model.",
        ),
        (
            ((2,), (1, 0, 2)),
            "a plan must hold each of its 3 parameters exactly once.\n  first difference: parameter 2 ('c') is in 2 slots\n"
            "  Make the plan from the parameters of this model.",
        ),
        (((2, 1, 0, 3),), "they name one that is not among the 3 parameters"),
    ],
)
def test_buckets_that_do_not_hold_each_parameter_once_are_refused(groups: Any, reason: str) -> None:
    assert text_of(ConfigError, lambda: profile(groups=groups)) == (
        f"buckets, the groups of a profile, do not fit the parameters.\n  {reason}"
    )
