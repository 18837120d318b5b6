"""Questions to the simulator: the networks that are asked about, and sweeps over them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.cli import EXAMPLE, MEASURED, SMALL, question
from undertow.cli.sweep import sweep_named
from undertow.cli.what_if import OPTIMAL
from undertow.cost import CostCurve, RingCosts, TransferredCosts, link_from_text
from undertow.profile import Profile, profile_from_file
from undertow.schedule import STRATEGIES


def test_a_link_goes_below_what_the_software_of_the_run_took() -> None:
    profile, sizes = replace(MEASURED, link="8gbit,10us"), [0.0, 1e6, 2.0**24, 1e8]
    was, wanted = (RingCosts(link_from_text(link), num_ranks=4) for link in ("8gbit,10us", "100gbit,5us"))
    network = question(profile, link="100gbit,5us").at(4).network
    expected = TransferredCosts(measured=profile.costs(), was=was, wanted=wanted).collective_us("all_reduce", sizes)
    assert network.costs.collective_us("all_reduce", sizes).tolist() == expected.tolist()
    assert network.source == "100gbit,5us, 4 ranks, and on top what collectives took on 8gbit,10us above the formula of a ring"


def test_the_link_of_the_run_itself_takes_what_was_measured() -> None:
    # Above a ring's 60 us and 1.57 ns per byte, and the more the larger the payload.
    curve = CostCurve(points=((2.0**20, 3e3), (2.0**24, 3.6e4), (2.0**26, 1.5e5)))
    costs = question(replace(SMALL, curves={"all_reduce": curve}, link="8gbit,10us"), link="8gbit,10us").at(4).network.costs
    sizes, times_us = zip(*curve.points, strict=True)
    assert costs.collective_us("all_reduce", sizes) == pytest.approx(times_us, rel=1e-12)  # a rounding off


@pytest.mark.parametrize(
    ("profile", "options", "num_ranks"),
    [
        (MEASURED, {"link": "1gbit"}, 4),  # the link of the run is not known
        (replace(MEASURED, link="8gbit"), {"link": "1gbit"}, 8),
        (replace(SMALL, link="8gbit"), {"link": "1gbit"}, 4),
        (replace(MEASURED, link="8gbit", num_ranks=8), {"link": "8xH200-nvlink4"}, 8),
        (replace(MEASURED, link="8gbit", num_ranks=16), {"link": "1gbit", "per_node": 8, "node_link": "8xH200-nvlink4"}, 16),
    ],
)
def test_without_an_overhead_to_transfer_a_link_is_its_formula_or_its_curve(
    profile: Profile, options: dict[str, object], num_ranks: int
) -> None:
    network, plain = (question(each, **options).at(num_ranks).network for each in (profile, SMALL))
    assert "on top" not in network.source
    assert float(network.costs.collective_us("all_reduce", 1e6)) == float(plain.costs.collective_us("all_reduce", 1e6))


def test_fewer_ranks_than_a_node_has_are_on_one() -> None:
    costs = question(link="1gbit", per_node=8, node_link="80gbit,1us").at(4).network.costs
    on_one_node = question(link="80gbit,1us").at(4).network.costs
    assert costs.collective_us("all_reduce", 1e6) == pytest.approx(on_one_node.collective_us("all_reduce", 1e6))


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "expected"),
    [
        (64, None, [2, 4, 8, 16, 32, 64]),
        (24, None, [2, 4, 8, 16, 24]),
        (24, 6, [2, 4, 6, 12, 24]),
        (16, 8, [2, 4, 8, 16]),
        (1, None, [1]),
    ],
)
def test_ranks_are_swept_over_full_nodes(num_ranks: int, per_node: int | None, expected: list[int]) -> None:
    assert [point.value for point in sweep_named("ranks")(question(per_node=per_node), num_ranks).points] == expected


def test_rates_are_swept_around_that_of_the_link() -> None:
    sweep = sweep_named("bandwidth")(question(link="2.5gbit,20us"), 4)
    assert [point.label for point in sweep.points] == ["0.3125", "0.625", "1.25", "2.5", "5", "10", "20"]
    assert sweep.points[3].outcomes == question(link="2.5gbit,20us").at(4).outcomes()


def test_sizes_are_swept_until_one_holds_all_gradients() -> None:
    sweep = sweep_named("bucket")(question(), 4)
    assert [point.value for point in sweep.points][-3:] == [16, 25, 50]  # of 36 MiB
    assert sweep.methods == ("per parameter", "fixed size", "optimal buckets")
    assert [point.outcomes[1].num_buckets for point in sweep.points][-2:] == [3, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("link", ["1gbit", "10gbit,20us", "400gbit,2us"])
def test_no_way_beats_the_optimal_buckets_or_the_limit(strategy: str, link: str) -> None:
    *others, optimal = question(profile_from_file(EXAMPLE), strategy, link=link).at(8).outcomes()
    assert optimal.method == OPTIMAL
    assert optimal.step_us >= optimal.limit_us
    # The plan is one of few buckets, at most 0.2 % from the best; padding and trailers are less than a millionth of a bucket.
    assert optimal.step_us <= 1.0021 * min(outcome.step_us for outcome in others)
