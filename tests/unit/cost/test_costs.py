"""What collectives cost by formula, by measurement, and by both."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import text_of
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
    link_from_text,
)
from undertow.errors import ConfigError

# A byte per microsecond and 10 or 100 us per hop, so that a cost shows its parts; a byte is added in half the time it travels.
LINK = Link(name="plain", hop_s=10e-6, bytes_per_s=1e6)
SLOW = Link(name="slow", hop_s=100e-6, bytes_per_s=1e6)
REDUCTION = 0.5e-6
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
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
        # A quarter of the payload, 300 bytes, crosses between three nodes: two thirds of it 400 or 200 us, two hops 200 us.
        (NODES, (930 + 400 + 400 + 930, 930 + 200 + 200, 930 + 200 + 200)),
    ],
    ids=["ring", "ring that adds", "halving", "halving that adds", "halving of eight", "nodes"],
)
def test_cost_of_1200_bytes(costs: Costs, expected: tuple[float, ...]) -> None:
    # Floats of a dozen operations: 1e-12 is a thousand units in the last place.
    assert tuple(us(costs, kind) for kind in KINDS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", sorted(COLLECTIVES))
def test_a_ring_costs_what_the_emulated_link_charges(kind: str) -> None:
    seconds = collective_seconds(LINK, kind, num_bytes=1200, num_ranks=5)
    assert us(RingCosts(LINK, num_ranks=5), kind) == pytest.approx(1e6 * seconds, rel=1e-12)


@pytest.mark.parametrize("costs", [RingCosts(LINK, num_ranks=1), HalvingDoublingCosts(LINK, num_ranks=1)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_communicates_for_nothing(costs: Costs, kind: str) -> None:
    assert us(costs, kind) == 0


@pytest.mark.parametrize("costs", [RingCosts(LINK, num_ranks=4), NODES, MeasuredCosts(CURVES)])
def test_costs_have_the_shape_of_the_sizes(costs: Costs) -> None:
    table = costs.collective_us("all_reduce", [[1, 2, 3], [4, 5, 6]])
    assert table.shape == (2, 3)
    assert table[1, 0] == us(costs, "all_reduce", 4)


@pytest.mark.parametrize("kind", KINDS)
def test_halving_and_doubling_is_never_slower_than_a_ring(kind: str) -> None:
    for num_ranks in (2, 4, 8, 64):
        assert us(HalvingDoublingCosts(LINK, num_ranks=num_ranks), kind) <= us(RingCosts(LINK, num_ranks=num_ranks), kind)


@pytest.mark.parametrize("num_ranks", [3, 6, 100])
def test_halving_and_doubling_needs_a_power_of_two(num_ranks: int) -> None:
    assert text_of(ConfigError, lambda: HalvingDoublingCosts(LINK, num_ranks=num_ranks)) == (
        f"halving and doubling needs a power of two of ranks, got num_ranks={num_ranks}.\n  Use RingCosts."
    )


@pytest.mark.parametrize("num_ranks", [0, -2])
def test_no_ranks_are_refused(num_ranks: int) -> None:
    expected = f"a collective is one of one rank or more, got {num_ranks}.\n  Give a positive number of ranks."
    assert text_of(ConfigError, lambda: RingCosts(LINK, num_ranks=num_ranks)) == expected
    assert text_of(ConfigError, lambda: HalvingDoublingCosts(LINK, num_ranks=num_ranks)) == expected
    assert text_of(ConfigError, lambda: HierarchicalCosts(inside=NODES, across=NODES, per_node=num_ranks)) == expected


@pytest.mark.parametrize("s_per_byte", [-1e-9, math.nan, math.inf])
def test_an_impossible_reduction_is_refused(s_per_byte: float) -> None:
    expected = f"to add a byte cannot take {s_per_byte} s.\n  Give seconds per byte, zero or more."
    assert text_of(ConfigError, lambda: RingCosts(LINK, num_ranks=2, reduction_s_per_byte=s_per_byte)) == expected


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        (RingCosts(LINK, num_ranks=2), f"there is no gossip over a ring.\n  Choose one of: {', '.join(COLLECTIVES)}."),
        (
            HalvingDoublingCosts(LINK, num_ranks=2),
            "there is no gossip over halving and doubling.\n  Choose one of: all_reduce, reduce_scatter, all_gather.",
        ),
        (NODES, "there is no gossip over nodes.\n  Choose one of: all_reduce, reduce_scatter, all_gather."),
        (
            MeasuredCosts(CURVES),
            "what gossip costs was not measured.\n  measured: all_gather, all_reduce, reduce_scatter\n"
            "  Measure it, or name a link.",
        ),
    ],
)
def test_an_unknown_kind_is_refused(costs: Costs, text: str) -> None:
    assert text_of(ConfigError, lambda: costs.collective_us("gossip", 1)) == text


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


def test_nothing_measured_says_so() -> None:
    assert text_of(ConfigError, lambda: MeasuredCosts({}).collective_us("all_reduce", 1)) == (
        "what all_reduce costs was not measured.\n  measured: nothing\n  Measure it, or name a link."
    )


def test_what_stands_for_nothing_else_is_not_used_for_it() -> None:
    costs = MeasuredCosts({"broadcast": CURVES["all_reduce"]})
    assert "measured: broadcast\n" in text_of(ConfigError, lambda: costs.collective_us("all_reduce", 1))


def above(costs: Costs, overhead_us: float) -> MeasuredCosts:
    """A network that takes a fixed time longer than another, where it was measured."""
    sizes = (1e3, 1e5, 1e7)
    times = {kind: costs.collective_us(kind, sizes) + overhead_us for kind in KINDS}
    return MeasuredCosts({kind: CostCurve(points=tuple(zip(sizes, of_kind, strict=True))) for kind, of_kind in times.items()})


ONE, TEN = (RingCosts(link_from_text(text), num_ranks=4) for text in ("1gbit", "10gbit"))


@pytest.mark.parametrize("kind", KINDS)
def test_software_stays_when_the_network_changes(kind: str) -> None:
    transferred = TransferredCosts(measured=above(ONE, 70.0), was=ONE, wanted=TEN)
    sizes = np.array([0.0, 5.0, 1e6, 123456789.0])
    # Floats of a dozen operations on times below 1e7 us: a thousand units in the last place.
    assert transferred.collective_us(kind, sizes) == pytest.approx(TEN.collective_us(kind, sizes) + 70, abs=1e-6)


def test_the_same_network_costs_what_was_measured() -> None:
    measured = MeasuredCosts({"all_reduce": CostCurve(points=((1e3, 700), (1e6, 20_000), (1e8, 2e6)))})
    transferred = TransferredCosts(measured=measured, was=ONE, wanted=ONE)
    sizes = np.array([1e3, 1e5, 1e6, 1e7, 1e8, 1e9])
    assert transferred.collective_us("all_reduce", sizes) == pytest.approx(measured.collective_us("all_reduce", sizes), rel=1e-12)


def test_what_two_noisy_sizes_say_of_none_is_not_taken_for_software() -> None:
    """A line through them says 2 ms of no bytes, which the larger one did not take."""
    sizes = (1e6, 2e6)
    times = ONE.collective_us("all_reduce", sizes) + np.array([2000.0, -1000.0])
    curve = CostCurve(points=tuple(zip(sizes, times, strict=True)))
    transferred = TransferredCosts(measured=MeasuredCosts({"all_reduce": curve}), was=ONE, wanted=TEN)
    assert (
        transferred.collective_us("all_reduce", [0, *sizes, 4e6]).tolist()
        == TEN.collective_us("all_reduce", [0, *sizes, 4e6]).tolist()
    )


def test_what_was_faster_than_its_formula_costs_what_the_new_formula_says() -> None:
    transferred = TransferredCosts(measured=above(ONE, -50.0), was=ONE, wanted=TEN)
    assert us(transferred, "all_reduce", 1e6) == us(TEN, "all_reduce", 1e6)


@given(
    st.dictionaries(st.integers(0, 2**34), st.floats(0.1, 1e8), min_size=1, max_size=6),
    st.lists(st.floats(0, 1e13), min_size=2, max_size=30),
)
def test_a_larger_payload_never_costs_less_on_another_network(times: dict[int, float], sizes: list[float]) -> None:
    measured = MeasuredCosts({"all_reduce": CostCurve(points=tuple(sorted(times.items())))})
    transferred = TransferredCosts(measured=measured, was=ONE, wanted=TEN).collective_us("all_reduce", sorted(sizes))
    # A unit in the last place of sums and products of such times: 1e-15 of them, a hundredfold.
    assert (np.diff(transferred) >= -1e-13 * transferred[1:]).all()


def test_on_a_mesh_only_reductions_cross_and_only_with_shards() -> None:
    inside, across = RingCosts(LINK, num_ranks=4), RingCosts(SLOW, num_ranks=3)
    mesh = MeshCosts(inside=inside, across=across, per_node=4)
    crossing = us(across, "all_reduce", 300)
    assert us(mesh, "reduce_scatter") == us(inside, "reduce_scatter") + crossing
    assert us(mesh, "all_gather") == us(inside, "all_gather")
    assert us(mesh, "all_reduce") == us(inside, "reduce_scatter") + crossing + us(inside, "all_gather")
    expected = "a collective is one of one rank or more, got 0.\n  Give a positive number of ranks."
    assert text_of(ConfigError, lambda: MeshCosts(inside=inside, across=across, per_node=0)) == expected
