"""Links and networks by name, and links that explain what was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from support.errors import Call, refusal
from undertow.cost import (
    COLLECTIVES,
    CostCurve,
    Costs,
    HalvingDoublingCosts,
    HierarchicalCosts,
    Link,
    MeshCosts,
    RingCosts,
    catalogue_names,
    collective_seconds,
    costs_for,
    link_from_curve,
    link_from_text,
    published_network,
)

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = [0.0, 1.0, 1e4, 1e8]
MIB = 1024 * 1024
FAST = link_from_text("100gbit,5us")
INSIDE = HalvingDoublingCosts(link_from_text("900gbit,2us"), num_ranks=8)
NODES = {"per_node": 8, "inside": "900gbit,2us"}

NETWORKS: dict[str, tuple[Costs, Costs]] = {
    **{f"a ring of {num}": (costs_for("100gbit,5us", num_ranks=num), RingCosts(FAST, num_ranks=num)) for num in (3, 6, 12)},
    **{
        f"halving and doubling of {num}": (costs_for("100gbit,5us", num_ranks=num), HalvingDoublingCosts(FAST, num_ranks=num))
        for num in (1, 2, 8, 64)
    },
    "ranks per node mean two levels": (
        costs_for("100gbit,5us", num_ranks=24, **NODES),
        HierarchicalCosts(inside=INSIDE, across=RingCosts(FAST, num_ranks=3), per_node=8),
    ),
    "nodes may be replicas of each other": (
        costs_for("100gbit,5us", num_ranks=32, is_mesh=True, **NODES),
        MeshCosts(inside=INSIDE, across=costs_for("100gbit,5us", num_ranks=4), per_node=8),
    ),
    "ranks of a node have NVLink if nothing else is said": (
        costs_for("100gbit", num_ranks=16, per_node=8),
        costs_for("100gbit", num_ranks=16, per_node=8, inside="2400gbit,3us"),
    ),
    "no link costs nothing": (costs_for("none", num_ranks=6), RingCosts(FAST, num_ranks=1)),
    "one rank per node means the network alone": (
        costs_for("100gbit,5us", num_ranks=6, per_node=1),
        RingCosts(FAST, num_ranks=6),
    ),
}


@pytest.mark.parametrize(("one", "other"), NETWORKS.values(), ids=NETWORKS)
def test_a_name_means_these_costs(one: Costs, other: Costs) -> None:
    for kind in KINDS:
        assert one.collective_us(kind, SIZES).tolist() == other.collective_us(kind, SIZES).tolist()


def test_a_node_may_be_a_published_one() -> None:
    costs = costs_for("400gbit,5us", num_ranks=64, per_node=8, inside="8xH200-nvlink4")
    across = HalvingDoublingCosts(link_from_text("400gbit,5us"), num_ranks=8).collective_us("all_reduce", 32 * MIB)
    # 256 MiB took 1077 us inside the node; an eighth of it goes across.
    assert float(costs.collective_us("all_reduce", 256 * MIB)) == pytest.approx(1077 + float(across), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "num_ranks", "quarter_mib_us", "sixteen_mib_us", "largest_us"),
    [
        ("8xA100-nvlink3", 8, 61, 277, 2421),
        ("8xH200-nvlink4", 8, 39, 134, 1077),
        ("8xB200-nvlink5", 8, 48, 115, 727),
        ("4x8xB200-efa", 32, 378, 505, 2270),  # 382 us, and then 378 at 1 MiB
    ],
)
def test_published_times(name: str, num_ranks: int, quarter_mib_us: int, sixteen_mib_us: int, largest_us: int) -> None:
    times = costs_for(name, num_ranks=num_ranks).collective_us("all_reduce", [MIB / 4, 16 * MIB, 256 * MIB])
    assert times.tolist() == [quarter_mib_us, sixteen_mib_us, largest_us]


@pytest.mark.parametrize("name", catalogue_names())
def test_a_published_curve_is_enough_to_plan_from_and_its_largest_sizes_are_foreseen_from_the_smaller_ones(name: str) -> None:
    network = published_network(name)
    assert (network.name, network.all_reduce.is_enough) == (name, True)
    points = network.all_reduce.points
    for num_known in (6, 7, 8):
        sizes, times = np.array(points[num_known:]).T
        # Real curves bend: 1.34 was found, and 1.60 for the line through the last two known points.
        assert CostCurve(points=points[:num_known]).us(sizes) == pytest.approx(times, rel=0.35)


def curve_of(costs: Costs, kind: str, *, slow: int | None = None) -> CostCurve:
    sizes = [2**k for k in range(12, 28)]
    times = costs.collective_us(kind, sizes) * [10 if i == slow else 1 for i in range(16)]
    return CostCurve(points=tuple(zip(sizes, times.tolist(), strict=True)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slow", [None, 3, 15])
def test_the_link_of_a_ring_is_found_from_its_curve(kind: str, slow: int | None) -> None:
    link = link_from_curve(curve_of(RingCosts(FAST, num_ranks=5), kind, slow=slow), kind, num_ranks=5, name="found")
    # The latency is what is left of a time when bytes are taken off: of 1e-16 three digits or four are lost, of 1e-6 allowed.
    assert (link.name, link.hop_s, link.bytes_per_s) == ("found", pytest.approx(5e-6), pytest.approx(FAST.bytes_per_s))


def test_a_curve_that_does_not_grow_is_a_latency_alone() -> None:
    link = link_from_curve(CostCurve(points=((1000, 60), (2000, 60), (4000, 60))), "all_reduce", num_ranks=4, name="flat")
    assert (link.hop_s, link.bytes_per_s) == (pytest.approx(10e-6), math.inf)


CLOSE = "its sizes lie too close together"
NO_LINKS = ["", "1", "gbit", "1 gbit", "1Gbit", "-1gbit", "1gbits", "1.gbit", "1pbit", "0gbit", "0.0mbit", "1gbit\n"]
NO_LATENCIES = ["1gbit,", "1gbit,5", "1gbit,5s", "1gbit, 5us", "1gbit,-5us", "1gbit,us", "5us", "0gbit,5us", "none,5us"]
REFUSALS: dict[str, tuple[Call, str]] = {
    **{
        f"the link {text!r}": (
            lambda text=text: link_from_text(text),
            f'there is no link {text!r}.\n  Write a rate such as "1gbit", "2.5gbit" or "200mbit", a rate and a latency such as '
            '"100gbit,5us", or "none" for the bare loopback.',
        )
        for text in (*NO_LINKS, *NO_LATENCIES)
    },
    **{
        f"{rate} bytes/s, {hop_s} s per hop": (
            lambda hop_s=hop_s, rate=rate: Link(name="odd", hop_s=hop_s, bytes_per_s=rate),
            f"link 'odd' is impossible: {rate} bytes/s, {hop_s} s per hop.\n"
            "  Give a positive bandwidth and a latency of zero or more.",
        )
        for hop_s, rate in ((0.0, 0.0), (0.0, -1.0), (0.0, math.nan), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0))
    },
    **{
        f"{num} ranks": (
            lambda num=num: costs_for("1gbit", num_ranks=num),
            f"a network has one rank or more, got {num}.\n  Give a positive number of ranks.",
        )
        for num in (0, -1)
    },
    **{
        f"{per_node} of 8 ranks on a node": (
            lambda per_node=per_node: costs_for("1gbit", num_ranks=8, per_node=per_node),
            f"8 ranks cannot be on nodes of {per_node} ranks each.\n  Give a number of ranks per node that divides 8.",
        )
        for per_node in (0, -8, 5, 16)
    },
    **{
        f"almost a name: {name}": (
            lambda name=name: costs_for(name, num_ranks=8),
            f"there is no published network {name!r}.\n  Did you mean '8xH200-nvlink4'?",
        )
        for name in ("8xH200-nvlink", "8xh200-nvlink4", "8xH200")
    },
    **{
        f"no network either: {name}, {more}": (
            lambda name=name, more=more: costs_for(name, num_ranks=8, **more),
            refusal(lambda text=text: link_from_text(text)),
        )
        for text in ("0gbit", "fast", "0gbit,5us")
        for name, more in ((text, {}), ("1gbit", {"per_node": 4, "inside": text}))
    },
    "another number of ranks": (
        lambda: costs_for("8xH200-nvlink4", num_ranks=16),
        "8xH200-nvlink4 was measured over 8 ranks and says nothing about 16.\n"
        '  Name a link such as "100gbit,5us" for other numbers of ranks.',
    ),
    "a name unlike any": (
        lambda: published_network("token ring"),
        "there is no published network 'token ring'.\n"
        "  Known networks: 8xA100-nvlink3, 8xH200-nvlink4, 8xB200-nvlink5, 4x8xB200-efa.",
    ),
    **{
        f"a curve of {points} over {num}": (
            lambda points=points, num=num: link_from_curve(CostCurve(points=points), "all_gather", num_ranks=num, name="x"),
            f"no link can be made of the curve of all_gather: {reason}.\n"
            "  Measure between two ranks or more, and sizes of which one is half as large again as another.",
        )
        for points, num, reason in (
            (((1000, 60), (2000, 70)), 1, "num_ranks=1"),
            (((1000, 60),), 2, CLOSE),
            (((1000, 60), (1100, 70)), 2, CLOSE),
        )
    },
}


@pytest.mark.parametrize(("call", "text"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_no_network_is_refused(call: Call, text: str) -> None:
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
        ("all_to_all", 4, 3 * 1000 + 9),
        ("gather", 4, 3 * 1000 + 9),
        ("scatter", 4, 3 * 1000 + 9),
        ("broadcast", 4, 2 * 1000 + 12),
        ("broadcast", 5, 3 * 1000 + 12),
        ("reduce", 4, 2 * 1000 + 12),
        ("send", 4, 1 * 1000 + 12),
        ("barrier", 4, 2 * 1000),
        *((kind, 1, 0) for kind in sorted(COLLECTIVES)),
    ],
)
def test_cost_of_twelve_bytes(kind: str, num_ranks: int, seconds: float) -> None:
    assert collective_seconds(PLAIN, kind, num_bytes=12, num_ranks=num_ranks) == seconds


@pytest.mark.parametrize(
    ("text", "hop_s", "line_rate"),
    [
        ("1gbit", 100e-6, 125e6),
        ("5gbit", 100e-6, 625e6),
        ("2.5gbit", 100e-6, 312.5e6),
        ("200mbit", 100e-6, 25e6),
        ("0.1mbit", 100e-6, 12.5e3),
        ("1tbit", 100e-6, 125e9),
        ("100gbit,5us", 5e-6, 12.5e9),
        ("1gbit,20ms", 20e-3, 125e6),
        ("2.4tbit,1.5us", 1.5e-6, 300e9),
        ("1gbit,0us", 0.0, 125e6),
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
    assert not link.is_free


def test_no_link_costs_nothing() -> None:
    link = link_from_text("none")
    assert link.is_free
    assert collective_seconds(link, "all_reduce", num_bytes=10**9, num_ranks=8) == 0
    assert not any(costly.is_free for costly in (PLAIN, replace(PLAIN, hop_s=0.0), replace(PLAIN, bytes_per_s=math.inf)))
