"""The plan that is chosen: against every grouping of small models, and by hand."""

import random
from dataclasses import replace
from itertools import chain
from statistics import mean
from typing import Any

import pytest

from support.strategies import specs_of_sizes
from undertow.lab.cost import CostCurve
from undertow.lab.planning import LAST_SHARES, SLACK, Choice, choose, family
from undertow.lab.simulate import IDEAL
from undertow.lab.what_if import WhatIf
from undertow.plan import Plan, Wires, equal_groups, plan_from_groups
from undertow.plan.grouping import is_too_large
from unit.lab.steps import SHAPES, Case, profile_of, random_case

NUM_CASES = 100  # as many as tell one grouping from another


def chosen_for(case: Case) -> Choice:
    plans = family(case.params, case.order, num_ranks=2, num_shards=None)
    return choose(plans, lambda plan: case.finish_us(plan.groups))


def cases(seed: int, shapes: tuple[str, ...] = SHAPES) -> list[Case]:
    rng = random.Random(seed)
    return [random_case(rng, shapes) for _ in range(NUM_CASES)]


def test_the_fastest_of_the_family_is_chosen_with_the_fewest_buckets() -> None:
    for case in cases(1):
        found = chosen_for(case)
        numbers = [len(candidate.plan.buckets) for candidate in found.candidates]
        assert numbers == sorted(set(numbers)), case
        least_us = min(candidate.step_us for candidate in found.candidates)
        as_fast = [candidate for candidate in found.candidates if candidate.step_us <= SLACK * least_us]
        assert found.best == as_fast[0], case


def test_the_chosen_plan_is_near_the_best_of_all_groupings() -> None:
    ratios = []
    for case in cases(2, ("affine", "concave")):
        ratios.append(chosen_for(case).best.step_us / min(case.best_by_windows().values()))
    # Up to six gradients: real models have more, and the family is finer for them.
    assert max(ratios) < 1.15
    assert mean(ratios) < 1.01


def test_no_plan_of_the_family_takes_too_much_memory() -> None:
    params = specs_of_sizes(*[4_000_000] * 40)
    plans = [plan for _, plan in family(params, range(40), num_ranks=2, num_shards=None)]
    numbers = {len(plan.buckets) for plan in plans}
    assert (min(numbers), max(numbers)) == (8, 40)  # 160 MB, in buckets of at most 25 MiB
    assert not any(map(is_too_large, plans))


def planned(ready_us: list[float], numels: list[int], link: str, **more: Any) -> WhatIf:
    return WhatIf.of(profile_of(ready_us, backward_us=max(ready_us), numels=numels), num_ranks=2, link=link, **more)


def in_ideal(what_if: WhatIf, **conditions: Any) -> WhatIf:
    return replace(what_if, conditions=replace(IDEAL, **conditions))


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_fewer_buckets_are_chosen_if_each_takes_processor_time(strategy: str) -> None:
    asked = planned([1000.0 * i for i in range(1, 33)], [10_000] * 32, "1gbit,10us", strategy=strategy)
    numbers = [len(in_ideal(asked, launch_us=launch_us).planned.buckets) for launch_us in (0.0, 300.0, 100_000.0)]
    assert numbers == sorted(set(numbers), reverse=True)
    assert numbers[-1] == 1


@pytest.mark.parametrize("link", ["100mbit,100us", "1gbit,100us", "100gbit,5us"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_the_plan_that_is_printed_takes_the_time_that_is_simulated(strategy: str, link: str) -> None:
    asked = planned([1000.0 * i for i in range(1, 33)], [10_000] * 32, link, strategy=strategy)
    for candidate in asked.choice.candidates:
        assert candidate.step_us == asked.step(candidate.plan).step_us
    assert asked.planned == asked.choice.best.plan


@pytest.mark.parametrize(
    ("num_buckets", "last_share", "sizes"),
    [(1, 1.0, [120]), (4, 1.0, [30, 30, 30, 30]), (4, 0.25, [37, 37, 37, 9]), (12, 1.0, [10] * 12), (64, 1.0, [2] * 64)],
)
def test_buckets_are_of_equal_bytes_except_the_last(num_buckets: int, last_share: float, sizes: list[int]) -> None:
    params = specs_of_sizes(*[1] * 120)
    groups = equal_groups(params, range(120), num_buckets=num_buckets, last_share=last_share)
    found = [len(group) for group in groups]
    assert last_share in LAST_SHARES
    assert list(chain.from_iterable(groups)) == list(range(120))
    assert [abs(each - wanted) <= 1 for each, wanted in zip(found, sizes, strict=True)] == [True] * len(sizes)


# Four gradients of 5.12 MB, at 100, 200, 300 and 400 ms; in int8 each has 1.29 MB, and takes 5.63 ms to encode, add
# and decode. A byte takes 0.5 to 100 ns.
LAYERS, EVERY_100_MS = [1_280_000] * 4, [100_000.0, 200_000.0, 300_000.0, 400_000.0]


@pytest.mark.parametrize(
    ("ns_per_byte", "wires"),
    [
        # 2.56 ms each: in int8 the last one would take longer.
        pytest.param(0.5, (None,) * 4, id="all hidden"),
        # 13.3 ms each, in int8 10.4 with its processor time: 0.7 % of the step is to be gained.
        pytest.param(2.6, (None,) * 4, id="less than 1 % to gain"),
        # 51.2 ms each: the last one is exposed.
        pytest.param(10, (None, None, None, "int8"), id="the last one exposed"),
        # 512 ms each, in int8 135: the link is never idle.
        pytest.param(100, ("int8",) * 4, id="none hidden"),
    ],
)
def test_auto_sends_in_int8_all_buckets_or_the_last_if_that_gains_a_hundredth(ns_per_byte: float, wires: Wires) -> None:
    asked = planned(EVERY_100_MS, LAYERS, f"{8 / ns_per_byte / 0.956}gbit,0us", wire="auto")
    assert in_ideal(asked).in_formats(((0,), (1,), (2,), (3,))).wires == wires


def test_a_format_that_is_set_is_planned_for_in_every_bucket_that_can_have_it() -> None:
    asked = planned([*EVERY_100_MS, 400_000.0], [*LAYERS, 100], "1gbit", wire="int8")
    params = asked.profile.params
    for candidate in asked.choice.candidates:
        assert candidate.plan.wires == plan_from_groups(params, candidate.plan.groups, num_ranks=2, wires="int8").wires
    assert asked.in_formats(((0, 1, 2, 3), (4,))).wires == ("int8", "int8")


def measured_plan(*, us_per_mb: float, processors_us: float, network_us: float) -> Plan:
    curves = {"all_reduce": CostCurve(points=((0, 100.0), (1e6, us_per_mb)))}
    profile = profile_of([1000.0 * i for i in range(1, 33)], backward_us=32_000, numels=[10_000] * 32)
    measured = replace(profile, num_ranks=2, curves=curves, launch_us=10.0, processors_us=processors_us, network_us=network_us)
    return WhatIf.of(measured, wire="auto").planned


def test_where_processors_are_the_bottleneck_there_are_fewer_buckets_and_auto_is_full_width() -> None:
    plans = [measured_plan(us_per_mb=10_000, processors_us=processors_us, network_us=500) for processors_us in (1, 1000)]
    assert [len(plan.buckets) for plan in plans] == [16, 6]
    narrow = [measured_plan(us_per_mb=200_000, processors_us=processors_us, network_us=500).wires for processors_us in (1, 1000)]
    assert list(map(any, narrow)) == [True, False]
