"""What collectives cost: by formula, by measurement, and by curves of either."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import Call, refusal
from undertow.cost import (
    COLLECTIVES,
    CostCurve,
    Costs,
    HalvingDoublingCosts,
    HierarchicalCosts,
    Link,
    MeasuredCosts,
    MeshCosts,
    RingCosts,
    TransferredCosts,
    collective_seconds,
    curve_from_samples,
    link_from_text,
)
from undertow.cost.curve import Line, line_through

# A byte per microsecond and 10 or 100 us per hop, so that a cost shows its parts; a byte is added in half the time it travels.
LINK = Link(name="plain", hop_s=10e-6, bytes_per_s=1e6)
SLOW = Link(name="slow", hop_s=100e-6, bytes_per_s=1e6)
REDUCTION = 0.5e-6
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
OF_KINDS = ", ".join(KINDS)
NODES = HierarchicalCosts(inside=RingCosts(LINK, num_ranks=4), across=RingCosts(SLOW, num_ranks=3), per_node=4)
CURVES = {
    "all_reduce": CostCurve(points=((1000, 100), (2000, 150))),
    "reduce_scatter": CostCurve(points=((1000, 60), (2000, 90))),
    "all_gather": CostCurve(points=((1000, 50), (2000, 80))),
}


def us(costs: Costs, kind: str, num_bytes: float = 1200) -> float:
    return float(costs.collective_us(kind, num_bytes))


# Four ranks: three quarters of 1200 bytes are 900 us on the link and, where they are added, 450 us more.
@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (RingCosts(LINK, num_ranks=4), (60 + 1800, 30 + 900, 30 + 900)),
        (RingCosts(LINK, num_ranks=4, reduction_s_per_byte=REDUCTION), (60 + 1800 + 450, 30 + 900 + 450, 30 + 900)),
        (HalvingDoublingCosts(LINK, num_ranks=4), (40 + 1800, 20 + 900, 20 + 900)),
        (HalvingDoublingCosts(LINK, num_ranks=4, reduction_s_per_byte=REDUCTION), (40 + 1800 + 450, 20 + 900 + 450, 20 + 900)),
        (HalvingDoublingCosts(LINK, num_ranks=8), (60 + 2100, 30 + 1050, 30 + 1050)),
        (RingCosts(LINK, num_ranks=1), (0, 0, 0)),
        (HalvingDoublingCosts(LINK, num_ranks=1), (0, 0, 0)),
        # A quarter of the payload, 300 bytes, crosses between three nodes: two thirds of it 400 or 200 us, two hops 200 us.
        (NODES, (930 + 400 + 400 + 930, 930 + 200 + 200, 930 + 200 + 200)),
    ],
    ids=["ring", "ring that adds", "halving", "halving that adds", "halving of eight", "one rank", "halving of one", "nodes"],
)
def test_cost_of_1200_bytes(costs: Costs, expected: tuple[float, ...]) -> None:
    # Floats of a dozen operations: 1e-12 is a thousand units in the last place.
    assert tuple(us(costs, kind) for kind in KINDS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", sorted(COLLECTIVES))
def test_a_ring_costs_what_the_emulated_link_charges(kind: str) -> None:
    seconds = collective_seconds(LINK, kind, num_bytes=1200, num_ranks=5)
    assert us(RingCosts(LINK, num_ranks=5), kind) == pytest.approx(1e6 * seconds, rel=1e-12)


@pytest.mark.parametrize("costs", [RingCosts(LINK, num_ranks=4), NODES, MeasuredCosts(CURVES)])
def test_costs_have_the_shape_of_the_sizes(costs: Costs) -> None:
    assert costs.collective_us("all_reduce", [[1, 2], [4, 5]]).tolist() == [
        [us(costs, "all_reduce", size) for size in row] for row in ((1, 2), (4, 5))
    ]


POSITIVE = "Give a positive number of ranks."
MEASURE = "Measure it, or name a link."
IMPOSSIBLE = "A point is a size of zero bytes or more and a time of more than zero microseconds."
ONCE = "Sort the points by size, each size once."
REFUSALS: dict[str, tuple[Call, str]] = {
    **{
        f"a curve of {points}": (lambda points=points: CostCurve(points=points), text)
        for points, text in (
            ((), "a cost curve needs one point at least.\n  Measure one size or more."),
            (((1, 1), (2, 0)), f"point 1 of a cost curve is impossible: (2, 0).\n  {IMPOSSIBLE}"),
            (((10, 1), (10, 2)), f"point 1 of a cost curve has 10 bytes and follows one of 10.\n  {ONCE}"),
            (((1, 1), (20.5, 1), (10, 2)), f"point 2 of a cost curve has 10 bytes and follows one of 20.5.\n  {ONCE}"),
        )
    },
    "no samples": (
        lambda: curve_from_samples([]),
        "there are no samples to make a cost curve of.\n  Measure one size or more.",
    ),
    "a sample that is no number": (
        lambda: curve_from_samples([(5, 1), (1, math.nan)]),
        f"point 1 of samples is impossible: (1, nan).\n  {IMPOSSIBLE}",
    ),
    **{
        f"halving and doubling of {num_ranks}": (
            lambda num_ranks=num_ranks: HalvingDoublingCosts(LINK, num_ranks=num_ranks),
            f"halving and doubling needs a power of two of ranks, got num_ranks={num_ranks}.\n  Use RingCosts.",
        )
        for num_ranks in (3, 6, 100)
    },
    **{
        f"{name} of {num_ranks}": (
            lambda make=make, num_ranks=num_ranks: make(num_ranks),
            f"a collective is one of one rank or more, got {num_ranks}.\n  {POSITIVE}",
        )
        for num_ranks in (0, -2)
        for name, make in {
            "a ring": lambda num: RingCosts(LINK, num_ranks=num),
            "halving": lambda num: HalvingDoublingCosts(LINK, num_ranks=num),
            "nodes": lambda num: HierarchicalCosts(inside=NODES, across=NODES, per_node=num),
            "a mesh": lambda num: MeshCosts(inside=NODES, across=NODES, per_node=num),
        }.items()
    },
    **{
        f"a byte added in {s_per_byte}": (
            lambda s_per_byte=s_per_byte: RingCosts(LINK, num_ranks=2, reduction_s_per_byte=s_per_byte),
            f"to add a byte cannot take {s_per_byte} s.\n  Give seconds per byte, zero or more.",
        )
        for s_per_byte in (-1e-9, math.nan, math.inf)
    },
    **{
        f"gossip: {text}": (lambda costs=costs: costs.collective_us("gossip", 1), text)
        for costs, text in (
            (RingCosts(LINK, num_ranks=2), f"there is no gossip over a ring.\n  Choose one of: {', '.join(COLLECTIVES)}."),
            (
                HalvingDoublingCosts(LINK, num_ranks=2),
                f"there is no gossip over halving and doubling.\n  Choose one of: {OF_KINDS}.",
            ),
            (NODES, f"there is no gossip over nodes.\n  Choose one of: {OF_KINDS}."),
            (
                MeasuredCosts(CURVES),
                f"what gossip costs was not measured.\n  measured: all_gather, all_reduce, reduce_scatter\n  {MEASURE}",
            ),
        )
    },
    "nothing measured": (
        lambda: MeasuredCosts({}).collective_us("all_reduce", 1),
        f"what all_reduce costs was not measured.\n  measured: nothing\n  {MEASURE}",
    ),
    "what stands for nothing else": (
        lambda: MeasuredCosts({"broadcast": CURVES["all_reduce"]}).collective_us("all_reduce", 1),
        f"what all_reduce costs was not measured.\n  measured: broadcast\n  {MEASURE}",
    ),
}


@pytest.mark.parametrize(("call", "text"), REFUSALS.values(), ids=REFUSALS)
def test_costs_that_there_are_not_are_refused(call: Call, text: str) -> None:
    assert refusal(call) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_was_measured_costs_what_it_did(kind: str) -> None:
    sizes = [0, 1000, 1500, 2000, 10**6]
    assert MeasuredCosts(CURVES).collective_us(kind, sizes).tolist() == CURVES[kind].us(sizes).tolist()


@pytest.mark.parametrize(
    ("measured", "kind", "expected_us"),
    [
        (("all_reduce",), "reduce_scatter", 75),
        (("all_reduce",), "all_gather", 75),
        (("all_reduce", "reduce_scatter"), "all_gather", 90),
        (("all_reduce", "all_gather"), "reduce_scatter", 80),
        (("reduce_scatter", "all_gather"), "all_reduce", 170),
        (("reduce_scatter",), "all_reduce", 180),
        (("all_gather",), "all_reduce", 160),
    ],
)
def test_a_kind_that_was_not_measured_costs_what_its_parts_do(measured: tuple[str, ...], kind: str, expected_us: float) -> None:
    assert us(MeasuredCosts({known: CURVES[known] for known in measured}), kind, 2000) == expected_us


ONE, TEN = (RingCosts(link_from_text(text), num_ranks=4) for text in ("1gbit", "10gbit"))
FAR = [0.0, 1e3, 1e5, 1e6, 2e6, 4e6, 1e7, 1e8, 1e9]


def transferred(*above: tuple[float, float]) -> TransferredCosts:
    """To another network, from one of which at these sizes such times were measured above its formula."""
    curves = {kind: CostCurve(points=tuple((size, us(ONE, kind, size) + more_us) for size, more_us in above)) for kind in KINDS}
    return TransferredCosts(measured=MeasuredCosts(curves), was=ONE, wanted=TEN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("costs", "above_us"),
    [
        (transferred((1e3, 70.0), (1e5, 70.0), (1e7, 70.0)), 70.0),
        (transferred((1e3, -50.0), (1e5, -50.0), (1e7, -50.0)), 0.0),
        # A line through them says 2 ms of no bytes, which the larger one did not take.
        (transferred((1e6, 2000.0), (2e6, -1000.0)), 0.0),
    ],
    ids=["software stays", "what was faster than its formula", "what two noisy sizes say of none is no software"],
)
def test_costs_on_another_network(kind: str, costs: Costs, above_us: float) -> None:
    # Floats of a dozen operations on times below 1e7 us: a thousand units in the last place.
    expected = TEN.collective_us(kind, FAR) + above_us
    assert costs.collective_us(kind, FAR) == pytest.approx(expected, rel=0, abs=1e-6 if above_us else 0)


def test_the_same_network_costs_what_was_measured() -> None:
    measured = MeasuredCosts({"all_reduce": CostCurve(points=((1e3, 700), (1e6, 20_000), (1e8, 2e6)))})
    same, was = (
        costs.collective_us("all_reduce", FAR[1:])
        for costs in (TransferredCosts(measured=measured, was=ONE, wanted=ONE), measured)
    )
    assert same == pytest.approx(was, rel=1e-12)


@given(
    st.dictionaries(st.integers(0, 2**34), st.floats(0.1, 1e8), min_size=1, max_size=6),
    st.lists(st.floats(0, 1e13), min_size=2, max_size=30),
)
def test_a_larger_payload_never_costs_less_on_another_network(times: dict[int, float], sizes: list[float]) -> None:
    measured = MeasuredCosts({"all_reduce": CostCurve(points=tuple(sorted(times.items())))})
    found = TransferredCosts(measured=measured, was=ONE, wanted=TEN).collective_us("all_reduce", sorted(sizes))
    # A unit in the last place of sums and products of such times: 1e-15 of them, a hundredfold.
    assert (np.diff(found) >= -1e-13 * found[1:]).all()


def test_on_a_mesh_only_reductions_cross_and_only_with_shards() -> None:
    inside, across = RingCosts(LINK, num_ranks=4), RingCosts(SLOW, num_ranks=3)
    mesh = MeshCosts(inside=inside, across=across, per_node=4)
    crossing = us(across, "all_reduce", 300)
    assert us(mesh, "reduce_scatter") == us(inside, "reduce_scatter") + crossing
    assert us(mesh, "all_gather") == us(inside, "all_gather")
    assert us(mesh, "all_reduce") == us(inside, "reduce_scatter") + crossing + us(inside, "all_gather")


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
