"""The plan that is chosen: against every grouping of small models, and by hand."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.levels import some
from support.strategies import spec, specs_of_sizes
from undertow.lab.planning import Choice, StepModel, StepTiming, choose
from undertow.lab.planning.choose import LEAST_GAIN, SLACK
from undertow.plan import ParamSpec, Wires, equal_groups, plan_from_groups
from undertow.wire import WIRES
from unit.lab.steps import (
    SHAPES,
    Case,
    LineCosts,
    lines,
    random_case,
)

# Sums of a few dozen times, in another order than the planner's: some units in the last place of 1e2.
ROUNDING = {"rel": 1e-12, "abs": 1e-10}
NUM_CASES = 100  # as many as tell one grouping from another
each_form = pytest.mark.parametrize("has_shards", [False, True], ids=["whole", "in shards"])


def line(launch_us: float, us_per_byte: float) -> LineCosts:
    return lines((launch_us, us_per_byte), gather=(launch_us, us_per_byte))


def timing(*ready_us: float, end: float | None = None, used: Sequence[float] = ()) -> StepTiming:
    return StepTiming(ready_us=ready_us, backward_end_us=max(ready_us) if end is None else end, used_us=used)


def model_of(params: Sequence[ParamSpec], when: StepTiming, curve: Any, **more: Any) -> StepModel:
    return StepModel(params=params, timing=when, costs=curve, has_shards=bool(when.used_us), **more)


def choice(model: StepModel, **more: Any) -> Choice:
    return choose(model, range(len(model.params)), **{"max_bucket_bytes": math.inf, **more})


def cases(seed: int, shapes: tuple[str, ...] = SHAPES, *, has_shards: bool) -> Iterator[Case]:
    rng = random.Random(seed)
    for _ in range(NUM_CASES):
        yield random_case(rng, shapes, has_shards=has_shards)


def model_of_case(case: Case) -> StepModel:
    return StepModel(params=case.params, timing=case.timing, costs=case.costs, has_shards=case.has_shards)


def solve(case: Case) -> Choice:
    return choose(model_of_case(case), case.order, max_bucket_bytes=case.max_bucket_bytes)


@pytest.mark.parametrize("has_shards", some([False, True], most=1), ids=["whole", "in shards"])
def test_the_best_of_the_family_is_chosen_with_the_fewest_buckets_and_finishes_when_it_is_said(has_shards: bool) -> None:
    for case in cases(1, has_shards=has_shards):
        found = solve(case)
        numbers = [len(candidate.groups) for candidate in found.candidates]
        assert numbers == sorted(set(numbers)), case
        for candidate in found.candidates:
            assert candidate.finish_us == pytest.approx(case.finish_us(candidate.groups), **ROUNDING), case
        least_us = min(candidate.finish_us for candidate in found.candidates)
        as_fast = [candidate for candidate in found.candidates if candidate.finish_us <= SLACK * least_us]
        assert found.best == as_fast[0], case


def test_the_chosen_plan_is_near_the_best_of_all_groupings() -> None:
    ratios = []
    for case in cases(2, ("affine", "concave"), has_shards=False):
        if case.max_bucket_bytes == math.inf:
            ratios.append(solve(case).best.finish_us / min(case.best_by_windows().values()))
    # Of 400 random cases with up to six gradients, the worst was 11 % above the best, and all together 0.6 %.
    assert max(ratios) < 1.15
    assert mean(ratios) < 1.01


@each_form
def test_no_bucket_of_several_parameters_is_larger_than_allowed(has_shards: bool) -> None:
    params = [spec(f"p{i}", 10 + i % 7, dtype="uint8") for i in range(40)]
    when = timing(*(float(i) for i in range(40)), used=[0.0] * 40 if has_shards else ())
    found = choice(model_of(params, when, line(50, 1)), max_bucket_bytes=120)
    for candidate in found.candidates:
        plan = plan_from_groups(params, candidate.groups, num_ranks=2)
        sizes = [sum(slot.numel for slot in bucket.slots) for bucket in plan.buckets if len(bucket.slots) > 1]
        assert max(sizes, default=0) <= 120


@each_form
def test_fewer_buckets_are_chosen_if_each_takes_processor_time(has_shards: bool) -> None:
    params, used = specs_of_sizes(*[100] * 32), [float(32 - i) for i in range(32)]
    when = timing(*(10.0 * i for i in range(32)), used=used if has_shards else ())
    models = [model_of(params, when, line(1, 0.1), bucket_us=bucket_us) for bucket_us in (0.0, 5.0, 1000.0)]
    numbers = [len(choice(model).best.groups) for model in models]
    assert numbers == sorted(set(numbers), reverse=True)
    assert numbers[-1] == 1


@each_form
def test_any_grouping_is_timed_by_the_same_model(has_shards: bool) -> None:
    for case in cases(4, has_shards=has_shards):
        for _, groups in case.groupings():
            assert model_of_case(case).finish_us(groups) == pytest.approx(case.finish_us(groups), **ROUNDING), case


def test_processor_time_of_buckets_delays_each_bucket_by_those_before_it() -> None:
    # Ready at 0 and 20, and 11 each on the link: 5 + 11, then 20 + 2 * 5 + 11.
    model = model_of(specs_of_sizes(10, 10), timing(0, 20), line(1, 1), bucket_us=5.0)
    assert model.finish_us(((0,), (1,))) == 41.0


@pytest.mark.parametrize(
    ("model", "groups", "finished_us"),
    [
        pytest.param(
            model_of(specs_of_sizes(10, 10), timing(0, 20, end=50), line(1, 1)),
            ((0,), (1,)),
            61.0,
            id="the last bucket waits for the end of backward",
        ),
        # Two buckets are through at 1000 + 1000 + 1, one at 1000 + 1001 + 1.
        pytest.param(
            model_of(specs_of_sizes(1, 1000), timing(0, 1000), line(1, 1)),
            ((0, 1),),
            2002.0,
            id="a small gain is not worth a launch",
        ),
        pytest.param(
            model_of(
                [spec(f"p{i}", 8, dtype="float32" if i % 2 else "bfloat16") for i in range(20)],
                timing(*range(20)),
                line(100, 0.01),
            ),
            (tuple(range(0, 20, 2)), tuple(range(1, 20, 2))),
            None,
            id="dtypes that alternate travel in one bucket each",
        ),
        # Ready 0 and 100, used 100 and 0: one bucket of 200 bytes is reduced at 100 + 105 and gathered in 105, a stall. In two,
        # the second one is reduced at 100 + 55 and gathered in 55; the first one is gathered at 110 and late by 10.
        pytest.param(
            model_of(specs_of_sizes(100, 100), timing(0, 100, used=(100, 0)), line(5, 0.5)),
            ((0,), (1,)),
            155 + 55,
            id="one bucket is cut if that lets the forward begin",
        ),
    ],
)
def test_the_fastest_plan_is_the_one_that_is_reckoned_by_hand(model: StepModel, groups: Any, finished_us: float | None) -> None:
    best = choice(model).best
    assert (best.groups, best.finish_us if finished_us else None) == (groups, finished_us)


@pytest.mark.parametrize(
    ("num_buckets", "last_share", "sizes"),
    [(1, 1.0, [120]), (4, 1.0, [30, 30, 30, 30]), (4, 0.25, [37, 37, 37, 9]), (12, 1.0, [10] * 12), (64, 1.0, [2] * 64)],
)
def test_buckets_are_of_equal_bytes_except_the_last(num_buckets: int, last_share: float, sizes: list[int]) -> None:
    params = specs_of_sizes(*[1] * 120)
    groups = equal_groups(params, range(120), num_buckets=num_buckets, last_share=last_share)
    found = [len(group) for group in groups]
    assert list(chain.from_iterable(groups)) == list(range(120))
    assert [abs(each - wanted) <= 1 for each, wanted in zip(found, sizes, strict=True)] == [True] * len(sizes)


# Four gradients of 5.12 MB, at 100, 200, 300 and 400 ms; in int8 each has 1.29 MB, and takes 5.63 ms to encode, add
# and decode.
KB, LAYERS = 1e-3, [spec(f"p{i}", 1_280_000) for i in range(4)]
FULL, INT8 = 5_120_000, 1_290_000
CODING_US = WIRES["int8"].coding_us_per_mb * 5.12
HOST_US = WIRES["int8"].bucket_us  # of each bucket
EVERY_100_MS = timing(100_000, 200_000, 300_000, 400_000)


@pytest.mark.parametrize(
    ("ns_per_byte", "wires", "finish_us"),
    [
        # 2.56 ms each: in int8 the last one would take longer.
        pytest.param(0.5, (None,) * 4, 400_000 + 0.5e-3 * FULL, id="all hidden"),
        # 13.3 ms each, in int8 10.4 with its processor time: 0.7 % of the step is to be gained.
        pytest.param(2.6, (None,) * 4, 400_000 + 2.6e-3 * FULL, id="less than 1 % to gain"),
        # 51.2 ms each: the last one is exposed.
        pytest.param(10, (None, None, None, "int8"), 400_000 + HOST_US + 10e-3 * INT8 + CODING_US, id="the last one exposed"),
        # 148 ms each, in int8 43: with one of the first three in full width the link is idle when the last one comes.
        pytest.param(29, (None, "int8", "int8", "int8"), 400_000 + 3 * HOST_US + 29e-3 * INT8 + CODING_US, id="some exposed"),
        # 512 ms each, in int8 135: the link is never idle.
        pytest.param(100, ("int8",) * 4, 100_000 + HOST_US + 4 * (100e-3 * INT8 + CODING_US), id="none hidden"),
    ],
)
def test_auto_sends_in_int8_only_what_would_end_later(ns_per_byte: float, wires: Wires, finish_us: float) -> None:
    groups = ((0,), (1,), (2,), (3,))
    model = model_of(LAYERS, EVERY_100_MS, line(0, ns_per_byte * KB))
    best = choice(model, wire="auto", groups=groups).best
    assert (best.groups, best.wires) == (groups, wires)
    # The model of the choice tells the time of any other plan.
    assert model.finish_us(best.groups, best.wires) == pytest.approx(finish_us, **ROUNDING)
    assert best.finish_us == pytest.approx(finish_us, **ROUNDING)


def test_formats_cost_no_processor_time_on_an_accelerator() -> None:
    model = model_of([replace(param, device="cuda") for param in LAYERS], EVERY_100_MS, line(0, 2.6 * KB))
    best = choice(model, wire="auto", groups=((0,), (1,), (2,), (3,))).best
    assert best.wires == (None, None, None, "int8")
    assert best.finish_us == pytest.approx(400_000 + 2.6e-3 * INT8, **ROUNDING)


def test_one_exposed_bucket_in_int8_costs_the_processor_time_of_one() -> None:
    # All buckets in int8 would be slower than none: 40 times 1.4 ms are more than the last bucket saves.
    params = [spec(f"p{i}", 250_000) for i in range(40)]
    model = model_of(params, timing(*(10_000.0 * i for i in range(1, 41))), line(0, 10 * KB))
    groups = tuple((i,) for i in range(40))
    best = choice(model, wire="auto", groups=groups).best
    assert best.wires == (*[None] * 39, "int8")
    assert model.finish_us(groups, ["int8"] * 40) > model.finish_us(groups) > best.finish_us


@pytest.mark.deep
@each_form
@settings(max_examples=25)
@given(ns_per_byte=st.floats(0.1, 200), numels=st.lists(st.integers(1, 300_000), min_size=1, max_size=8))
def test_no_bucket_is_narrow_without_need(ns_per_byte: float, numels: list[int], has_shards: bool) -> None:
    # Of the narrower ones int8 saves less than it costs, if the link is fast.
    params = [spec(f"p{i}", numel, dtype="float32" if numel % 3 else "bfloat16") for i, numel in enumerate(numels)]
    ready_us, used_us = ([1000.0 * i for i in range(len(params))] for _ in range(2))
    when = timing(*ready_us, used=used_us[::-1] if has_shards else ())
    model = model_of(params, when, line(50, ns_per_byte * KB))
    auto, wide, narrow = (choice(model, wire=wire).best for wire in ("auto", None, "int8"))
    assert model.finish_us(auto.groups, auto.wires) <= min(wide.finish_us, auto.finish_us * (1 + 1e-6))
    if not any(auto.wires):
        assert wide.finish_us * (1 - LEAST_GAIN) < narrow.finish_us
    for bucket in range(len(auto.wires)):
        if auto.wires[bucket] is not None:
            fewer = (*auto.wires[:bucket], None, *auto.wires[bucket + 1 :])
            assert model.finish_us(auto.groups, fewer) > auto.finish_us


def test_a_format_that_is_set_is_planned_for_in_every_bucket() -> None:
    params = [*LAYERS, spec("bias", 100)]  # less than a block
    when = timing(100_000, 200_000, 300_000, 400_000, 400_000)
    model = model_of(params, when, line(0, 10 * KB))
    found = choice(model, wire="int8")
    for each in found.candidates:
        assert each.wires == plan_from_groups(params, each.groups, num_ranks=2, wires="int8").wires
    alone = choice(model, wire="int8", groups=((0, 1, 2, 3), (4,))).best
    assert alone.wires == ("int8", "int8")
    # The bias travels as it is.
    assert alone.finish_us == pytest.approx(400_000 + HOST_US + 10 * KB * (4 * INT8 + 400) + 4 * CODING_US, **ROUNDING)


@pytest.mark.parametrize(("num_shards", "part"), [(1, 4), (2, 2), (3, 2), (4, 1), (8, 1)])
def test_a_bucket_with_owners_takes_as_long_as_its_largest_part(num_shards: int, part: int) -> None:
    owned = [replace(param, is_whole=True) for param in LAYERS]  # four of one size
    when, groups = timing(0, 0, 0, 0, end=0, used=(0, 0, 0, 0)), ((0, 1, 2, 3),)
    whole, cut = (model_of(params, when, line(0, 10 * KB), num_shards=num_shards).finish_us(groups) for params in (owned, LAYERS))
    assert whole == pytest.approx(cut * part * num_shards / 4, **ROUNDING)


def test_gathers_have_a_format_of_their_own() -> None:
    when, groups = timing(0, 0, 0, 0, end=0, used=(0, 0, 0, 0)), ((0, 1, 2, 3),)
    full, narrow = (model_of(LAYERS, when, line(0, 10 * KB), param_wire=wire).finish_us(groups) for wire in (None, "int8"))
    assert full - narrow == pytest.approx(4 * (10 * KB * (FULL - INT8) - CODING_US / 2), **ROUNDING)


@pytest.mark.parametrize(("has_shards", "finish"), [(False, 6.0), (True, 8.0)], ids=["whole", "gathered as well"])
def test_without_parameters_one_empty_bucket_leaves_at_the_end_of_backward(has_shards: bool, finish: float) -> None:
    timed = StepTiming(ready_us=(), backward_end_us=4.0)
    for wire in (None, "int8", "auto"):
        found = choose(StepModel(params=[], timing=timed, costs=line(2, 1), has_shards=has_shards), [], wire=wire)
        assert (found.best.groups, found.best.finish_us) == ((), finish)
