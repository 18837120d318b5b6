"""Groups of parameters, and of pieces of them, that keep to caps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import refusal
from support.strategies import ITEMSIZE, param_lists, size_caps, spec, specs_of_sizes
from undertow.plan import Member, ParamSpec, Piece, SizeCaps, default_caps, group_by_size, group_in_pieces, largest_first
from undertow.plan.layout import piece_of, unit_numel

MIB = 1024 * 1024


@st.composite
def groupings(draw: st.DrawFn) -> tuple[list[ParamSpec], list[int], SizeCaps]:
    params = draw(param_lists(min_size=1))
    return params, draw(st.permutations(range(len(params)))), draw(size_caps)


def pieces_of(group: Iterable[Member], params: Sequence[ParamSpec]) -> list[Piece]:
    return [piece_of(member, params) for member in group]


def written(groups: Iterable[Iterable[Member]]) -> list[str]:
    return [
        " ".join(f"{it.param}[{it.first}:{it.stop}]" if isinstance(it, Piece) else str(it) for it in group) for group in groups
    ]


@pytest.mark.parametrize(
    ("sizes", "caps", "groups"),
    [
        ([], {"cap_bytes": 10}, []),
        ([3, 3, 3, 3], {"cap_bytes": 6}, ["0 1", "2 3"]),
        ([3, 3, 3, 3], {"cap_bytes": math.inf}, ["0 1 2 3"]),
        ([3, 3, 3, 3], {"cap_bytes": 1}, ["0", "1", "2", "3"]),
        ([3, 99, 3, 3], {"cap_bytes": 10}, ["0", "1", "2 3"]),
        ([99, 0, 0, 3], {"cap_bytes": 10}, ["0", "1 2 3"]),
        ([0, 0, 0], {"cap_bytes": 1}, ["0 1 2"]),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "first_bytes": (3,)}, ["0", "1 2 3", "4"]),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "last_bytes": (3,)}, ["0 1 2", "3", "4"]),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "last_bytes": (6,)}, ["0 1 2", "3 4"]),
        ([3, 3, 3, 3, 3], {"cap_bytes": 9, "first_bytes": (3,), "last_bytes": (3,)}, ["0", "1 2 3", "4"]),
        ([3, 3, 3, 3, 99], {"cap_bytes": 9, "first_bytes": (3,), "last_bytes": (3,)}, ["0", "1 2 3", "4"]),
        ([3, 3, 3], {"cap_bytes": 99, "first_bytes": (3,), "last_bytes": (12,)}, ["0", "1 2"]),
        ([3] * 9, {"cap_bytes": 9, "first_bytes": (3, 6)}, ["0", "1 2", "3 4 5", "6 7 8"]),
        ([3] * 9, {"cap_bytes": 3, "first_bytes": (9, 6)}, ["0 1 2", "3 4", "5", "6", "7", "8"]),
        ([3] * 9, {"cap_bytes": 9, "first_bytes": (3, 6), "last_bytes": (6,)}, ["0", "1 2", "3 4 5", "6", "7 8"]),
        ([3] * 3, {"cap_bytes": 9, "first_bytes": (3, 6, 9, 12)}, ["0", "1 2"]),
        ([3] * 9, {"cap_bytes": 9, "last_bytes": (3, 6)}, ["0 1 2", "3 4 5", "6 7", "8"]),
        ([3] * 9, {"cap_bytes": 9, "first_bytes": (3, 6), "last_bytes": (3, 6)}, ["0", "1 2", "3 4 5", "6 7", "8"]),
        ([3] * 2, {"cap_bytes": 9, "last_bytes": (3, 6, 9)}, ["0", "1"]),
        ([3] * 3, {"cap_bytes": 9, "first_bytes": (3,), "last_bytes": (9, 9)}, ["0", "1 2"]),
        ([99, 3, 3, 3, 3], {"cap_bytes": 9, "first_bytes": (3, 6)}, ["0", "1 2", "3 4"]),
    ],
)
def test_groups_are_consecutive_and_as_full_as_the_caps_allow(sizes: list[int], caps: dict[str, Any], groups: list[str]) -> None:
    assert written(group_by_size(specs_of_sizes(*sizes), range(len(sizes)), SizeCaps(**caps))) == groups


# In bytes; pieces are multiples of 16.
@pytest.mark.parametrize(
    ("sizes", "num_ranks", "caps", "groups"),
    [
        ([], 1, {"cap_bytes": 64}, []),
        ([64, 64], 1, {"cap_bytes": 64}, ["0", "1"]),
        ([65], 1, {"cap_bytes": 64}, ["0[0:48]", "0[48:65]"]),
        ([256], 1, {"cap_bytes": 100}, ["0[0:96]", "0[96:176]", "0[176:256]"]),
        ([256], 1, {"cap_bytes": math.inf}, ["0"]),
        ([40], 1, {"cap_bytes": 1}, ["0[0:16]", "0[16:32]", "0[32:40]"]),
        ([16, 96, 16], 1, {"cap_bytes": 64}, ["0 1[0:48]", "1[48:96] 2"]),
        ([48, 96, 16], 1, {"cap_bytes": 64}, ["0", "1[0:48]", "1[48:96] 2"]),
        ([0, 100, 0], 1, {"cap_bytes": 64}, ["0 1[0:64]", "1[64:100] 2"]),
        ([160], 1, {"cap_bytes": 64, "first_bytes": (16, 32)}, ["0[0:16]", "0[16:48]", "0[48:112]", "0[112:160]"]),
        ([160], 1, {"cap_bytes": 64, "last_bytes": (16, 32)}, ["0[0:64]", "0[64:112]", "0[112:144]", "0[144:160]"]),
        ([16, 160], 1, {"cap_bytes": 64, "last_bytes": (16, 32)}, ["0 1[0:48]", "1[48:112]", "1[112:144]", "1[144:160]"]),
        ([256, 16], 1, {"cap_bytes": 99, "last_bytes": (32, 48)}, ["0[0:96]", "0[96:192]", "0[192:240]", "0[240:256] 1"]),
        ([100], 1, {"cap_bytes": 64, "first_bytes": (16,), "last_bytes": (200,)}, ["0[0:16]", "0[16:100]"]),
        ([100], 3, {"cap_bytes": 64}, ["0[0:48]", "0[48:100]"]),  # multiples of the number of ranks too
    ],
)
def test_a_parameter_above_the_cap_is_cut_into_even_pieces(
    sizes: list[int], num_ranks: int, caps: dict[str, Any], groups: list[str]
) -> None:
    found = group_in_pieces(specs_of_sizes(*sizes), range(len(sizes)), SizeCaps(**caps), num_ranks=num_ranks)
    assert written(found) == groups


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


def test_largest_first_example() -> None:
    params = specs_of_sizes(15, 50, 100, 20, 30)
    groups = group_by_size(params, largest_first(params), SizeCaps(cap_bytes=100))
    assert [[params[i].num_bytes for i in group] for group in groups] == [[100], [50, 30, 20], [15]]


def all_caps(caps: SizeCaps) -> tuple[float, ...]:
    return caps.cap_bytes, *caps.first_bytes, *caps.last_bytes


def fits(params: list[ParamSpec], group: Sequence[Member], cap_bytes: float, smallest: float = math.inf) -> bool:
    """Whether a group keeps to a cap, as far as it can: one parameter, or the smallest piece of one, may be above it."""
    pieces = pieces_of(group, params)
    is_alone = len(pieces) == 1 and pieces[0].numel <= smallest
    return is_alone or sum(piece.numel * params[piece.param].itemsize for piece in pieces) <= cap_bytes


@given(groupings())
def test_groups_of_whole_parameters(grouping: tuple[list[ParamSpec], list[int], SizeCaps]) -> None:
    params, order, caps = grouping
    groups = group_by_size(params, order, caps)
    assert sorted(i for group in groups for i in group) == list(range(len(params)))
    places = [[order.index(i) for i in group] for group in groups]
    assert all(of_group and of_group == sorted(of_group) for of_group in places)
    assert [of_group[-1] for of_group in places] == sorted(of_group[-1] for of_group in places)
    assert all(len({params[i].kind for i in group}) == 1 for group in groups)
    assert all(fits(params, group, max(all_caps(caps))) for group in groups)
    assert all(fits(params, groups[0], cap) for cap in caps.first_bytes[:1])
    assert all(fits(params, groups[-1], cap) for cap in caps.last_bytes[:1])


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), first=st.lists(st.integers(1, 90), max_size=3))
def test_each_of_the_first_buckets_has_a_cap_of_its_own_and_is_as_full_as_it_allows(sizes: list[int], first: list[int]) -> None:
    params = specs_of_sizes(*sizes)
    groups = group_by_size(params, range(len(sizes)), SizeCaps(cap_bytes=50, first_bytes=tuple(first)))
    caps = [*first, *[50] * len(groups)]
    assert all(fits(params, group, cap) for group, cap in zip(groups, caps, strict=False))
    one_more = [(*group, after[0]) for group, after in pairwise(groups)]
    assert not any(fits(params, group, cap) for group, cap in zip(one_more, caps, strict=False))


@given(groupings(), st.integers(1, 9))
def test_groups_with_pieces(grouping: tuple[list[ParamSpec], list[int], SizeCaps], num_ranks: int) -> None:
    params, order, caps = grouping
    groups = group_in_pieces(*grouping, num_ranks=num_ranks)
    by_group = [pieces_of(group, params) for group in groups]
    by_kind: dict[object, list[tuple[int, int]]] = {}
    for group, pieces in zip(groups, by_group, strict=True):
        (kind,) = {params[piece.param].kind for piece in pieces}
        by_kind.setdefault(kind, []).extend((order.index(piece.param), piece.first) for piece in pieces)
        assert len({piece.param for piece in pieces}) == len(pieces) > 0
        unit = unit_numel(itemsize=ITEMSIZE[kind[0]], num_ranks=num_ranks)
        fitted = [max(all_caps(caps)), *caps.first_bytes[: group is groups[0]], *caps.last_bytes[: group is groups[-1]]]
        assert all(fits(params, group, cap, unit) for cap in fitted)
    assert all(places == sorted(places) for places in by_kind.values())
    for param, param_spec in enumerate(params):
        held = [range(piece.first, piece.stop) for pieces in by_group for piece in pieces if piece.param == param]
        assert [element for elements in held for element in elements] == list(range(param_spec.slot_numel))
        assert not any(elements.start % num_ranks or elements.start * param_spec.itemsize % 16 for elements in held)


@given(numel=st.integers(1, 5000), cap=st.integers(1, 3000), num_ranks=st.integers(1, 9))
def test_under_one_cap_pieces_differ_by_less_than_two_of_the_smallest(numel: int, cap: int, num_ranks: int) -> None:
    params = [spec("p", numel)]
    groups = group_in_pieces(params, [0], SizeCaps(cap_bytes=cap), num_ranks=num_ranks)
    sizes = [piece.numel for group in groups for piece in pieces_of(group, params)]
    assert max(sizes) - min(sizes) < 2 * unit_numel(itemsize=4, num_ranks=num_ranks)


@given(groupings(), st.integers(1, 9))
def test_what_keeps_to_every_cap_is_grouped_as_without_pieces(
    grouping: tuple[list[ParamSpec], list[int], SizeCaps], num_ranks: int
) -> None:
    params, order, caps = grouping
    within = [param for param in order if params[param].num_bytes <= min(all_caps(caps))]
    assert group_in_pieces(params, within, caps, num_ranks=num_ranks) == group_by_size(params, within, caps)


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
    assert refusal(lambda: SizeCaps(**caps(value))) == (
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


def test_default_caps_grow_slowly_where_gradients_are_reduced_to_shards() -> None:
    caps = default_caps(10 * MIB, has_shards=True)
    assert [round(size / MIB, 3) for size in (*caps.first_bytes, caps.cap_bytes)] == [1.0, 1.2, 1.44, 1.728]


def test_only_the_last_bucket_is_left_where_a_reduce_scatter_is_just_fast_enough() -> None:
    # 60 gradients of 1 MiB every 10 ms, on a link that takes 8 ms for each.
    left = {}
    for has_shards in (False, True):
        free_ms = 0.0
        for group in group_by_size(specs_of_sizes(*[MIB] * 60), range(60), default_caps(60 * MIB, has_shards=has_shards)):
            free_ms = max(free_ms, 10.0 * (group[-1] + 1)) + 8.0 * len(group)
        left[has_shards] = free_ms - 600.0
    assert left == {False: 50.0, True: 8.0}


def test_an_embedding_that_is_reduced_last_ends_with_small_pieces() -> None:
    params = specs_of_sizes(150 * MIB, *[2 * MIB] * 30)
    groups = group_in_pieces(params, range(30, -1, -1), default_caps(210 * MIB), num_ranks=8)
    sizes = [round(sum(piece.numel for piece in pieces_of(group, params)) / MIB, 1) for group in groups]
    assert sizes[-9:] == [20.4, 17.0, 10.8, 7.2, 4.9, 3.3, 2.2, 1.5, 1.0]
    assert all(isinstance(group[-1], Piece) for group in groups[-13:])
