"""Groups of parameters, their order, and the plan that a configuration asks for."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import Call, refusal
from support.strategies import param_lists, size_caps, spec, specs_of_sizes
from undertow.config import SyncConfig
from undertow.plan import (
    ParamSpec,
    Plan,
    SizeCaps,
    default_caps,
    first_plan,
    group_by_size,
    largest_first,
    observed,
    plan_from_groups,
    plan_in_order,
    reverse_registration,
)
from undertow.plan.grouping import is_too_large

MIB = 1024 * 1024


@st.composite
def groupings(draw: st.DrawFn) -> tuple[list[ParamSpec], list[int], SizeCaps]:
    params = draw(param_lists(min_size=1))
    return params, draw(st.permutations(range(len(params)))), draw(size_caps)


def written(groups: Iterable[Iterable[int]]) -> list[str]:
    return [" ".join(map(str, group)) for group in groups]


@pytest.mark.parametrize(
    ("sizes", "caps", "groups"),
    [
        ([], {"cap_bytes": 10}, []),
        ([3, 3, 3, 3], {"cap_bytes": 6}, ["0 1", "2 3"]),
        ([3, 99, 3, 3], {"cap_bytes": 10}, ["0", "1", "2 3"]),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "first_bytes": (3,)}, ["0", "1 2 3", "4"]),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "last_bytes": (3,)}, ["0 1 2", "3", "4"]),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "first_bytes": (3,), "last_bytes": (3,)}, ["0", "1 2 3", "4"]),
        ([3] * 9, {"cap_bytes": 9, "first_bytes": (3, 6)}, ["0", "1 2", "3 4 5", "6 7 8"]),
        ([3] * 9, {"cap_bytes": 9, "last_bytes": (3, 6)}, ["0 1 2", "3 4 5", "6 7", "8"]),
        ([3] * 9, {"cap_bytes": 9, "first_bytes": (3, 6), "last_bytes": (3, 6)}, ["0", "1 2", "3 4 5", "6 7", "8"]),
    ],
)
def test_groups_are_consecutive_and_as_full_as_the_caps_allow(sizes: list[int], caps: dict[str, Any], groups: list[str]) -> None:
    assert written(group_by_size(specs_of_sizes(*sizes), range(len(sizes)), SizeCaps(**caps))) == groups


ALTERNATING = [("float32", "cpu"), ("bfloat16", "cpu"), ("float32", "cuda:0"), ("float32", "cpu"), ("bfloat16", "cpu")]


@pytest.mark.parametrize(
    ("params", "cap_bytes", "groups"),
    [
        ([spec("p", 1, dtype=dtype, device=device) for dtype, device in ALTERNATING], 100, ((2,), (0, 3), (1, 4))),
        ([spec("p", 1 if i % 2 == 0 else 500, is_sparse=i % 2 == 1) for i in range(4)], 8, ((0, 2), (1, 3))),
    ],
    ids=["other dtypes and devices, in the order of their last member", "sparse ones, which take no room"],
)
def test_kinds_travel_apart(params: list[ParamSpec], cap_bytes: int, groups: tuple[tuple[int, ...], ...]) -> None:
    assert group_by_size(params, range(len(params)), SizeCaps(cap_bytes=cap_bytes)) == groups


def all_caps(caps: SizeCaps) -> tuple[float, ...]:
    return caps.cap_bytes, *caps.first_bytes, *caps.last_bytes


@given(groupings())
def test_groups_of_any_model_keep_to_kinds_caps_and_order(grouping: tuple[list[ParamSpec], list[int], SizeCaps]) -> None:
    params, order, caps = grouping
    groups = group_by_size(params, order, caps)
    assert sorted(param for group in groups for param in group) == list(range(len(params)))
    by_kind: dict[object, list[int]] = {}
    for group in groups:
        (kind,) = {params[param].kind for param in group}
        by_kind.setdefault(kind, []).extend(order.index(param) for param in group)
        fitted = [max(all_caps(caps)), *caps.last_bytes[: group is groups[-1]]]
        num_bytes = sum(params[param].num_bytes for param in group)
        assert len(group) == 1 or all(num_bytes <= cap for cap in fitted)
    assert all(places == sorted(places) for places in by_kind.values())
    assert [order.index(group[-1]) for group in groups] == sorted(order.index(group[-1]) for group in groups)


@pytest.mark.parametrize(
    ("caps", "sizes_mib"),
    [
        (default_caps(5 * MIB), [1, 1.5, 2.25]),
        (default_caps(10_000 * MIB), [1, 1.5, 2.25, 3.375, 5.0625, 7.59375, 11.390625, 17.0859375, 25]),
        # Slowly where gradients are reduced to shards.
        (default_caps(10 * MIB, has_shards=True), [1, 1.2, 1.44, 1.728]),
    ],
)
def test_default_caps_grow_from_both_ends(caps: SizeCaps, sizes_mib: list[float]) -> None:
    for ends in (caps.first_bytes, caps.last_bytes):
        assert [round(size / MIB, 9) for size in (*ends, caps.cap_bytes)] == sizes_mib


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (reverse_registration(4), (3, 2, 1, 0)),
        (observed(4, [2, 0, 3, 1]), (2, 0, 3, 1)),
        (observed(4, []), (3, 2, 1, 0)),
        (observed(4, [1]), (1, 3, 2, 0)),
        (observed(4, [2, 2, 0, 2, 0]), (2, 0, 3, 1)),
        (largest_first(specs_of_sizes(20, 50, 20, 100, 50)), (3, 1, 4, 0, 2)),
        (largest_first([spec("short", 30, dtype="uint8"), spec("wide", 10, dtype="float64")]), (1, 0)),
    ],
    ids=[
        "the last one registered is ready first",
        *("all observed", "none observed", "one observed", "observed repeatedly"),
        *("equal sizes keep the order of registration", "size is in bytes"),
    ],
)
def test_an_order_is_that_of_registration_of_arrival_or_of_size(order: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert order == expected


def groups_of(sizes: list[int], *, is_last_alone: bool = False, **settings: Any) -> list[str]:
    """The groups of parameters of so many KiB, in order of arrival; the last one may have another dtype."""
    params = [spec(f"p{at}", 256 * size) for at, size in enumerate(sizes)]
    if is_last_alone:
        params[-1] = spec("other", 128 * sizes[-1], dtype="float64")
    plan = plan_in_order(params, range(len(sizes)), SyncConfig(**settings), num_ranks=2, has_shards=True)
    return written(plan.groups)


def test_a_crumb_travels_with_the_larger_parameter_that_follows() -> None:
    sizes = [2000, 30, 2000, 15, 15, 2000, 30, 9000]
    assert groups_of(sizes) == ["0", "1 2", "3 4 5", "6 7"]
    assert groups_of([30, 2000, 30, 2000, 30]) == ["0 1", "2 3 4"]  # or with the one before, if none follows
    assert groups_of([1200, 33, 1200]) == ["0", "1", "2"]  # more than a thirty-second of the smallest cap
    assert groups_of([2000, 30], is_last_alone=True) == ["0", "1"]
    assert groups_of([1024, 4, 1024, 4], bucket_cap_mb=1.0) == ["0", "1 2 3"]
    # A bucket that is full without the bias of the next layer does not wait for it.
    assert groups_of([4, 400, 4, 400, 4, 400, 4, 400], bucket_cap_mb=[0.8]) == ["0 1 2 3", "4 5 6 7"]
    # small buckets that are asked for stay: the first and the last of one number, and the first of a list
    ends = [1024, *[1024] * 64, 1024]
    assert groups_of(ends, bucket_cap_mb=64.0) == ["0", " ".join(map(str, range(1, 65))), "65"]
    assert groups_of([20, 2000, 2000], bucket_cap_mb=[0.02, 4.0]) == ["0", "1 2"]


@pytest.mark.parametrize(
    ("sizes_mib", "is_large"),
    [
        ([12, 13], False),
        ([13, 13], True),
        ([26], False),  # a single parameter has to be sent
        ([24, 24, 336], False),  # an eighth of all is more than 25 MiB
        ([24, 25, 336], True),
    ],
)
def test_a_bucket_of_several_parameters_that_takes_much_memory_is_too_large(sizes_mib: list[int], is_large: bool) -> None:
    params = specs_of_sizes(*(size * MIB for size in sizes_mib))
    groups = [range(min(2, len(params))), range(2, len(params))]
    assert is_too_large(plan_from_groups(params, list(filter(None, groups)), num_ranks=2)) == is_large


PARAMS = specs_of_sizes(*(size * MIB for size in (3, 1, 4, 2, 1)))


def first(params: list[ParamSpec] = PARAMS, *, num_ranks: int = 2, **settings: Any) -> Plan:
    return first_plan(params, SyncConfig(**settings), num_ranks=num_ranks)


def as_observed(**settings: Any) -> Plan:
    return plan_in_order(PARAMS, (1, 4, 3, 0, 2), SyncConfig(**settings), num_ranks=2)


PINNED = first(bucket_cap_mb=4)
REVERSE = {
    0.5: [(4,), (3,), (2,), (1,), (0,)],  # a cap below one mebibyte is that of every bucket
    1: [(4,), (3,), (2,), (1,), (0,)],
    6: [(4,), (3, 2), (1,), (0,)],
    100: [(4,), (3, 2, 1), (0,)],  # the first and the last one are of one mebibyte at most
    # Those of the first buckets, the last one of all that follow.
    (1, 2, 5): [(4,), (3,), (2, 1), (0,)],
    (3, 5): [(4, 3), (2, 1), (0,)],
    (100,): [(4, 3, 2, 1, 0)],
    (100, 1, 1): [(4, 3, 2, 1, 0)],
}


@pytest.mark.parametrize(
    ("plan", "buckets"),
    [
        *(
            pytest.param(first(order="reverse", bucket_cap_mb=cap), buckets, id=f"in reverse by {cap} MiB")
            for cap, buckets in REVERSE.items()
        ),
        pytest.param(first(order="reverse"), REVERSE[1], id="without a cap the size of the model chooses"),
        pytest.param(as_observed(bucket_cap_mb=4), [(1,), (4, 3), (0,), (2,)], id="an observed order"),
        pytest.param(
            first([spec("rows", 9 * MIB, is_sparse=True), *PARAMS], order="reverse", bucket_cap_mb=100),
            [(5,), (4, 3, 2, 1), (0,)],
            id="sparse parameters take no room under the caps",
        ),
    ],
)
def test_buckets_follow_the_order_and_the_caps_of_the_settings(plan: Plan, buckets: list[tuple[int, ...]]) -> None:
    assert plan.groups == tuple(buckets)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_pinned_plan_keeps_its_groups_on_any_number_of_ranks(num_ranks: int) -> None:
    plan = first(plan=PINNED.to_json(), bucket_cap_mb=1, num_ranks=num_ranks)
    assert (plan.groups, plan.num_ranks) == (PINNED.groups, num_ranks)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        *(
            pytest.param(
                lambda sizes=sizes: SizeCaps(cap_bytes=sizes[0], first_bytes=sizes[1:3], last_bytes=sizes[3:]),
                f"the size of a bucket must be positive, got {', '.join(map(str, sizes))}.\n"
                "  the largest sizes of buckets\n"
                "  Give a size above zero; math.inf puts everything into one bucket.",
                id=str(sizes),
            )
            for value in (0, -1, math.nan)
            for sizes in ((value,), (1, value), (1, 1, value), (1, 1, 1, value))
        ),
        *(
            pytest.param(
                lambda params=params: first(params, plan=PINNED.to_json()),
                f"the saved plan is for another model.\n  {difference}\n"
                "  Save a plan of this model with save_plan(), or leave SyncConfig(plan=...) out.",
                id=name,
            )
            for name, params, difference in (
                (
                    "another",
                    [spec("other", 3), *PARAMS[1:]],
                    f"it has 'p0' ({3 * MIB},) uint8 where the model has 'other' (3,) float32",
                ),
                ("fewer", PARAMS[:4], "it has 5 parameters, the model 4"),
                ("more", [*PARAMS, spec("more", 1)], "it has 5 parameters, the model 6"),
            )
        ),
    ],
)
def test_a_cap_or_a_pinned_plan_that_does_not_fit_is_refused(call: Call, text: str) -> None:
    assert refusal(call) == text
