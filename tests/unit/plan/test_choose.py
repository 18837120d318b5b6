"""The plan that a configuration asks for, of parameters that nothing is known of or whose order was observed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from support.errors import refusal
from support.strategies import spec, specs_of_sizes
from undertow.config import SyncConfig
from undertow.plan import Member, ParamSpec, Piece, Plan, first_plan, plan_in_order

MIB = 1024 * 1024
PARAMS = specs_of_sizes(*(size * MIB for size in (3, 1, 4, 2, 1)))


def first(params: list[ParamSpec] = PARAMS, *, num_ranks: int = 2, splits: bool = False, **settings: Any) -> Plan:
    return first_plan(params, SyncConfig(**settings), num_ranks=num_ranks, splits=splits)


def observed(*, splits: bool = False, **settings: Any) -> Plan:
    return plan_in_order(PARAMS, (1, 4, 3, 0, 2), SyncConfig(**settings), num_ranks=2, splits=splits)


def pieces(param: int, ends: tuple[int, ...]) -> list[tuple[Piece]]:
    """Each alone, between such numbers of half mebibytes."""
    return [(Piece(param=param, first=start * MIB // 2, stop=stop * MIB // 2),) for start, stop in pairwise(ends)]


PINNED, IN_PIECES = first(bucket_cap_mb=4), first(bucket_cap_mb=2, splits=True)
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
BUCKETS = {
    **{f"in reverse by {cap} MiB": (first(order="reverse", bucket_cap_mb=cap), buckets) for cap, buckets in REVERSE.items()},
    "before anything is observed": (first(order="observed", bucket_cap_mb=6), REVERSE[6]),
    "without a cap the size of the model chooses": (first(order="reverse"), REVERSE[1]),
    "largest first goes by size": (first(order="largest_first", bucket_cap_mb=5), [(2,), (0, 3), (1,), (4,)]),
    "an observed order": (observed(bucket_cap_mb=4), [(1,), (4, 3), (0,), (2,)]),
    "an observed order by several caps": (observed(bucket_cap_mb=(1, 3, 7)), [(1,), (4, 3), (0, 2)]),
    "sparse parameters take no room under the caps": (
        first([spec("rows", 9 * MIB, is_sparse=True), *PARAMS], order="reverse", bucket_cap_mb=100),
        [(5,), (4, 3, 2, 1), (0,)],
    ),
    # In pieces of a mebibyte and a half.
    "a first plan in pieces": (
        first(bucket_cap_mb=2, order="largest_first", splits=True),
        [*pieces(2, (0, 3, 6, 8)), *pieces(0, (0, 3, 6)), (3,), (1,), (4,)],
    ),
    "an observed order in pieces": (
        observed(bucket_cap_mb=2, splits=True),
        [(1,), (4,), (3,), *pieces(0, (0, 3, 6)), *pieces(2, (0, 3, 6, 8))],
    ),
}


@pytest.mark.parametrize(("plan", "buckets"), BUCKETS.values(), ids=BUCKETS)
def test_the_buckets_of_a_plan(plan: Plan, buckets: list[tuple[Member, ...]]) -> None:
    assert plan.groups == tuple(buckets)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_pinned_plan_keeps_its_groups_on_any_number_of_ranks(num_ranks: int) -> None:
    for pinned, splits in ((PINNED, False), (PINNED, True), (IN_PIECES, True)):
        plan = first(plan=pinned.to_json(), bucket_cap_mb=1, num_ranks=num_ranks, splits=splits)
        assert (plan.groups, plan.num_ranks) == (pinned.groups, num_ranks)


REFUSALS: dict[str, tuple[Callable[[], Plan], str]] = {
    **{
        name: (
            lambda params=params: first(params, plan=PINNED.to_json()),
            f"the saved plan is for another model.\n  {difference}\n"
            "  Save a plan of this model with save_plan(), or leave SyncConfig(plan=...) out.",
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
    },
    "in pieces": (
        lambda: first(plan=IN_PIECES.to_json()),
        "the saved plan cuts parameter 'p0' into pieces.\n"
        "  a gradient that is not sharded lies in one bucket as a whole\n"
        "  Use this plan with a sharded optimizer, or leave SyncConfig(plan=...) out.",
    ),
}


@pytest.mark.parametrize(("call", "text"), REFUSALS.values(), ids=REFUSALS)
def test_a_pinned_plan_that_does_not_fit_is_refused(call: Callable[[], Plan], text: str) -> None:
    assert refusal(call) == text


def mixed() -> list[ParamSpec]:
    pairs = [(spec(f"half.{i}", 512 * (600 + i), dtype="bfloat16"), spec(f"scale.{i}", 700_001)) for i in range(9)]
    return [spec("rows", 40_000 * 64, is_sparse=True), spec("none", 0), *(param for pair in pairs for param in pair)]


@pytest.mark.parametrize(
    ("params", "settings", "num_ranks", "fingerprint"),
    [
        (mixed(), {}, 2, "ca978164"),
        (mixed(), {"bucket_cap_mb": (1, 2, 5), "order": "largest_first"}, 3, "cee1a814"),
    ],
)
def test_plans_of_whole_parameters_stay_what_they_were(
    params: list[ParamSpec], settings: dict[str, Any], num_ranks: int, fingerprint: str
) -> None:
    # Plans that were saved, and ranks of another version, must still be met.
    assert first(params, num_ranks=num_ranks, **settings).fingerprint == fingerprint
