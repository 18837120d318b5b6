from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import spec, specs_of_sizes
from undertow.plan import largest_first, observed, reverse_registration


@pytest.mark.parametrize(("num_params", "order"), [(0, ()), (1, (0,)), (4, (3, 2, 1, 0))])
def test_without_a_profile_the_last_parameter_is_ready_first(num_params: int, order: tuple[int, ...]) -> None:
    assert reverse_registration(num_params) == order


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [
        ([2, 0, 3, 1], (2, 0, 3, 1)),
        ([], (3, 2, 1, 0)),
        ([1], (1, 3, 2, 0)),
        ([0, 2], (0, 2, 3, 1)),
        ([2, 2, 0, 2, 0], (2, 0, 3, 1)),
    ],
    ids=["all", "none", "one", "some", "repeats"],
)
def test_observed_order_is_that_of_first_arrivals_and_then_of_the_missing(arrivals: list[int], order: tuple[int, ...]) -> None:
    assert observed(4, arrivals) == order


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1)))))
def test_observed_order_is_a_permutation(case: tuple[int, list[int]]) -> None:
    num_params, arrivals = case
    assert sorted(observed(num_params, arrivals)) == list(range(num_params))


def test_equal_sizes_keep_the_order_of_registration() -> None:
    assert largest_first(specs_of_sizes(20, 50, 20, 100, 50)) == (3, 1, 4, 0, 2)


def test_size_is_in_bytes_not_in_elements() -> None:
    assert largest_first([spec("short", 30, dtype="uint8"), spec("wide", 10, dtype="float64")]) == (1, 0)
