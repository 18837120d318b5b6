from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.errors import text_of
from support.strategies import param_lists, size_caps, spec, specs_of_sizes
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, SizeCaps, default_caps, group_by_size, largest_first

MIB = 1024 * 1024
Groups = tuple[tuple[int, ...], ...]


@st.composite
def groupings(draw: st.DrawFn) -> tuple[list[ParamSpec], list[int], SizeCaps]:
    params = draw(param_lists(min_size=1))
    return params, draw(st.permutations(range(len(params)))), draw(size_caps)


def fits(params: list[ParamSpec], group: tuple[int, ...], cap_bytes: float) -> bool:
    """Whether a group keeps to a cap, as far as it can: one parameter may be above it."""
    return len(group) == 1 or sum(params[i].num_bytes for i in group) <= cap_bytes


def in_order(sizes: list[int], **caps: Any) -> Groups:
    return group_by_size(specs_of_sizes(*sizes), range(len(sizes)), SizeCaps(**caps))


def test_largest_first_example() -> None:
    params = specs_of_sizes(15, 50, 100, 20, 30)
    groups = group_by_size(params, largest_first(params), SizeCaps(cap_bytes=100))
    assert [[params[i].num_bytes for i in group] for group in groups] == [[100], [50, 30, 20], [15]]


@pytest.mark.parametrize(
    ("sizes", "caps", "groups"),
    [
        ([], {"cap_bytes": 10}, ()),
        ([3, 3, 3, 3], {"cap_bytes": 6}, ((0, 1), (2, 3))),
        ([3, 3, 3, 3], {"cap_bytes": math.inf}, ((0, 1, 2, 3),)),
        ([3, 3, 3, 3], {"cap_bytes": 1}, ((0,), (1,), (2,), (3,))),
        ([3, 99, 3, 3], {"cap_bytes": 10}, ((0,), (1,), (2, 3))),
        ([99, 0, 0, 3], {"cap_bytes": 10}, ((0,), (1, 2, 3))),
        ([0, 0, 0], {"cap_bytes": 1}, ((0, 1, 2),)),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "first_bytes": (3,)}, ((0,), (1, 2, 3), (4,))),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "last_bytes": (3,)}, ((0, 1, 2), (3,), (4,))),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "last_bytes": (6,)}, ((0, 1, 2), (3, 4))),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "first_bytes": (3,), "last_bytes": (3,)}, ((0,), (1, 2, 3), (4,))),
        ([3, 3, 3, 3, 99], {"cap_bytes": 9, "first_bytes": (3,), "last_bytes": (3,)}, ((0,), (1, 2, 3), (4,))),
        ([3, 3, 3], {"cap_bytes": 99, "first_bytes": (3,), "last_bytes": (12,)}, ((0,), (1, 2))),
        ([3] * 9, {"cap_bytes": 9, "first_bytes": (3, 6)}, ((0,), (1, 2), (3, 4, 5), (6, 7, 8))),
        ([3] * 9, {"cap_bytes": 3, "first_bytes": (9, 6)}, ((0, 1, 2), (3, 4), (5,), (6,), (7,), (8,))),
        ([3] * 9, {"cap_bytes": 9, "first_bytes": (3, 6), "last_bytes": (6,)}, ((0,), (1, 2), (3, 4, 5), (6,), (7, 8))),
        ([3] * 3, {"cap_bytes": 9, "first_bytes": (3, 6, 9, 12)}, ((0,), (1, 2))),
        ([3] * 9, {"cap_bytes": 9, "last_bytes": (3, 6)}, ((0, 1, 2), (3, 4, 5), (6, 7), (8,))),
        ([3] * 9, {"cap_bytes": 9, "first_bytes": (3, 6), "last_bytes": (3, 6)}, ((0,), (1, 2), (3, 4, 5), (6, 7), (8,))),
        ([3] * 2, {"cap_bytes": 9, "last_bytes": (3, 6, 9)}, ((0,), (1,))),
        ([3] * 3, {"cap_bytes": 9, "first_bytes": (3,), "last_bytes": (9, 9)}, ((0,), (1, 2))),
        ([99, 3, 3, 3, 3], {"cap_bytes": 9, "first_bytes": (3, 6)}, ((0,), (1, 2), (3, 4))),
    ],
)
def test_groups_are_consecutive_and_as_full_as_the_caps_allow(sizes: list[int], caps: dict[str, Any], groups: Groups) -> None:
    assert in_order(sizes, **caps) == groups


def test_other_dtypes_and_devices_travel_apart_in_the_order_of_their_last_member() -> None:
    kinds = [("float32", "cpu"), ("bfloat16", "cpu"), ("float32", "cuda:0"), ("float32", "cpu"), ("bfloat16", "cpu")]
    params = [spec(f"p{i}", 1, dtype=dtype, device=device) for i, (dtype, device) in enumerate(kinds)]
    assert group_by_size(params, range(5), SizeCaps(cap_bytes=100)) == ((2,), (0, 3), (1, 4))


def test_sparse_gradients_travel_apart_from_dense_ones_and_take_no_room() -> None:
    params = [spec("dense", 1), spec("rows", 500, is_sparse=True), spec("bias", 1), spec("more", 500, is_sparse=True)]
    assert group_by_size(params, range(4), SizeCaps(cap_bytes=8)) == ((0, 2), (1, 3))


@given(groupings())
def test_every_parameter_is_in_exactly_one_group(grouping: tuple[list[ParamSpec], list[int], SizeCaps]) -> None:
    groups = group_by_size(*grouping)
    assert sorted(i for group in groups for i in group) == list(range(len(grouping[0])))
    assert all(groups)


@given(groupings())
def test_a_group_is_of_one_kind_and_in_order(grouping: tuple[list[ParamSpec], list[int], SizeCaps]) -> None:
    params, order, _ = grouping
    position = {index: at for at, index in enumerate(order)}
    for group in group_by_size(*grouping):
        assert len({params[i].kind for i in group}) == 1
        assert all(position[earlier] < position[later] for earlier, later in pairwise(group))


@given(groupings())
def test_groups_leave_in_the_order_of_their_last_member(grouping: tuple[list[ParamSpec], list[int], SizeCaps]) -> None:
    position = {index: at for at, index in enumerate(grouping[1])}
    lasts = [position[group[-1]] for group in group_by_size(*grouping)]
    assert lasts == sorted(lasts)


@given(groupings())
def test_caps_are_kept_by_all_but_a_single_parameter_above_them(grouping: tuple[list[ParamSpec], list[int], SizeCaps]) -> None:
    params, _, caps = grouping
    largest = max((caps.cap_bytes, *caps.first_bytes, *caps.last_bytes))
    assert all(fits(params, group, largest) for group in group_by_size(*grouping))


@given(groupings())
def test_first_bucket_keeps_its_cap(grouping: tuple[list[ParamSpec], list[int], SizeCaps]) -> None:
    params, _, caps = grouping
    assume(caps.first_bytes)
    assert fits(params, group_by_size(*grouping)[0], caps.first_bytes[0])


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), first=st.lists(st.integers(1, 90), max_size=3))
def test_each_of_the_first_buckets_has_a_cap_of_its_own_and_is_as_full_as_it_allows(sizes: list[int], first: list[int]) -> None:
    params = specs_of_sizes(*sizes)
    groups = in_order(sizes, cap_bytes=50, first_bytes=tuple(first))
    caps = [*first, *[50] * len(groups)]
    assert all(fits(params, group, cap) for group, cap in zip(groups, caps, strict=False))
    one_more = [(*group, after[0]) for group, after in pairwise(groups)]
    assert not any(fits(params, group, cap) for group, cap in zip(one_more, caps, strict=False))


@given(groupings())
def test_last_bucket_keeps_its_cap(grouping: tuple[list[ParamSpec], list[int], SizeCaps]) -> None:
    params, _, caps = grouping
    assume(caps.last_bytes)
    assert fits(params, group_by_size(*grouping)[-1], caps.last_bytes[0])


@pytest.mark.parametrize("value", [0, -1, math.nan])
@pytest.mark.parametrize(
    ("name", "caps"),
    [
        ("cap_bytes", lambda value: {"cap_bytes": value}),
        ("first_bytes", lambda value: {"cap_bytes": 1, "first_bytes": (value,)}),
        ("first_bytes", lambda value: {"cap_bytes": 1, "first_bytes": (1, value)}),
        ("last_bytes", lambda value: {"cap_bytes": 1, "last_bytes": (1, value)}),
    ],
    ids=["cap_bytes", "first_bytes", "second of first_bytes", "last_bytes"],
)
def test_a_cap_must_be_positive(name: str, caps: Callable[[float], dict[str, Any]], value: float) -> None:
    assert text_of(ConfigError, lambda: SizeCaps(**caps(value))) == (
        f"a bucket size must be positive, got {name}={value}.\n"
        "  the largest sizes of buckets\n"
        "  Give a size above zero; math.inf puts everything into one bucket."
    )


@pytest.mark.parametrize(
    ("total_mib", "cap_mib", "ends_mib"),
    [
        (0, 1.0, (1,)),
        (1, 1.0, (1,)),
        (2, 1.5, (1,)),
        (5, 2.25, (1, 1.5)),
        (20, 5.0625, (1, 1.5, 2.25, 3.375)),
        (10_000, 25.0, (1, 1.5, 2.25, 3.375, 5.0625, 7.59375, 11.390625, 17.0859375)),
    ],
)
def test_default_caps_grow_from_both_ends(total_mib: int, cap_mib: float, ends_mib: tuple[float, ...]) -> None:
    ends = tuple(size * MIB for size in ends_mib)
    assert default_caps(total_mib * MIB) == SizeCaps(cap_bytes=cap_mib * MIB, first_bytes=ends, last_bytes=ends)
