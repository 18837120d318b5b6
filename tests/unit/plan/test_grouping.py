from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.errors import text_of
from support.strategies import param_lists, size_caps, spec, specs_of_sizes
from undertow.errors import ConfigError
from undertow.plan import Member, ParamSpec, Piece, SizeCaps, default_caps, group_by_size, group_in_pieces, largest_first
from undertow.plan.layout import piece_of, unit_numel

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


def test_default_caps_grow_slowly_where_gradients_are_reduced_to_shards() -> None:
    caps = default_caps(10 * MIB, has_shards=True)
    assert [round(size / MIB, 3) for size in (*caps.first_bytes, caps.cap_bytes)] == [1.0, 1.2, 1.44, 1.728]


def test_only_the_last_bucket_is_left_where_a_reduce_scatter_is_just_fast_enough() -> None:
    # 60 gradients of 1 MiB every 10 ms, on a link that takes 8 ms for each.
    params, left = specs_of_sizes(*[MIB] * 60), {}
    for has_shards in (False, True):
        free_ms = 0.0
        for group in group_by_size(params, range(60), default_caps(60 * MIB, has_shards=has_shards)):
            free_ms = max(free_ms, 10.0 * (group[-1] + 1)) + 8.0 * len(group)
        left[has_shards] = free_ms - 600.0
    assert left == {False: 50.0, True: 8.0}


def pieces_of(group: Iterable[Member], params: Sequence[ParamSpec]) -> list[Piece]:
    return [piece_of(member, params) for member in group]


def written(member: Member) -> str:
    return f"{member.param}[{member.first}:{member.stop}]" if isinstance(member, Piece) else str(member)


@st.composite
def groupings_in_pieces(draw: st.DrawFn) -> tuple[list[ParamSpec], list[int], SizeCaps, int]:
    return *draw(groupings()), draw(st.integers(1, 9))


def keeps_to(params: list[ParamSpec], group: tuple[Member, ...], cap_bytes: float, num_ranks: int) -> bool:
    """Whether a group keeps to a cap; a single piece may be above it that is the smallest possible."""
    pieces = pieces_of(group, params)
    itemsize = params[pieces[0].param].itemsize
    is_smallest = len(pieces) == 1 and pieces[0].numel <= unit_numel(itemsize=itemsize, num_ranks=num_ranks)
    return is_smallest or sum(piece.numel for piece in pieces) * itemsize <= cap_bytes


# In bytes; pieces are multiples of 16.
@pytest.mark.parametrize(
    ("sizes", "caps", "groups"),
    [
        ([], {"cap_bytes": 64}, []),
        ([64, 64], {"cap_bytes": 64}, ["0", "1"]),
        ([65], {"cap_bytes": 64}, ["0[0:48]", "0[48:65]"]),
        ([256], {"cap_bytes": 100}, ["0[0:96]", "0[96:176]", "0[176:256]"]),
        ([256], {"cap_bytes": math.inf}, ["0"]),
        ([40], {"cap_bytes": 1}, ["0[0:16]", "0[16:32]", "0[32:40]"]),
        ([16, 96, 16], {"cap_bytes": 64}, ["0 1[0:48]", "1[48:96] 2"]),
        ([48, 96, 16], {"cap_bytes": 64}, ["0", "1[0:48]", "1[48:96] 2"]),
        ([0, 100, 0], {"cap_bytes": 64}, ["0 1[0:64]", "1[64:100] 2"]),
        ([160], {"cap_bytes": 64, "first_bytes": (16, 32)}, ["0[0:16]", "0[16:48]", "0[48:112]", "0[112:160]"]),
        ([160], {"cap_bytes": 64, "last_bytes": (16, 32)}, ["0[0:64]", "0[64:112]", "0[112:144]", "0[144:160]"]),
        (
            [16, 160],
            {"cap_bytes": 64, "last_bytes": (16, 32)},
            ["0 1[0:48]", "1[48:112]", "1[112:144]", "1[144:160]"],
        ),
        ([256, 16], {"cap_bytes": 99, "last_bytes": (32, 48)}, ["0[0:96]", "0[96:192]", "0[192:240]", "0[240:256] 1"]),
        ([100], {"cap_bytes": 64, "first_bytes": (16,), "last_bytes": (200,)}, ["0[0:16]", "0[16:100]"]),
    ],
)
def test_a_parameter_above_the_cap_is_cut_into_even_pieces(sizes: list[int], caps: dict[str, Any], groups: list[str]) -> None:
    found = group_in_pieces(specs_of_sizes(*sizes), range(len(sizes)), SizeCaps(**caps), num_ranks=1)
    assert [" ".join(map(written, group)) for group in found] == groups


def test_pieces_are_multiples_of_the_number_of_ranks_too() -> None:
    ((first, second),) = zip(*group_in_pieces(specs_of_sizes(100), [0], SizeCaps(cap_bytes=64), num_ranks=3), strict=True)
    assert (first, second) == (Piece(param=0, first=0, stop=48), Piece(param=0, first=48, stop=100))


def test_an_embedding_that_is_reduced_last_ends_with_small_pieces() -> None:
    params = specs_of_sizes(150 * MIB, *[2 * MIB] * 30)
    groups = group_in_pieces(params, range(30, -1, -1), default_caps(210 * MIB), num_ranks=8)
    sizes = [round(sum(piece.numel for piece in pieces_of(group, params)) / MIB, 1) for group in groups]
    assert sizes[-9:] == [20.4, 17.0, 10.8, 7.2, 4.9, 3.3, 2.2, 1.5, 1.0]
    assert all(isinstance(group[-1], Piece) for group in groups[-13:])


@given(groupings_in_pieces())
def test_pieces_hold_each_element_once(grouping: tuple[list[ParamSpec], list[int], SizeCaps, int]) -> None:
    params, order, caps, num_ranks = grouping
    found = [piece for group in group_in_pieces(params, order, caps, num_ranks=num_ranks) for piece in pieces_of(group, params)]
    for param, param_spec in enumerate(params):
        ranges = [range(piece.first, piece.stop) for piece in found if piece.param == param]
        assert [element for elements in ranges for element in elements] == list(range(param_spec.slot_numel))


@given(groupings_in_pieces())
def test_pieces_of_one_parameter_go_to_different_groups(grouping: tuple[list[ParamSpec], list[int], SizeCaps, int]) -> None:
    params, order, caps, num_ranks = grouping
    for group in group_in_pieces(params, order, caps, num_ranks=num_ranks):
        assert len({piece.param for piece in pieces_of(group, params)}) == len(group) > 0


@given(groupings_in_pieces())
def test_a_group_with_pieces_is_of_one_kind_and_in_order(grouping: tuple[list[ParamSpec], list[int], SizeCaps, int]) -> None:
    params, order, caps, num_ranks = grouping
    position = {index: at for at, index in enumerate(order)}
    by_kind: dict[object, list[tuple[int, int]]] = {}
    for group in group_in_pieces(params, order, caps, num_ranks=num_ranks):
        (kind,) = {params[piece.param].kind for piece in pieces_of(group, params)}
        by_kind.setdefault(kind, []).extend((position[piece.param], piece.first) for piece in pieces_of(group, params))
    assert all(places == sorted(places) for places in by_kind.values())


@given(groupings_in_pieces())
def test_no_group_with_pieces_is_above_its_cap(grouping: tuple[list[ParamSpec], list[int], SizeCaps, int]) -> None:
    params, order, caps, num_ranks = grouping
    groups = group_in_pieces(params, order, caps, num_ranks=num_ranks)
    largest = max((caps.cap_bytes, *caps.first_bytes, *caps.last_bytes))
    assert all(keeps_to(params, group, largest, num_ranks) for group in groups)
    assert all(keeps_to(params, groups[0], cap, num_ranks) for cap in caps.first_bytes[:1])
    assert all(keeps_to(params, groups[-1], cap, num_ranks) for cap in caps.last_bytes[:1])


@given(groupings_in_pieces())
def test_pieces_begin_at_multiples_of_the_ranks_and_of_16_bytes(
    grouping: tuple[list[ParamSpec], list[int], SizeCaps, int],
) -> None:
    params, order, caps, num_ranks = grouping
    for group in group_in_pieces(params, order, caps, num_ranks=num_ranks):
        for piece in pieces_of(group, params):
            assert piece.first % num_ranks == 0
            assert piece.first * params[piece.param].itemsize % 16 == 0


@given(numel=st.integers(1, 5000), cap=st.integers(1, 3000), num_ranks=st.integers(1, 9))
def test_under_one_cap_pieces_differ_by_less_than_two_of_the_smallest(numel: int, cap: int, num_ranks: int) -> None:
    params = [spec("p", numel)]
    groups = group_in_pieces(params, [0], SizeCaps(cap_bytes=cap), num_ranks=num_ranks)
    sizes = [piece.numel for group in groups for piece in pieces_of(group, params)]
    assert max(sizes) - min(sizes) < 2 * unit_numel(itemsize=4, num_ranks=num_ranks)


@given(groupings_in_pieces())
def test_what_keeps_to_every_cap_is_grouped_as_without_pieces(
    grouping: tuple[list[ParamSpec], list[int], SizeCaps, int],
) -> None:
    params, order, caps, num_ranks = grouping
    smallest = min((caps.cap_bytes, *caps.first_bytes, *caps.last_bytes))
    assume(all(param.num_bytes <= smallest for param in params))
    assert group_in_pieces(params, order, caps, num_ranks=num_ranks) == group_by_size(params, order, caps)
