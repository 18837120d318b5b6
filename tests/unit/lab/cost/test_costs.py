"""Costs of collectives: by formula, by measurement, over links and networks."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import Call, refusal
from undertow.lab.cost import (
    COLLECTIVES,
    LINKS,
    CostCurve,
    Costs,
    Link,
    MeasuredCosts,
    NodeCosts,
    Payload,
    RingCosts,
    collective_seconds,
    costs_for,
    curve_from_samples,
    link_from_text,
    payloads_us,
)
from undertow.lab.cost.curves import line_through
from undertow.wire import WIRES

# A byte per microsecond and 10 or 100 us per hop, so that a cost shows its parts.
LINK, SLOW = Link(name="plain", hop_s=10e-6, bytes_per_s=1e6), Link(name="slow", hop_s=100e-6, bytes_per_s=1e6)
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
NODES = NodeCosts(inside=RingCosts(LINK, num_ranks=4), across=RingCosts(SLOW, num_ranks=3), per_node=4)
CURVES = {
    "all_reduce": CostCurve(points=((1000, 100), (2000, 150))),
    "reduce_scatter": CostCurve(points=((1000, 60), (2000, 90))),
    "all_gather": CostCurve(points=((1000, 50), (2000, 80))),
}


def us(costs: Costs, kind: str, num_bytes: float = 1200) -> float:
    return float(costs.collective_us(kind, num_bytes))


# Four ranks: three quarters of 1200 bytes are 900 us on the link.
@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (RingCosts(LINK, num_ranks=4), (60 + 1800, 30 + 900, 30 + 900)),
        (RingCosts(LINK, num_ranks=1), (0, 0, 0)),
        # A quarter of the payload, 300 bytes, crosses between three nodes: two thirds of it 400 or 200 us, two hops 200 us.
        (NODES, (930 + 400 + 400 + 930, 930 + 200 + 200, 930 + 200 + 200)),
    ],
    ids=["ring", "one rank", "nodes"],
)
def test_rings_and_nodes_cost_their_hops_and_their_bytes(costs: Costs, expected: tuple[float, ...]) -> None:
    # Floats of a dozen operations: 1e-12 is a thousand units in the last place.
    assert tuple(us(costs, kind) for kind in KINDS) == pytest.approx(expected, rel=1e-12)


# A MB of fp32 in int8; half of an all-reduce takes half of its coding.
INT8 = Payload(num_bytes=1200, wire="int8", num_encoded=250_000)


@pytest.mark.parametrize(("kind", "share"), [("all_reduce", 1), ("reduce_scatter", 0.5), ("all_gather", 0.5)])
def test_a_payload_in_a_format_takes_its_coding_too(kind: str, share: float) -> None:
    others = [Payload(num_bytes=1200), replace(INT8, is_host=False)]  # a stream's coding is not counted
    expected = [us(NODES, kind)] * 2 + [us(NODES, kind) + share * WIRES["int8"].coding_us_per_mb]
    assert payloads_us(NODES, kind, [*others, INT8]) == pytest.approx(expected, rel=1e-12)


GLOO, FAR = RingCosts(LINK, num_ranks=4, has_trees=False), RingCosts(SLOW, num_ranks=3, has_trees=False)


@pytest.mark.parametrize(
    ("costs", "kind", "expected"),
    [
        # Latency, messages, bytes: three peers at once, and with an all-reduce twice.
        (GLOO, "all_reduce", 20 + 6 * 85 + 1800),
        (GLOO, "reduce_scatter", 10 + 3 * 85 + 900),
        (GLOO, "all_gather", 10 + 3 * 85 + 900),
        (RingCosts(LINK, num_ranks=1, has_trees=False), "all_reduce", 0),
        # Eight of eleven peers are on the two other nodes, and get two thirds of the bytes; three on this one a quarter.
        (
            NodeCosts(inside=GLOO, across=FAR, per_node=4, num_nodes=3),
            "all_gather",
            (100 + 3 * 10) + 11 * 85 + 800 + 300,
        ),
        (
            NodeCosts(inside=GLOO, across=FAR, per_node=4, num_nodes=3, is_mesh=True),
            "reduce_scatter",
            (10 + 3 * 85 + 900) + (200 + 4 * 85 + 400),
        ),
        (NodeCosts(inside=GLOO, across=FAR, per_node=4, num_nodes=3, is_mesh=True), "all_gather", 10 + 3 * 85 + 900),
    ],
    ids=["all-reduce", "reduce-scatter", "all-gather", "one rank", "nodes", "mesh", "gather on a mesh"],
)
def test_direct_messages_cost_a_processor_time_for_each_peer(costs: Costs, kind: str, expected: float) -> None:
    assert float(costs.direct_us(kind, 1200)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("costs", [RingCosts(LINK, num_ranks=4), NODES, MeasuredCosts(CURVES)])
def test_other_backends_have_no_direct_messages(costs: Costs) -> None:
    for kind in KINDS:
        assert costs.direct_us(kind, [1000, 1500]).tolist() == costs.collective_us(kind, [1000, 1500]).tolist()


@pytest.mark.parametrize(("kind", "is_collective"), [("all_reduce", True), ("reduce_scatter", False), ("all_gather", False)])
def test_over_gloo_shards_and_formats_are_direct_messages(kind: str, is_collective: bool) -> None:
    full, on_device, encoded = payloads_us(GLOO, kind, [Payload(num_bytes=1200), Payload(num_bytes=1200, is_host=False), INT8])
    direct, ring = float(GLOO.direct_us(kind, 1200)), us(GLOO, kind)
    assert (full, on_device) == (ring if is_collective else direct, ring)
    assert encoded > direct


@pytest.mark.parametrize(("measured", "coded"), [("int8", 0), ("bfloat16", 1), (None, 1)])
def test_costs_that_were_measured_in_a_format_contain_its_coding(measured: str | None, coded: int) -> None:
    costs = MeasuredCosts(CURVES, {"all_reduce": measured})
    expected = us(costs, "all_reduce") + coded * WIRES["int8"].coding_us_per_mb
    assert payloads_us(costs, "all_reduce", [INT8]).tolist() == pytest.approx([expected], rel=1e-12)


@pytest.mark.parametrize("kind", sorted(COLLECTIVES))
def test_a_ring_costs_what_the_emulated_link_charges(kind: str) -> None:
    assert us(RingCosts(LINK, num_ranks=5), kind) == pytest.approx(
        1e6 * collective_seconds(LINK, kind, num_bytes=1200, num_ranks=5), rel=1e-12
    )


@pytest.mark.parametrize("costs", [RingCosts(LINK, num_ranks=4), NODES, MeasuredCosts(CURVES)])
def test_costs_have_the_shape_of_the_sizes(costs: Costs) -> None:
    assert costs.collective_us("all_reduce", [[1, 2], [4, 5]]).tolist() == [
        [us(costs, "all_reduce", size) for size in row] for row in ((1, 2), (4, 5))
    ]


MEASURE = "Measure it, or name a link."
IMPOSSIBLE = "A point is a size of zero bytes or more and a time of more than zero microseconds."
ONCE = "Sort the points by size, each size once."
REFUSALS: dict[str, tuple[Call, str]] = {
    **{
        f"a curve of {points}": (lambda points=points: CostCurve(points=points), text)
        for points, text in (
            ((), "a cost curve needs at least one point.\n  Measure one size or more."),
            (((1, 1), (2, 0)), f"point 1 of a cost curve is impossible: (2, 0).\n  {IMPOSSIBLE}"),
            (((10, 1), (10, 2)), f"point 1 of a cost curve has 10 bytes and follows one of 10.\n  {ONCE}"),
            (((1, 1), (20.5, 1), (10, 2)), f"point 2 of a cost curve has 10 bytes and follows one of 20.5.\n  {ONCE}"),
        )
    },
    "a sample that is no number": (
        lambda: curve_from_samples([(5, 1), (1, math.nan)]),
        f"point 1 of a cost curve is impossible: (1, nan).\n  {IMPOSSIBLE}",
    ),
    **{
        f"gossip: {text}": (lambda costs=costs: costs.collective_us("gossip", 1), text)
        for costs, text in (
            (
                MeasuredCosts(CURVES),
                f"the cost of gossip was not measured.\n  measured: all_gather, all_reduce, reduce_scatter\n  {MEASURE}",
            ),
        )
    },
    "nothing measured": (
        lambda: MeasuredCosts({}).collective_us("all_reduce", 1),
        f"the cost of all_reduce was not measured.\n  measured: nothing\n  {MEASURE}",
    ),
    "no samples": (
        lambda: curve_from_samples([]),
        "a cost curve needs samples.\n  Measure one size or more.",
    ),
}


@pytest.mark.parametrize(
    ("measured", "kind", "expected_us"),
    [
        (("all_reduce",), "reduce_scatter", 75),
        (("all_reduce", "reduce_scatter"), "all_gather", 90),
        (("reduce_scatter", "all_gather"), "all_reduce", 170),
        (("reduce_scatter",), "all_reduce", 180),
    ],
)
def test_a_kind_that_was_not_measured_costs_what_its_parts_do(measured: tuple[str, ...], kind: str, expected_us: float) -> None:
    assert us(MeasuredCosts({known: CURVES[known] for known in measured}), kind, 2000) == expected_us


def test_on_a_mesh_only_reductions_cross_and_only_with_shards() -> None:
    inside, across = RingCosts(LINK, num_ranks=4), RingCosts(SLOW, num_ranks=3)
    mesh = NodeCosts(inside=inside, across=across, per_node=4, is_mesh=True)
    scatter, gather, crossing = us(inside, "reduce_scatter"), us(inside, "all_gather"), us(across, "all_reduce", 300)
    assert [us(mesh, kind) for kind in KINDS] == [scatter + crossing + gather, scatter + crossing, gather]


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


@pytest.mark.parametrize(
    ("points", "sizes", "expected_us"),
    [
        pytest.param(
            ((100, 10), (200, 30), (400, 40)), [100, 125, 200, 300, 400], [10, 15, 30, 35, 40], id="between points linearly"
        ),
        pytest.param(BENT, SIZES[-1] + 1e6, BENT[-1][1] + 1000, id="beyond the last point by the slope of all"),
        # Three sizes, of which no three lie apart.
        pytest.param(
            ((1e6, 100), (1.4e6, 120), (2e6, 150)), [2e6, 4e6, 1e9], [150, 300, 75_000], id="in proportion, two close together"
        ),
        pytest.param(
            LINEAR, [0, SIZES[0] / 2], [50, affine(SIZES[0] / 2)], id="below the first point towards the latency of all"
        ),
        *(
            pytest.param(
                points,
                [0, 10 * points[-1][0]],
                [points[0][1], 10 * points[-1][1]],
                id=f"close together errs on the safe side: {points}",
            )
            for points in (((1000, 30),), ((1000, 30), (1200, 30)), ((1000, 29), (1499, 30)))
        ),
    ],
)
def test_costs_between_and_beyond_the_measured_sizes_lie_on_their_lines(points: Points, sizes: Any, expected_us: Any) -> None:
    assert CostCurve(points=points).us(sizes) == pytest.approx(np.array(expected_us), rel=1e-9)


@pytest.mark.parametrize(
    ("points", "is_enough"),
    [
        (((1000, 30),), False),
        (((1000, 29), (1499, 30)), False),
        (((1000, 30), (1500, 40)), True),
    ],
)
def test_sizes_that_lie_apart_are_enough(points: Points, is_enough: bool) -> None:
    assert CostCurve(points=points).is_enough == is_enough


@given(curves, st.lists(st.floats(0, 1e13), min_size=2, max_size=40))
def test_a_larger_payload_never_costs_less(measured: CostCurve, sizes: list[float]) -> None:
    assert CostCurve(points=measured.points) == measured  # evening out again changes nothing
    times = measured.us(sorted([*sizes, *(size for size, _ in measured.points)]))
    # A unit in the last place of sums and products of such times: 1e-15 of them, a hundredfold.
    assert (np.diff(times) >= -1e-13 * times[1:]).all()
    assert (times >= 0).all()
    last_size, last_time = measured.points[-1]
    assert (float(measured.us(last_size)), float(measured.us(np.nextafter(last_size, math.inf)))) == (
        last_time,
        pytest.approx(last_time, rel=1e-9),
    )


@pytest.mark.parametrize(
    ("samples", "points"),
    [
        ([(200, 40), (100, 9), (100, 500), (100, 10)], ((100, 10), (200, 40))),
        ([(1000, 8), (1010, 9), (1020, 10), (1021, 11)], ((1010, 9), (1021, 11))),
        # Two at 100 bytes are outvoted by three at 200: the median of all five is theirs.
        ([(100, 30), (100, 31), (200, 20), (200, 21), (200, 22)], ((100, 22), (200, 22))),
    ],
    ids=["one point at the median", "two percent are one size", "medians that decrease are pooled"],
)
def test_samples_become_points(samples: list[tuple[float, float]], points: Points) -> None:
    assert curve_from_samples(samples).points == points


@given(st.floats(0, 1e4), st.floats(1e-6, 1), st.integers(0, 9))
def test_the_line_of_points_on_a_line_is_found_past_an_outlier(latency_us: float, us_per_byte: float, slow: int) -> None:
    expected = [latency_us + us_per_byte * size for size in SIZES]
    latency_us, us_per_byte = line_through(
        [(size, us * (10 if i == slow else 1)) for i, (size, us) in enumerate(zip(SIZES, expected, strict=True))]
    )
    # The line of the other nine, or one that goes through most of them: costs are compared, which hide a small latency.
    assert [latency_us + us_per_byte * size for size in SIZES] == pytest.approx(expected, rel=1e-6)


def test_a_line_has_neither_a_negative_latency_nor_a_negative_slope() -> None:
    assert (line_through([(1, 10), (2, 30), (3, 50)])[0], line_through([(1, 10), (2, 9), (3, 8)])) == (0, (9, 0))


NETWORK_SIZES, FAST = [0.0, 1.0, 1e4, 1e8], link_from_text("100gbit,5us")
INSIDE = RingCosts(link_from_text("900gbit,2us"), num_ranks=8)
NETWORK_NODES = {"per_node": 8, "inside": "900gbit,2us"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(
            pytest.param(
                costs_for("100gbit,5us", num_ranks=num), RingCosts(FAST, num_ranks=num, has_all_trees=True), id=f"a ring of {num}"
            )
            for num in (1, 6, 64)
        ),
        pytest.param(
            costs_for("100gbit,5us", num_ranks=24, **NETWORK_NODES),
            NodeCosts(inside=INSIDE, across=RingCosts(FAST, num_ranks=3), per_node=8),
            id="ranks per node mean two levels",
        ),
        pytest.param(
            costs_for("100gbit", num_ranks=16, per_node=8),
            costs_for("100gbit", num_ranks=16, per_node=8, inside="2400gbit,3us"),
            id="ranks of a node have NVLink if nothing else is said",
        ),
        pytest.param(
            costs_for("100gbit,5us", num_ranks=64, per_node=1), costs_for("100gbit,5us", num_ranks=64), id="one rank per node"
        ),
        pytest.param(costs_for("none", num_ranks=6), RingCosts(FAST, num_ranks=1), id="no link costs nothing"),
        pytest.param(
            costs_for("100gbit,5us", num_ranks=32, is_mesh=True, **NETWORK_NODES),
            NodeCosts(inside=INSIDE, across=RingCosts(FAST, num_ranks=4), per_node=8, is_mesh=True),
            id="nodes may be replicas of each other",
        ),
    ],
)
def test_a_named_network_costs_what_its_links_do(one: Costs, other: Costs) -> None:
    for kind in KINDS:
        assert one.collective_us(kind, NETWORK_SIZES).tolist() == other.collective_us(kind, NETWORK_SIZES).tolist()


@pytest.mark.parametrize("text", ["25gbps", "25Gb/s", "25 Gbit/s", "25Gbit", "25GbE", "25gbe", "25GBE", "25gbits"])
def test_a_rate_has_many_spellings(text: str) -> None:
    for latency in ("", ",5us"):
        link, usual = link_from_text(text + latency), link_from_text(f"25gbit{latency}")
        assert (link.hop_s, link.bytes_per_s) == (usual.hop_s, usual.bytes_per_s)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_of_the_catalogue_is_the_text_that_it_lists(name: str) -> None:
    assert replace(link_from_text(name), name="") == replace(link_from_text(LINKS[name][0]), name="")


@pytest.mark.parametrize("size", [0, 1000, 1e6, 1e9])
def test_an_all_reduce_takes_the_ring_or_the_tree_and_nothing_jumps_between_numbers_of_ranks(size: float) -> None:
    times = np.array([us(RingCosts(FAST, num_ranks=num), "all_reduce", size) for num in range(2, 130)])
    assert (times[1:] >= times[:-1]).all()
    assert times[62] / times[61] < 1.01  # 64 ranks and 63
    ring = us(RingCosts(FAST, num_ranks=64, has_trees=False), "all_reduce", size)
    assert times[62] == pytest.approx(min(ring, 1e6 * (12 * FAST.hop_s + 2 * size / FAST.bytes_per_s)))


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_shards_of_nodes_of_one_rank_go_through_trees(kind: str) -> None:
    times = np.array([us(costs_for("25gbit", num_ranks=num), kind, 1e6) for num in range(2, 130)])
    assert (times[1:] >= times[:-1]).all()
    many = us(costs_for("25gbit", num_ranks=16_384), kind, 0)
    assert many == pytest.approx(14 * 100 + 2.8 * 16_384)
    assert us(costs_for("25gbit", num_ranks=16_384, has_trees=False), kind, 0) == pytest.approx(16_383 * 100)
    on_nodes = us(costs_for("25gbit", num_ranks=16_384, per_node=8, inside="none"), kind, 0)
    assert on_nodes == pytest.approx(2047 * 100)


NO_LINKS = ["", "1", "gbit", "1GB/s", "-1gbit", "1gbitss", "1.gbit", "1pbit", "0gbit", "0.0mbit", "1gbit\n"]
NO_LATENCIES = ["1gbit,", "1gbit,5", "1gbit,5s", "1gbit,-5us", "1gbit,us", "5us", "0gbit,5us", "none,5us"]
NETWORK_REFUSALS: dict[str, tuple[Call, str]] = {
    **{
        f"the link {text!r}": (
            lambda text=text: link_from_text(text),
            f'link {text!r} is not known.\n  Write a rate such as "1gbit", "2.5gbit" or "200mbit", a rate and a latency such as '
            '"100gbit,5us", or "none" for the bare loopback.',
        )
        for text in (*NO_LINKS, *NO_LATENCIES)
    },
    **{
        f"{per_node} of 8 ranks on a node": (
            lambda per_node=per_node: costs_for("1gbit", num_ranks=8, per_node=per_node),
            f"8 ranks cannot be on nodes of {per_node} ranks each.\n  Give a number of ranks per node that divides 8.",
        )
        for per_node in (0, -8, 5, 16)
    },
    **{
        f"no network either: {name}, {more}": (
            lambda name=name, more=more: costs_for(name, num_ranks=8, **more),
            refusal(lambda text=text: link_from_text(text)),
        )
        for text in ("0gbit", "fast", "0gbit,5us")
        for name, more in ((text, {}), ("1gbit", {"per_node": 4, "inside": text}))
    },
}


@pytest.mark.parametrize(("call", "text"), (REFUSALS | NETWORK_REFUSALS).values(), ids=REFUSALS | NETWORK_REFUSALS)
def test_what_is_no_curve_no_link_and_no_network_is_refused(call: Call, text: str) -> None:
    assert refusal(call) == text


# One second per byte and a thousand per hop, so that a cost shows both parts.
PLAIN = Link(name="plain", hop_s=1000.0, bytes_per_s=1.0)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "seconds"),
    [
        ("all_reduce", 2, 2 * 1000 + 12),
        ("all_reduce", 4, 6 * 1000 + 18),
        ("reduce_scatter", 4, 3 * 1000 + 9),
        ("all_gather", 4, 3 * 1000 + 9),
        ("broadcast", 4, 2 * 1000 + 12),
        ("broadcast", 5, 3 * 1000 + 12),
        ("reduce", 4, 2 * 1000 + 12),
        ("send", 4, 1 * 1000 + 12),
        ("barrier", 4, 2 * 1000),
        *((kind, 1, 0) for kind in sorted(COLLECTIVES)),
    ],
)
def test_each_collective_costs_its_hops_and_its_bytes(kind: str, num_ranks: int, seconds: float) -> None:
    assert collective_seconds(PLAIN, kind, num_bytes=12, num_ranks=num_ranks) == seconds


@pytest.mark.parametrize(
    ("text", "hop_s", "line_rate"),
    [
        ("1gbit", 100e-6, 125e6),
        ("2.5gbit", 100e-6, 312.5e6),
        ("200mbit", 100e-6, 25e6),
        ("1tbit", 100e-6, 125e9),
        ("100gbit,5us", 5e-6, 12.5e9),
        ("1gbit,20ms", 20e-3, 125e6),
    ],
)
def test_a_rate_names_an_ethernet_link_and_may_have_a_latency(text: str, hop_s: float, line_rate: float) -> None:
    link = link_from_text(text)
    # Powers of ten are a rounding off.
    assert (link.name, link.hop_s, link.bytes_per_s) == (
        text,
        pytest.approx(hop_s, rel=1e-15),
        pytest.approx(line_rate * 0.956, rel=1e-15),
    )
