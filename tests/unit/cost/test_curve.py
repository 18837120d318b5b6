"""Curves of what collectives cost, from points and from samples with noise."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import Call, refusal
from undertow.cost import CostCurve, curve_from_samples
from undertow.cost.curve import Line, line_through

Points = tuple[tuple[float, float], ...]
SIZES = [64 * 1024 * 2**k for k in range(10)]


def affine(size: Any) -> Any:
    return 50 + size / 1000


LINEAR = tuple((size, affine(size)) for size in SIZES)
# The last time is 10 % too high: its own slope to the one before would be 1.2 of the true one.
BENT = (*LINEAR[:-1], (SIZES[-1], 1.1 * affine(SIZES[-1])))
curves = (
    st.dictionaries(st.integers(0, 2**34), st.floats(0.1, 1e8), min_size=1, max_size=12)
    .map(lambda times: tuple(sorted(times.items())))
    .map(lambda points: CostCurve(points=points))
)

COSTS: dict[str, tuple[Points, Any, Any]] = {
    "between points linearly": (((100, 10), (200, 30), (400, 40)), [100, 125, 200, 300, 400], [10, 15, 30, 35, 40]),
    "a single size": (((100, 10), (200, 30)), 150, 20),
    "beyond the last point by the slope of all": (BENT, SIZES[-1] + 1e6, BENT[-1][1] + 1000),
    "beyond the last of two sizes in proportion to it": (((1e6, 100), (2e6, 150)), [2e6, 4e6, 1e9], [150, 300, 75_000]),
    "in proportion, one of no bytes": (((0, 50), (2e6, 150)), [2e6, 4e6, 1e9], [150, 300, 75_000]),
    # Three sizes, of which no three lie apart.
    "in proportion, two close together": (((1e6, 100), (1.4e6, 120), (2e6, 150)), [2e6, 4e6, 1e9], [150, 300, 75_000]),
    # On the line of 50 us and 50 us per 1e6 bytes.
    "beyond the last of three that lie apart by their slope": (((1e6, 100), (1.5e6, 125), (2.25e6, 162.5)), [1e9], [50_050]),
    "below the first point towards the latency of all": (LINEAR, [0, SIZES[0] / 2], [50, affine(SIZES[0] / 2)]),
    "a point of no bytes is the latency": (((0, 7), (1000, 8)), [0, 500], [7, 7.5]),
    "no bytes alone are any size": (((0, 30),), [0, 10**9], [30, 30]),
    **{
        f"close together errs on the safe side: {points}": (points, [0, 10 * points[-1][0]], [points[0][1], 10 * points[-1][1]])
        for points in (((1000, 30),), ((1000, 30), (1200, 30)), ((1000, 29), (1499, 30)))
    },
}


@pytest.mark.parametrize(("points", "sizes", "expected_us"), COSTS.values(), ids=COSTS)
def test_the_cost_of_a_size(points: Points, sizes: Any, expected_us: Any) -> None:
    assert CostCurve(points=points).us(sizes) == pytest.approx(np.array(expected_us), rel=1e-9)


def test_points_and_sizes_of_any_shape_are_kept_to_the_bit() -> None:
    measured = CostCurve(points=((100, 10), (200, 30), (400, 40)))
    assert measured.us([[100], [125], [400]]).tolist() == [[10], [15], [40]]
    copy = pickle.loads(pickle.dumps(measured))
    assert (copy, copy.us(150)) == (measured, 20)


def test_the_latency_is_never_above_the_first_time() -> None:
    # A line through the larger sizes alone would begin at 100.
    measured = CostCurve(points=((100, 20), (1000, 200), (2000, 300), (4000, 500), (8000, 900), (16000, 1700)))
    assert float(measured.us(0)) <= 20


@pytest.mark.parametrize(
    ("points", "is_enough"),
    [
        (((1000, 30),), False),
        (((1000, 30), (1200, 30)), False),
        (((1000, 29), (1499, 30)), False),
        (((0, 30),), False),
        (((1000, 30), (1500, 40)), True),
        (((0, 30), (1, 40)), True),
    ],
)
def test_sizes_that_lie_apart_are_enough(points: Points, is_enough: bool) -> None:
    assert CostCurve(points=points).is_enough == is_enough


def test_times_that_decrease_are_evened_out() -> None:
    assert CostCurve(points=((1, 48), (2, 116), (3, 115), (4, 180))).points == ((1, 48), (2, 115), (3, 115), (4, 180))


@given(curves, st.lists(st.floats(0, 1e13), min_size=2, max_size=40))
def test_a_larger_payload_never_costs_less(measured: CostCurve, sizes: list[float]) -> None:
    assert CostCurve(points=measured.points) == measured  # evening out again changes nothing
    times = measured.us(sorted([*sizes, *(size for size, _ in measured.points)]))
    # A unit in the last place of sums and products of such times: 1e-15 of them, a hundredfold.
    assert (np.diff(times) >= -1e-13 * times[1:]).all()
    assert (times >= 0).all()
    last_size, last_time = measured.points[-1]
    assert float(measured.us(last_size)) == last_time
    assert float(measured.us(np.nextafter(last_size, math.inf))) == pytest.approx(last_time, rel=1e-9)


IMPOSSIBLE = "A point is a size of zero bytes or more and a time of more than zero microseconds."
REFUSALS: dict[str, Call] = {
    "a cost curve needs one point at least.\n  Measure one size or more.": lambda: CostCurve(points=()),
    f"point 1 of a cost curve is impossible: (2, 0).\n  {IMPOSSIBLE}": lambda: CostCurve(points=((1, 1), (2, 0))),
    "point 1 of a cost curve has 10 bytes and follows one of 10.\n  Sort the points by size, each size once.": lambda: CostCurve(
        points=((10, 1), (10, 2))
    ),
    "point 2 of a cost curve has 10 bytes and follows one of 20.5.\n  Sort the points by size, each size once.": lambda: (
        CostCurve(points=((1, 1), (20.5, 1), (10, 2)))
    ),
    "there are no samples to make a cost curve of.\n  Measure one size or more.": lambda: curve_from_samples([]),
    f"point 1 of samples is impossible: (1, nan).\n  {IMPOSSIBLE}": lambda: curve_from_samples([(5, 1), (1, math.nan)]),
}


@pytest.mark.parametrize("text", REFUSALS)
def test_what_is_no_curve_is_refused(text: str) -> None:
    assert refusal(REFUSALS[text]) == text


@pytest.mark.parametrize(
    "point",
    [(-1, 1), (math.nan, 1), (math.inf, 1), (1, -1), (1, math.nan), (1, math.inf), (1,), (1, 2, 3), 5, ("a", 1), (1, 10**400)],
)
def test_a_point_that_is_no_size_and_time_is_refused(point: Any) -> None:
    assert refusal(lambda: CostCurve(points=(point,))).startswith("point 0 of a cost curve is impossible: ")


@pytest.mark.parametrize(
    ("samples", "points"),
    [
        ([(200, 40), (100, 9), (100, 500), (100, 10)], ((100, 10), (200, 40))),
        ([(1000, 8), (1010, 9), (1020, 10), (1021, 11)], ((1010, 9), (1021, 11))),
        ([(100, 10), (100, 1000)], ((100, 10),)),
        # Two at 100 bytes are outvoted by three at 200: the median of all five is theirs.
        ([(100, 30), (100, 31), (200, 20), (200, 21), (200, 22)], ((100, 22), (200, 22))),
    ],
    ids=["one point at the median", "two percent are one size", "the lower in the middle", "medians that decrease are pooled"],
)
def test_samples_become_points(samples: list[tuple[float, float]], points: Points) -> None:
    assert curve_from_samples(samples).points == points


@given(st.floats(0, 1e4), st.floats(1e-6, 1), st.integers(0, 9))
def test_the_line_of_points_on_a_line_is_found_past_an_outlier(latency_us: float, us_per_byte: float, slow: int) -> None:
    expected = [latency_us + us_per_byte * size for size in SIZES]
    line = line_through([(size, us * (10 if i == slow else 1)) for i, (size, us) in enumerate(zip(SIZES, expected, strict=True))])
    # The line of the other nine, or one that goes through most of them: costs are compared, which hide a small latency.
    assert [line.latency_us + line.us_per_byte * size for size in SIZES] == pytest.approx(expected, rel=1e-6)


def test_a_line_has_neither_a_negative_latency_nor_a_negative_slope() -> None:
    assert line_through([(1, 10), (2, 30), (3, 50)]).latency_us == 0
    assert line_through([(1, 10), (2, 9), (3, 8)]) == Line(latency_us=9, us_per_byte=0)


def test_a_line_through_many_points_is_that_of_some() -> None:
    line = line_through([(1000 * 1.01**k, affine(1000 * 1.01**k)) for k in range(1000)])
    assert (line.latency_us, line.us_per_byte) == pytest.approx((50, 1e-3), rel=1e-9)
