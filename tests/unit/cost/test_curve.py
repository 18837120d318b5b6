"""Curves of what collectives cost, from points and from samples with noise."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.errors import text_of
from undertow.cost import CostCurve, curve_from_samples
from undertow.cost.curve import Line, line_through
from undertow.errors import ConfigError

KIB, MIB = 1024, 1024 * 1024
SIZES = [64 * KIB * 2**k for k in range(10)]


def affine(size: float) -> float:
    return 50 + size / 1000


def curve(*points: tuple[float, float]) -> CostCurve:
    return CostCurve(points=points)


curves = (
    st.dictionaries(st.integers(0, 2**34), st.floats(0.1, 1e8), min_size=1, max_size=12)
    .map(lambda times: tuple(sorted(times.items())))
    .map(lambda points: CostCurve(points=points))
)


def test_between_points_costs_grow_linearly() -> None:
    measured = curve((100, 10), (200, 30), (400, 40))
    assert measured.us([100, 125, 200, 300, 400]).tolist() == [10, 15, 30, 35, 40]


def test_a_single_size_gives_a_single_time() -> None:
    assert float(curve((100, 10), (200, 30)).us(150)) == 20


def test_sizes_of_any_shape_keep_it() -> None:
    assert curve((100, 10), (200, 30)).us([[100], [200]]).tolist() == [[10], [30]]


def test_beyond_the_last_point_the_slope_is_that_of_all_points() -> None:
    # The last time is 10 % too high: its own slope to the one before would be 1.2 of the true one.
    points = [(size, affine(size)) for size in SIZES]
    points[-1] = (points[-1][0], 1.1 * points[-1][1])
    last_size, last_time = points[-1]
    assert float(curve(*points).us(last_size + 1e6)) == pytest.approx(last_time + 1000, rel=1e-12)


@pytest.mark.parametrize(
    "points",
    [
        ((1e6, 100), (2e6, 150)),
        ((0, 50), (2e6, 150)),
        ((1e6, 100), (1.4e6, 120), (2e6, 150)),  # three sizes, of which no three lie apart
    ],
)
def test_beyond_the_last_of_two_sizes_costs_are_in_proportion_to_it(points: tuple[tuple[float, float], ...]) -> None:
    assert CostCurve(points=points).us([2e6, 4e6, 1e9]) == pytest.approx([150, 300, 75_000], rel=1e-12)


def test_beyond_the_last_of_three_sizes_that_lie_apart_their_slope_counts() -> None:
    # On the line of 50 us and 50 us per 1e6 bytes.
    assert float(curve((1e6, 100), (1.5e6, 125), (2.25e6, 162.5)).us(1e9)) == pytest.approx(50_050, rel=1e-12)


def test_below_the_first_point_costs_go_towards_the_latency_of_all_points() -> None:
    measured = curve(*((size, affine(size)) for size in SIZES))
    assert measured.us([0, SIZES[0] / 2]) == pytest.approx([50, affine(SIZES[0] / 2)], rel=1e-9)


def test_the_latency_is_never_above_the_first_time() -> None:
    # A line through the larger sizes alone would begin at 100.
    measured = curve((100, 20), (1000, 200), (2000, 300), (4000, 500), (8000, 900), (16000, 1700))
    assert float(measured.us(0)) <= 20


def test_a_point_of_no_bytes_is_the_latency() -> None:
    assert curve((0, 7), (1000, 8)).us([0, 500]).tolist() == [7, 7.5]


@pytest.mark.parametrize("points", [((1000, 30),), ((1000, 30), (1200, 30)), ((1000, 29), (1499, 30))])
def test_sizes_that_lie_close_are_not_enough_and_err_on_the_safe_side(points: tuple[tuple[float, float], ...]) -> None:
    measured = CostCurve(points=points)
    last_size, last_time = points[-1]
    assert not measured.is_enough
    assert float(measured.us(0)) == points[0][1]
    assert float(measured.us(10 * last_size)) == pytest.approx(10 * last_time, rel=1e-12)


@pytest.mark.parametrize("points", [((1000, 30), (1500, 40)), ((0, 30), (1, 40))])
def test_sizes_that_lie_apart_are_enough(points: tuple[tuple[float, float], ...]) -> None:
    assert CostCurve(points=points).is_enough


def test_a_time_of_no_bytes_alone_is_that_of_any_size() -> None:
    measured = curve((0, 30))
    assert (measured.is_enough, measured.us([0, 10**9]).tolist()) == (False, [30, 30])


def test_times_that_decrease_are_evened_out() -> None:
    assert curve((1, 48), (2, 116), (3, 115), (4, 180)).points == ((1, 48), (2, 115), (3, 115), (4, 180))


@given(curves)
def test_evening_out_again_changes_nothing(measured: CostCurve) -> None:
    assert CostCurve(points=measured.points) == measured


@given(curves, st.lists(st.floats(0, 1e13), min_size=2, max_size=40))
def test_a_larger_payload_never_costs_less(measured: CostCurve, sizes: list[float]) -> None:
    times = measured.us(sorted([*sizes, *(size for size, _ in measured.points)]))
    # A unit in the last place of sums and products of such times: 1e-15 of them, a hundredfold.
    assert (np.diff(times) >= -1e-13 * times[1:]).all()
    assert (times >= 0).all()


@given(curves)
def test_there_is_no_step_at_the_last_point(measured: CostCurve) -> None:
    last_size, last_time = measured.points[-1]
    assert float(measured.us(last_size)) == last_time
    assert float(measured.us(np.nextafter(last_size, math.inf))) == pytest.approx(last_time, rel=1e-9)


def test_a_curve_survives_pickling() -> None:
    measured = curve((100, 10), (200, 30))
    copy = pickle.loads(pickle.dumps(measured))
    assert (copy, copy.us(150)) == (measured, 20)


@pytest.mark.parametrize(
    ("points", "text"),
    [
        ((), "a cost curve needs one point at least.\n  Measure one size or more."),
        (
            ((1, 1), (2, 0)),
            "point 1 of a cost curve is impossible: (2, 0).\n"
            "  A point is a size of zero bytes or more and a time of more than zero microseconds.",
        ),
        (
            ((10, 1), (10, 2)),
            "point 1 of a cost curve has 10 bytes and follows one of 10.\n  Sort the points by size, each size once.",
        ),
        (
            ((1, 1), (20.5, 1), (10, 2)),
            "point 2 of a cost curve has 10 bytes and follows one of 20.5.\n  Sort the points by size, each size once.",
        ),
    ],
)
def test_impossible_points_are_refused_by_their_index(points: Any, text: str) -> None:
    assert text_of(ConfigError, lambda: CostCurve(points=points)) == text


@pytest.mark.parametrize(
    "point",
    [(-1, 1), (math.nan, 1), (math.inf, 1), (1, -1), (1, math.nan), (1, math.inf), (1,), (1, 2, 3), 5, ("a", 1), (1, 10**400)],
)
def test_a_point_that_is_no_size_and_time_is_refused(point: Any) -> None:
    assert text_of(ConfigError, lambda: CostCurve(points=(point,))).startswith("point 0 of a cost curve is impossible: ")


def test_samples_of_a_size_are_one_point_at_their_median() -> None:
    assert curve_from_samples([(200, 40), (100, 9), (100, 500), (100, 10)]).points == ((100, 10), (200, 40))


def test_samples_whose_sizes_differ_by_two_percent_are_of_one_size() -> None:
    assert curve_from_samples([(1000, 8), (1010, 9), (1020, 10), (1021, 11)]).points == ((1010, 9), (1021, 11))


def test_an_even_number_of_samples_counts_as_the_lower_in_the_middle() -> None:
    assert curve_from_samples([(100, 10), (100, 1000)]).points == ((100, 10),)


def test_samples_of_sizes_whose_medians_decrease_are_pooled_by_their_number() -> None:
    # Two at 100 bytes are outvoted by three at 200: the median of all five is theirs.
    samples = [(100, 30), (100, 31), (200, 20), (200, 21), (200, 22)]
    assert curve_from_samples(samples).points == ((100, 22), (200, 22))


@st.composite
def noisy_samples(draw: st.DrawFn) -> list[tuple[float, float]]:
    """Ten of each size, 5 % to either side of `affine`, up to four of them ten times as slow."""
    samples = []
    for size in SIZES:
        noise = draw(st.lists(st.floats(0.95, 1.05), min_size=10, max_size=10))
        num_slow = draw(st.integers(0, 4))
        samples += [(float(size), affine(size) * factor * (10 if i < num_slow else 1)) for i, factor in enumerate(noise)]
    return draw(st.permutations(samples))


@settings(max_examples=40, deadline=None)
@given(noisy_samples())
def test_a_curve_is_recovered_from_noise_and_outliers(samples: list[tuple[float, float]]) -> None:
    # The sixth of ten at most is no outlier, so the lower median is not: 5 % off. The median of a pool lies between those
    # of its sizes, of which the smaller size's is the greater one: 5 % off both. Between two such points it is no more.
    sizes = np.linspace(SIZES[0], SIZES[-1], 200)
    assert curve_from_samples(samples).us(sizes) == pytest.approx(affine(sizes), rel=0.05 + 1e-12)


@given(st.integers(0, 9))
def test_an_outlier_alone_at_its_size_takes_the_time_of_the_next(first: int) -> None:
    sizes = [1000 * 1.2**k for k in range(41)]
    samples = [(size, affine(size) * (10 if i % 10 == first and i < 40 else 1)) for i, size in enumerate(sizes)]
    recovered = curve_from_samples(samples).us(sizes)
    assert (recovered >= affine(np.array(sizes)) * (1 - 1e-12)).all()
    # Sizes are 1.2 apart, so times are no more than that.
    assert (recovered <= 1.2 * affine(np.array(sizes))).all()


def test_no_samples_are_refused() -> None:
    assert text_of(ConfigError, lambda: curve_from_samples([])) == (
        "there are no samples to make a cost curve of.\n  Measure one size or more."
    )


def test_an_impossible_sample_is_refused_by_its_index() -> None:
    assert text_of(ConfigError, lambda: curve_from_samples([(5, 1), (1, math.nan)])) == (
        "point 1 of samples is impossible: (1, nan).\n"
        "  A point is a size of zero bytes or more and a time of more than zero microseconds."
    )


@given(st.floats(0, 1e4), st.floats(1e-6, 1), st.integers(0, 9))
def test_the_line_of_points_on_a_line_is_found_past_an_outlier(latency_us: float, us_per_byte: float, slow: int) -> None:
    points = [(size, (latency_us + us_per_byte * size) * (10 if i == slow else 1)) for i, size in enumerate(SIZES)]
    line = line_through(points)
    # The line of the other nine, or one that goes through most of them: costs are compared, which hide a small latency.
    expected = [latency_us + us_per_byte * size for size in SIZES]
    found = [line.latency_us + line.us_per_byte * size for size in SIZES]
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_line_has_neither_a_negative_latency_nor_a_negative_slope() -> None:
    assert line_through([(1, 10), (2, 30), (3, 50)]).latency_us == 0
    assert line_through([(1, 10), (2, 9), (3, 8)]) == Line(latency_us=9, us_per_byte=0)


def test_a_line_through_many_points_is_that_of_some() -> None:
    points = [(1000 * 1.01**k, affine(1000 * 1.01**k)) for k in range(1000)]
    line = line_through(points)
    assert (line.latency_us, line.us_per_byte) == pytest.approx((50, 1e-3), rel=1e-9)
