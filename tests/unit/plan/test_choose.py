from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest

from support.errors import text_of
from support.strategies import spec, specs_of_sizes
from undertow.config import SyncConfig
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, first_plan, plan_in_order

MIB = 1024 * 1024
PARAMS = specs_of_sizes(*(size * MIB for size in (3, 1, 4, 2, 1)))
PINNED = first_plan(PARAMS, SyncConfig(bucket_cap_mb=4), num_ranks=2)


def buckets_of(num_ranks: int = 2, **settings: Any) -> list[tuple[int, ...]]:
    plan = first_plan(PARAMS, SyncConfig(**settings), num_ranks=num_ranks)
    return [bucket.params for bucket in plan.buckets]


@pytest.mark.parametrize("order", ["observed", "reverse"])
def test_before_anything_is_observed_parameters_go_in_reverse(order: str) -> None:
    assert buckets_of(order=order, bucket_cap_mb=6) == [(4,), (3, 2), (1,), (0,)]


def test_largest_first_goes_by_size() -> None:
    assert buckets_of(order="largest_first", bucket_cap_mb=5) == [(2,), (0, 3), (1,), (4,)]


def test_first_and_last_bucket_are_of_one_mebibyte_at_most() -> None:
    assert buckets_of(order="reverse", bucket_cap_mb=100) == [(4,), (3, 2, 1), (0,)]


def test_a_cap_below_one_mebibyte_is_that_of_every_bucket() -> None:
    assert buckets_of(order="reverse", bucket_cap_mb=0.5) == [(4,), (3,), (2,), (1,), (0,)]


def test_several_caps_are_those_of_the_first_buckets_and_the_last_one_of_all_that_follow() -> None:
    assert buckets_of(order="reverse", bucket_cap_mb=(1, 2, 5)) == [(4,), (3,), (2, 1), (0,)]
    assert buckets_of(order="reverse", bucket_cap_mb=(3, 5)) == [(4, 3), (2, 1), (0,)]
    assert buckets_of(order="reverse", bucket_cap_mb=(100,)) == [(4, 3, 2, 1, 0)]
    assert buckets_of(order="reverse", bucket_cap_mb=(100, 1, 1)) == [(4, 3, 2, 1, 0)]


def test_an_observed_order_is_cut_by_several_caps_too() -> None:
    plan = plan_in_order(PARAMS, (1, 4, 3, 0, 2), SyncConfig(bucket_cap_mb=(1, 3, 7)), num_ranks=2)
    assert [bucket.params for bucket in plan.buckets] == [(1,), (4, 3), (0, 2)]


def test_sparse_parameters_take_no_room_under_the_caps() -> None:
    params = [spec("rows", 9 * MIB, is_sparse=True), *PARAMS]
    plan = first_plan(params, SyncConfig(order="reverse", bucket_cap_mb=100), num_ranks=2)
    assert [(bucket.is_sparse, bucket.params) for bucket in plan.buckets] == [
        (False, (5,)),
        (False, (4, 3, 2, 1)),
        (True, (0,)),
    ]


def test_without_a_cap_the_size_of_the_model_chooses() -> None:
    assert buckets_of(order="reverse") == buckets_of(order="reverse", bucket_cap_mb=1)


def test_an_observed_order_is_followed() -> None:
    plan = plan_in_order(PARAMS, (1, 4, 3, 0, 2), SyncConfig(bucket_cap_mb=4), num_ranks=2)
    assert [bucket.params for bucket in plan.buckets] == [(1,), (4, 3), (0,), (2,)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_pinned_plan_keeps_its_buckets_on_any_number_of_ranks(num_ranks: int) -> None:
    plan = first_plan(PARAMS, SyncConfig(plan=PINNED.to_json(), order="largest_first", bucket_cap_mb=1), num_ranks=num_ranks)
    assert [bucket.params for bucket in plan.buckets] == [bucket.params for bucket in PINNED.buckets]
    assert plan.num_ranks == num_ranks


@pytest.mark.parametrize(
    ("params", "difference"),
    [
        ([spec("other", 3), *PARAMS[1:]], f"it has 'p0' ({3 * MIB},) uint8 where the model has 'other' (3,) float32"),
        (PARAMS[:4], "it has 5 parameters, the model 4"),
        ([*PARAMS, spec("more", 1)], "it has 5 parameters, the model 6"),
    ],
    ids=["another", "fewer", "more"],
)
def test_a_plan_of_another_model_is_refused(params: list[ParamSpec], difference: str) -> None:
    config = SyncConfig(plan=PINNED.to_json())
    assert text_of(ConfigError, lambda: first_plan(params, config, num_ranks=2)) == (
        f"the saved plan is for another model.\n  {difference}\n"
        "  Save a plan of this model with save_plan(), or leave SyncConfig(plan=...) out."
    )


def transformer() -> list[ParamSpec]:
    layer = {"attention": 768 * 2304, "projection": 768 * 768, "up": 768 * 3072, "down": 768 * 3072}
    norms = [f"norm_{i}.{name}" for i in (1, 2) for name in ("weight", "bias")]
    layers = [spec(f"{i}.{name}", numel) for i in range(12) for name, numel in {**dict.fromkeys(norms, 768), **layer}.items()]
    return [spec("embedding", 50257 * 768), spec("positions", 1024 * 768), *layers, spec("norm", 768)]


def mixed() -> list[ParamSpec]:
    pairs = [(spec(f"half.{i}", 512 * (600 + i), dtype="bfloat16"), spec(f"scale.{i}", 700_001)) for i in range(9)]
    return [spec("rows", 40_000 * 64, is_sparse=True), spec("none", 0), *(param for pair in pairs for param in pair)]


@pytest.mark.parametrize(
    ("params", "settings", "num_ranks", "fingerprint"),
    [
        (transformer(), {}, 2, "8118cfe5"),
        (transformer(), {"bucket_cap_mb": 4}, 3, "880138aa"),
        (mixed(), {}, 2, "ca978164"),
        (mixed(), {"bucket_cap_mb": (1, 2, 5), "order": "largest_first"}, 3, "cee1a814"),
    ],
)
def test_plans_of_whole_parameters_stay_what_they_were(
    params: list[ParamSpec], settings: dict[str, Any], num_ranks: int, fingerprint: str
) -> None:
    """Plans that were saved, and ranks of another version, must still be met."""
    assert first_plan(params, SyncConfig(**settings), num_ranks=num_ranks).fingerprint == fingerprint


def test_with_splits_a_parameter_above_the_cap_lies_in_several_buckets() -> None:
    plan = plan_in_order(PARAMS, (1, 4, 3, 0, 2), SyncConfig(bucket_cap_mb=2), num_ranks=2, splits=True)
    half = MIB // 2
    assert [[member if isinstance(member, int) else astuple(member) for member in group] for group in plan.groups] == [
        [1],
        [4],
        [3],
        [(0, 0, 3 * half)],
        [(0, 3 * half, 6 * half)],
        [(2, 0, 3 * half)],
        [(2, 3 * half, 6 * half)],
        [(2, 6 * half, 8 * half)],
    ]


def test_a_first_plan_is_split_where_that_is_asked_for() -> None:
    config = SyncConfig(bucket_cap_mb=2, order="largest_first")
    assert first_plan(PARAMS, config, num_ranks=2).split_params == frozenset()
    assert first_plan(PARAMS, config, num_ranks=2, splits=True).split_params == {0, 2}


def test_a_pinned_plan_in_pieces_keeps_them_on_any_number_of_ranks() -> None:
    pinned = first_plan(PARAMS, SyncConfig(bucket_cap_mb=2), num_ranks=2, splits=True)
    for num_ranks in (2, 3):
        plan = first_plan(PARAMS, SyncConfig(plan=pinned.to_json()), num_ranks=num_ranks, splits=True)
        assert (plan.groups, plan.num_ranks) == (pinned.groups, num_ranks)


def test_a_pinned_plan_of_whole_parameters_is_not_split() -> None:
    plan = first_plan(PARAMS, SyncConfig(plan=PINNED.to_json(), bucket_cap_mb=1), num_ranks=2, splits=True)
    assert plan == PINNED


def test_a_pinned_plan_in_pieces_is_refused_where_gradients_are_whole() -> None:
    pinned = first_plan(PARAMS, SyncConfig(bucket_cap_mb=2), num_ranks=2, splits=True)
    assert text_of(ConfigError, lambda: first_plan(PARAMS, SyncConfig(plan=pinned.to_json()), num_ranks=2)) == (
        "the saved plan cuts parameter 'p0' into pieces.\n"
        "  a gradient that is not sharded lies in one bucket as a whole\n"
        "  Use this plan with a sharded optimizer, or leave SyncConfig(plan=...) out."
    )
