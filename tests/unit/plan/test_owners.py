"""Owners of whole parameters: their balance on real models, and on models of any shape."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import param_lists
from undertow.plan import ParamSpec, default_caps, group_by_size, reverse_registration
from undertow.plan.owners import largest_over_mean, lower_bound, owners_of, totals_by_rank, update_work

Shape = tuple[int, ...]


def gpt2() -> Iterator[tuple[str, Shape]]:
    """Yields the shapes of GPT-2 of 124 million parameters, with its tied head."""
    width = 768
    yield "wte", (50257, width)
    yield "wpe", (1024, width)
    for _ in range(12):
        yield from (("norm", (width,)), ("norm", (width,)))
        yield from (("hidden", (width, 3 * width)), ("bias", (3 * width,)))
        yield from (("hidden", (width, width)), ("bias", (width,)))
        yield from (("norm", (width,)), ("norm", (width,)))
        yield from (("hidden", (width, 4 * width)), ("bias", (4 * width,)))
        yield from (("hidden", (4 * width, width)), ("bias", (width,)))
    yield from (("norm", (width,)), ("norm", (width,)))


def llama() -> Iterator[tuple[str, Shape]]:
    """Yields the shapes of Llama 3.2 1B, with its tied head."""
    width, keys, inner = 2048, 512, 8192
    yield "embedding", (128256, width)
    for _ in range(16):
        yield from (("hidden", (rows, width)) for rows in (width, keys, keys, width))
        yield from (("hidden", (inner, width)), ("hidden", (inner, width)))
        yield from (("hidden", (width, inner)), ("norm", (width,)), ("norm", (width,)))
    yield "norm", (width,)


MODELS = {"GPT-2 124M": gpt2, "Llama 1B": llama}


def specs(shapes: Sequence[Shape]) -> list[ParamSpec]:
    return [ParamSpec(name=f"p{index}", shape=shape, dtype="float32", itemsize=4) for index, shape in enumerate(shapes)]


def buckets(params: Sequence[ParamSpec]) -> tuple[tuple[int, ...], ...]:
    caps = default_caps(sum(spec.num_bytes for spec in params), has_shards=True)
    return group_by_size(params, reverse_registration(len(params)), caps)


def largest(sizes: Sequence[int], groups: Sequence[Sequence[int]], owners: Sequence[Sequence[int]]) -> int:
    """Returns the largest rank's sum of `sizes`, which are by parameter."""
    return max(totals_by_rank(sizes, groups, owners, num_ranks=64))


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("has_all", [False, True], ids=["hidden matrices", "all parameters"])
@pytest.mark.parametrize("model", MODELS)
def test_work_and_bytes_of_the_largest_rank_are_within_a_tenth_of_the_lower_bound(
    model: str, has_all: bool, num_ranks: int
) -> None:
    params = specs([shape for kind, shape in MODELS[model]() if has_all or kind == "hidden"])
    groups = buckets(params)
    owners = owners_of(params, groups, num_ranks=num_ranks)
    for sizes in ([update_work(spec) for spec in params], [spec.num_bytes for spec in params]):
        bound = max(sum(sizes) / num_ranks, *sizes)
        assert largest(sizes, groups, owners) <= 1.1 * bound


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("model", MODELS)
def test_the_largest_part_of_a_bucket_is_near_its_lower_bound_on_average(model: str, num_ranks: int) -> None:
    params = specs([shape for _, shape in MODELS[model]()])
    sizes = [spec.num_bytes for spec in params]
    groups = buckets(params)
    owners = owners_of(params, groups, num_ranks=num_ranks)
    parts = [largest(sizes, [group], [ranks]) for group, ranks in zip(groups, owners, strict=True)]
    bounds = [lower_bound([sizes[param] for param in group], num_ranks) for group in groups]
    assert sum(parts) <= 1.1 * sum(bounds)


def test_neighboring_buckets_of_one_matrix_have_different_owners() -> None:
    owners = owners_of(specs([(8, 8)] * 4), [[3], [2], [1], [0]], num_ranks=2)
    assert all(one != other for one, other in pairwise(owners))


def test_bytes_are_balanced_where_the_work_would_allow_any_owner() -> None:
    params = specs([(64,)] * 4 + [(8, 8)])
    owners = owners_of(params, [range(5)], num_ranks=2)
    assert largest([spec.num_bytes for spec in params], [range(5)], owners) == 3 * 64 * 4


@given(param_lists(), st.integers(1, 6))
def test_every_parameter_has_one_owner_which_is_the_same_each_time(params: list[ParamSpec], num_ranks: int) -> None:
    groups = buckets(params)
    owners = owners_of(params, groups, num_ranks=num_ranks)
    assert [len(ranks) for ranks in owners] == [len(group) for group in groups]
    assert all(0 <= rank < num_ranks for ranks in owners for rank in ranks)
    assert owners == owners_of(params, groups, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("num_matrices", "num_ranks", "factor"), [(8, 8, 1.0), (8, 16, 2.0), (8, 24, 1.125), (8, 16_384, 1.125), (1, 1024, 2.0)]
)
def test_the_busiest_rank_of_many_exchanges_about_as_much_as_the_mean(num_matrices: int, num_ranks: int, factor: float) -> None:
    params, group = specs([(8, 8)] * num_matrices), range(num_matrices)
    params = [replace(spec, is_whole=True) for spec in params]
    (owners,) = owners_of(params, [group], num_ranks=num_ranks)
    assert largest_over_mean(params, group, owners, num_ranks=num_ranks) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("dtype", "wire", "is_gather", "factor"),
    [
        ("bfloat16", None, False, 3.0),
        ("bfloat16", None, True, 2.0),
        ("float32", None, False, 2.0),
        ("float32", "bfloat16", False, 3.0),
        ("float32", "int8", False, 1 + 4 * 512 / (512 + 4)),  # a scale for 512 elements
        ("float32", "int8", True, 2.0),
    ],
)
def test_means_go_to_their_owner_in_fp32_and_parameters_as_they_are_gathered(
    dtype: str, wire: str | None, is_gather: bool, factor: float
) -> None:
    (spec,) = specs([(64, 64)])
    spec = replace(spec, dtype=dtype, itemsize=2 if dtype == "bfloat16" else 4, is_whole=True)
    assert largest_over_mean([spec], [0], [0], num_ranks=24, wire=wire, is_gather=is_gather) == pytest.approx(factor)


def test_a_bucket_in_equal_parts_is_an_empty_group() -> None:
    assert owners_of(specs([(8, 8), (4,), (8, 8)]), [[2], [], [0]], num_ranks=2) == ((0,), (), (1,))


def test_a_model_without_parameters_has_no_owners() -> None:
    assert owners_of([], [()], num_ranks=4) == ((),)


@pytest.mark.parametrize(
    ("shape", "work"),
    [((), 1), ((5,), 5), ((6, 2), 24), ((2, 6), 24), ((8, 2, 3), 8 * 36), ((0, 4), 0)],
)
def test_the_work_of_a_matrix_is_its_long_side_times_its_short_side_squared(shape: Shape, work: int) -> None:
    assert update_work(specs([shape])[0]) == work


@pytest.mark.parametrize(("sizes", "num_ranks", "bound"), [([], 3, 0), ([1, 2, 3], 2, 3), ([9, 1], 2, 9), ([4, 4, 4], 2, 8)])
def test_the_lower_bound_is_the_mean_the_largest_or_two_that_must_share(sizes: list[int], num_ranks: int, bound: int) -> None:
    assert lower_bound(sizes, num_ranks) == bound
