from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import text_of
from support.strategies import plans, spec
from undertow.errors import ConfigError
from undertow.plan import Bucket, ParamSpec, Piece, Plan, SizeCaps, Slot, group_by_size, plan_from_groups

PARAMS = (spec("weight", 6), spec("bias", 2), spec("half", 3, dtype="bfloat16"))
PLAN = plan_from_groups(PARAMS, [(1, 0), (2,)], num_ranks=2)
EACH_ONCE = "a plan must hold each of its 3 parameters exactly once."
IN_PIECES = "The pieces of a parameter follow each other without gaps, each in a later bucket."
FOREIGN = "Make the plan from the parameters of this model."

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def piece(param: int, first: int, stop: int) -> Piece:
    return Piece(param=param, first=first, stop=stop)


SPLIT = plan_from_groups(PARAMS, [(1, piece(0, 0, 4)), (2,), (piece(0, 4, 6),)], num_ranks=2)


def saved(**changes: Any) -> str:
    """PLAN as JSON, with other values for some of its keys."""
    return json.dumps({**json.loads(PLAN.to_json()), **changes})


def reading_error(text: Any) -> str:
    return text_of(ConfigError, lambda: Plan.from_json(text))


def with_last_bucket(**changes: Any) -> Callable[[], Plan]:
    *others, last = PLAN.buckets
    return lambda: dataclasses.replace(PLAN, buckets=(*others, dataclasses.replace(last, **changes)))


def test_a_plan_lays_groups_out_in_their_order() -> None:
    assert [(bucket.index, bucket.dtype, bucket.device, bucket.params) for bucket in PLAN.buckets] == [
        (0, "float32", "cpu", (1, 0)),
        (1, "bfloat16", "cpu", (2,)),
    ]
    assert PLAN.buckets[0].slots == (Slot(param=1, start=0, stop=2), Slot(param=0, start=2, stop=8))


def test_sizes_of_a_bucket() -> None:
    # 8 elements, 2 used flags and 48 signature bits are 58 elements, padded to 60 for 16 bytes.
    bucket = PLAN.buckets[0]
    assert (bucket.numel, bucket.num_bytes, bucket.storage_numel, bucket.wire_bytes) == (8, 32, 60, 240)


def test_an_empty_group_makes_no_bucket() -> None:
    assert plan_from_groups(PARAMS, [(), (1, 0), (), (2,), ()], num_ranks=2) == PLAN


@pytest.mark.parametrize("groups", [[], [()]])
def test_without_parameters_one_bucket_of_a_trailer_only_remains(groups: list[tuple[int, ...]]) -> None:
    (bucket,) = plan_from_groups((), groups, num_ranks=2).buckets
    assert (bucket.slots, bucket.numel) == ((), 0)
    assert (bucket.dtype, bucket.itemsize, bucket.device) == ("float32", 4, "cpu")
    assert bucket.trailer.has_verdict


def test_a_parameter_without_elements_has_an_empty_slot() -> None:
    params = (spec("a", 2), spec("none", 0), spec("b", 1))
    (bucket,) = plan_from_groups(params, [(0, 1, 2)], num_ranks=1).buckets
    assert [(slot.start, slot.stop) for slot in bucket.slots] == [(0, 2), (2, 2), (2, 3)]
    assert len(bucket.trailer.used) == 3


def test_a_sparse_parameter_has_a_flag_and_takes_no_room() -> None:
    params = (spec("rows", 40, is_sparse=True), spec("none", 0, is_sparse=True))
    (bucket,) = plan_from_groups(params, [(0, 1)], num_ranks=1).buckets
    assert bucket.is_sparse
    assert bucket.slots == (Slot(param=0, start=0, stop=0), Slot(param=1, start=0, stop=0))
    assert (bucket.numel, bucket.num_bytes) == (0, 0)
    assert len(bucket.trailer.used) == 2


@pytest.mark.parametrize(("is_sparse", "room"), [(False, 24), (True, 0)])
def test_room_of_a_parameter_in_its_bucket(is_sparse: bool, room: int) -> None:
    param = spec("rows", 6, is_sparse=is_sparse)
    assert (param.numel, param.slot_numel * param.itemsize, param.num_bytes) == (6, room, room)
    assert param.kind == ("float32", "cpu", is_sparse, None)


def test_a_sparse_and_a_dense_parameter_in_one_group_are_refused() -> None:
    params = (spec("weight", 6), spec("rows", 6, is_sparse=True))
    assert text_of(ConfigError, lambda: plan_from_groups(params, [(0, 1)], num_ranks=2)) == (
        "parameter 'rows' does not fit its slot [6, 6) of bucket 0.\n"
        "  it has 0 elements of float32 on cpu; the bucket holds float32 on cpu and is free from 6\n"
        "  Slots do not overlap, and are of one dtype and device."
    )


def test_parameters_of_two_dtypes_do_not_share_a_bucket_where_their_gradients_have_one() -> None:
    params = (spec("wide", 6), dataclasses.replace(spec("narrow", 6), own_dtype="bfloat16"))
    assert len(group_by_size(params, (0, 1), SizeCaps(cap_bytes=1e6))) == 2
    assert "narrow" in text_of(ConfigError, lambda: plan_from_groups(params, [(0, 1)], num_ranks=2))
    plan = plan_from_groups(params, [(0,), (1,)], num_ranks=2)
    assert [bucket.own_dtype for bucket in plan.buckets] == [None, "bfloat16"]
    assert Plan.from_json(plan.to_json()) == plan
    assert "own_dtype" not in plan_from_groups(params[:1], [(0,)], num_ranks=2).to_json()  # as plans were saved before


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_saved_plan_knows_what_is_sparse(is_sparse: bool) -> None:
    plan = plan_from_groups((spec("rows", 6, is_sparse=is_sparse),), [(0,)], num_ranks=2)
    read = Plan.from_json(plan.to_json())
    assert (read, read.params[0].is_sparse, read.buckets[0].is_sparse) == (plan, is_sparse, is_sparse)


def test_a_plan_that_was_saved_without_a_word_on_sparse_parameters_is_of_dense_ones() -> None:
    params = [{key: value for key, value in param.to_dict().items() if key != "is_sparse"} for param in PARAMS]
    assert Plan.from_json(saved(params=params)) == PLAN


@given(plans())
def test_every_parameter_has_exactly_one_slot(plan: Plan) -> None:
    placed = [slot.param for bucket in plan.buckets for slot in bucket.slots]
    assert sorted(placed) == list(range(len(plan.params)))


@given(plans() | plans(splits=True))
def test_kinds_do_not_share_a_bucket(plan: Plan) -> None:
    for bucket in plan.buckets:
        assert {plan.params[i].kind for i in bucket.params} <= {bucket.kind}


@given(plans() | plans(splits=True))
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


@given(plans() | plans(splits=True))
def test_fingerprint_is_eight_digits_and_the_same_for_equal_plans(plan: Plan) -> None:
    assert re.fullmatch(r"[0-9a-f]{8}", plan.fingerprint)
    assert Plan.from_json(plan.to_json()).fingerprint == plan.fingerprint


@pytest.mark.parametrize(
    "other",
    [
        plan_from_groups(PARAMS, [(0, 1), (2,)], num_ranks=2),
        plan_from_groups(PARAMS, [(2,), (1, 0)], num_ranks=2),
        plan_from_groups(PARAMS, [(1,), (0,), (2,)], num_ranks=2),
        plan_from_groups(PARAMS, [(1, 0), (2,)], num_ranks=3),
        plan_from_groups((spec("other", 6), *PARAMS[1:]), [(1, 0), (2,)], num_ranks=2),
        plan_from_groups((spec("weight", 7), *PARAMS[1:]), [(1, 0), (2,)], num_ranks=2),
        plan_from_groups((*PARAMS[:2], spec("half", 3, dtype="float16")), [(1, 0), (2,)], num_ranks=2),
        plan_from_groups((*PARAMS[:2], spec("half", 3, dtype="bfloat16", device="cuda")), [(1, 0), (2,)], num_ranks=2),
        plan_from_groups((*PARAMS[:2], spec("half", 3, dtype="bfloat16", is_sparse=True)), [(1, 0), (2,)], num_ranks=2),
    ],
    ids=["slots", "buckets", "grouping", "ranks", "name", "shape", "dtype", "device", "sparse"],
)
def test_fingerprint_differs_for_plans_that_differ_in(other: Plan) -> None:
    assert other.fingerprint != PLAN.fingerprint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        (None, "the JSON object must be str, bytes or bytearray, not NoneType"),
        ("{}", "it has no 'format'"),
        ('{"format": 2}', "format 2, expected 1"),
        ('{"format": 1}', "it has no 'params'"),
        (saved(buckets=[[0, 1], ["two"]]), "'two' is not a whole number of 64 bits"),
        (saved(buckets=[[0, 1], [2, 3]]), "tuple index out of range"),
        (saved(num_ranks=float("inf")), "inf is not a whole number of 64 bits"),
    ],
)
def test_text_that_holds_no_plan_is_refused(text: Any, problem: str) -> None:
    assert reading_error(text) == f"this is no saved plan: {problem}.\n  Use a file that save_plan() has written."


@pytest.mark.parametrize(
    ("buckets", "difference"),
    [
        ([[0, 1]], "parameter 2 ('half') is in 0 slots"),
        ([[0], [2]], "parameter 1 ('bias') is in 0 slots"),
        ([[1, 0, 0], [2]], "parameter 0 ('weight') is in 2 slots"),
        ([[0, 1], [2], [1]], "parameter 1 ('bias') is in 2 slots"),
        ([[0, 1], [2], [-1]], "parameter -1 is in 1 slots"),
    ],
)
def test_a_saved_plan_that_does_not_hold_each_parameter_once_is_refused(buckets: list[list[int]], difference: str) -> None:
    assert reading_error(saved(buckets=buckets)) == f"{EACH_ONCE}\n  first difference: {difference}\n  {FOREIGN}"


@given(st.sampled_from(["format", "num_ranks", "params", "buckets"]), json_values)
def test_any_other_value_in_a_saved_plan_makes_a_plan_or_a_config_error(key: str, value: Any) -> None:
    with contextlib.suppress(ConfigError):
        Plan.from_json(saved(**{key: value}))


@given(st.sampled_from(["name", "shape", "dtype", "itemsize", "device", "is_sparse", "new"]), json_values)
def test_any_other_value_in_a_saved_parameter_makes_a_plan_or_a_config_error(key: str, value: Any) -> None:
    first, *others = [dataclasses.asdict(param) for param in PARAMS]
    with contextlib.suppress(ConfigError):
        plan = Plan.from_json(saved(params=[{**first, key: value}, *others]))
        assert all(isinstance(bucket.storage_numel, int) for bucket in plan.buckets)


def test_a_plan_is_not_for_more_ranks_than_can_be_simulated() -> None:
    assert reading_error(saved(num_ranks=2**31)) == (
        "a plan is for 1,048,576 ranks at most, got num_ranks=2147483648.\n  Give fewer ranks."
    )


@pytest.mark.parametrize("num_ranks", [0, -2])
def test_a_plan_is_for_one_rank_or_more(num_ranks: int) -> None:
    assert text_of(ConfigError, lambda: plan_from_groups(PARAMS, [(0, 1), (2,)], num_ranks=num_ranks)) == (
        f"a plan is for one rank or more, got num_ranks={num_ranks}.\n  Give the size of the process group."
    )


@pytest.mark.parametrize(("shape", "itemsize"), [((-1,), 4), ((2, -3), 4), ((2.5,), 4), (("2",), 4), ((2,), 0), ((2,), -4)])
def test_an_impossible_size_is_refused(shape: tuple[Any, ...], itemsize: int) -> None:
    assert text_of(ConfigError, lambda: ParamSpec(name="w", shape=shape, dtype="float32", itemsize=itemsize)) == (
        f"parameter 'w' has an impossible size: shape {shape}, {itemsize} bytes per element.\n"
        "  Sizes are zero or more, an element has at least one byte, and all of them fit into 64 bits."
    )


def test_a_scalar_has_one_element() -> None:
    scalar = ParamSpec(name="scale", shape=(), dtype="float64", itemsize=8)
    assert (scalar.numel, scalar.num_bytes) == (1, 8)


def test_a_group_of_two_dtypes_is_refused() -> None:
    assert text_of(ConfigError, lambda: plan_from_groups(PARAMS, [(0, 1, 2)], num_ranks=2)) == (
        "parameter 'half' does not fit its slot [8, 11) of bucket 0.\n"
        "  it has 3 elements of bfloat16 on cpu; the bucket holds float32 on cpu and is free from 8\n"
        "  Slots do not overlap, and are of one dtype and device."
    )


@pytest.mark.parametrize(
    ("slot", "held"),
    [(Slot(param=2, start=0, stop=4), "[0, 4)"), (Slot(param=2, start=5, stop=7), "[0, 2)")],
    ids=["too large", "too small"],
)
def test_a_slot_of_another_size_than_its_parameter_is_refused(slot: Slot, held: str) -> None:
    assert text_of(ConfigError, with_last_bucket(slots=(slot,))) == (
        f"{EACH_ONCE}\n"
        f"  first difference: parameter 2 ('half') has elements [0, 3), its slots hold {held} in bucket 1\n"
        f"  {IN_PIECES}"
    )


def test_slots_that_overlap_are_refused() -> None:
    first, last = PLAN.buckets
    overlapping = dataclasses.replace(first, slots=(Slot(param=1, start=0, stop=2), Slot(param=0, start=1, stop=7)))
    assert text_of(ConfigError, lambda: dataclasses.replace(PLAN, buckets=(overlapping, last))) == (
        "parameter 'weight' does not fit its slot [1, 7) of bucket 0.\n"
        "  it has 6 elements of float32 on cpu; the bucket holds float32 on cpu and is free from 2\n"
        "  Slots do not overlap, and are of one dtype and device."
    )


@pytest.mark.parametrize("change", [{"storage_numel": 80}, {"slots": (Slot(param=2, start=60, stop=63),)}])
def test_a_trailer_that_does_not_end_the_storage_or_lies_on_gradients_is_refused(change: dict[str, Any]) -> None:
    changed: Bucket = dataclasses.replace(PLAN.buckets[1], **change)
    assert text_of(ConfigError, with_last_bucket(**change)) == (
        f"the trailer [11, 72) of bucket 1 is misplaced.\n"
        f"  the gradients end at {changed.numel}, the storage at {changed.storage_numel}\n"
        "  The trailer lies behind the gradients and ends the storage."
    )


def test_a_parameter_may_lie_in_pieces_in_several_buckets() -> None:
    assert [bucket.slots for bucket in SPLIT.buckets] == [
        (Slot(param=1, start=0, stop=2), Slot(param=0, start=2, stop=6)),
        (Slot(param=2, start=0, stop=3),),
        (Slot(param=0, start=0, stop=2, first=4),),
    ]
    assert [bucket.params for bucket in SPLIT.buckets] == [(1, 0), (2,), (0,)]


def test_a_plan_knows_its_groups_and_what_is_in_pieces() -> None:
    assert (PLAN.groups, PLAN.split_params) == (((1, 0), (2,)), frozenset())
    assert SPLIT.groups == ((1, piece(0, 0, 4)), (2,), (piece(0, 4, 6),))
    assert SPLIT.split_params == {0}


def test_a_piece_that_is_all_of_its_parameter_is_the_parameter() -> None:
    assert plan_from_groups(PARAMS, [(1, piece(0, 0, 6)), (2,)], num_ranks=2) == PLAN
    assert Plan.from_json(saved(buckets=[[1, [0, 0, 6]], [2]])).to_json() == PLAN.to_json()


def test_pieces_are_saved_as_their_parameter_and_range() -> None:
    assert json.loads(SPLIT.to_json())["buckets"] == [[1, [0, 0, 4]], [2], [[0, 4, 6]]]
    assert Plan.from_json(SPLIT.to_json()) == SPLIT


def test_fingerprint_differs_for_a_parameter_in_other_pieces() -> None:
    other = plan_from_groups(PARAMS, [(1, piece(0, 0, 2)), (2,), (piece(0, 2, 6),)], num_ranks=2)
    assert len({PLAN.fingerprint, SPLIT.fingerprint, other.fingerprint}) == 3


@given(plans(splits=True))
def test_the_slots_of_a_parameter_hold_each_of_its_elements_once_in_the_order_of_the_buckets(plan: Plan) -> None:
    for param, param_spec in enumerate(plan.params):
        pieces = [slot.piece for bucket in plan.buckets for slot in bucket.slots if slot.param == param]
        assert [element for held in pieces for element in range(held.first, held.stop)] == list(range(param_spec.slot_numel))
        assert len(pieces) == 1 or all(held.numel for held in pieces)
    assert all(len({*bucket.params}) == len(bucket.params) for bucket in plan.buckets)


@given(plans(splits=True))
def test_a_plan_is_made_of_its_groups(plan: Plan) -> None:
    assert plan_from_groups(plan.params, plan.groups, num_ranks=plan.num_ranks) == plan


@pytest.mark.parametrize(
    ("buckets", "difference"),
    [
        ([[1, [0, 0, 4]], [2]], "parameter 0 ('weight') has elements [0, 6), its slots hold [0, 4) in bucket 0"),
        ([[1, [0, 0, 7]], [2]], "parameter 0 ('weight') has elements [0, 6), its slots hold [0, 7) in bucket 0"),
        ([[[0, 0, 3]], [1, [0, 4, 6]], [2]], "[0, 3) in bucket 0, [4, 6) in bucket 1"),
        ([[[0, 0, 4]], [1, [0, 3, 6]], [2]], "[0, 4) in bucket 0, [3, 6) in bucket 1"),
        ([[[0, 3, 6]], [1, [0, 0, 3]], [2]], "[3, 6) in bucket 0, [0, 3) in bucket 1"),
        ([[[0, 0, 3], [0, 3, 6]], [1], [2]], "[0, 3) in bucket 0, [3, 6) in bucket 0"),
        ([[[0, 0, 6]], [1, [0, 6, 6]], [2]], "[0, 6) in bucket 0, [6, 6) in bucket 1"),
        ([[0], [1, [0, 0, 2]], [2]], "[0, 6) in bucket 0, [0, 2) in bucket 1"),
    ],
    ids=["too few", "too many", "gap", "overlap", "order", "one bucket", "empty", "whole and piece"],
)
def test_pieces_that_do_not_make_up_their_parameter_are_refused(buckets: list[list[Any]], difference: str) -> None:
    what, where, remedy = reading_error(saved(buckets=buckets)).splitlines()
    assert (what, remedy) == (EACH_ONCE, f"  {IN_PIECES}")
    assert where.startswith("  first difference: parameter 0 ('weight') has elements [0, 6), its slots hold [")
    assert where.endswith(difference)


def test_a_piece_of_an_unknown_parameter_is_refused() -> None:
    assert reading_error(saved(buckets=[[0, 1], [2, [3, 0, 2]]])) == (
        f"{EACH_ONCE}\n  first difference: parameter 3 is in 1 slots\n  {FOREIGN}"
    )


def test_a_sparse_parameter_is_in_no_pieces() -> None:
    params = (spec("rows", 6, is_sparse=True),)
    assert text_of(ConfigError, lambda: plan_from_groups(params, [(piece(0, 0, 3),), (piece(0, 3, 6),)], num_ranks=2)) == (
        "a plan must hold each of its 1 parameters exactly once.\n"
        "  first difference: parameter 0 ('rows') has elements [0, 0), its slots hold [0, 3) in bucket 0, [3, 6) in bucket 1\n"
        f"  {IN_PIECES}"
    )


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        ([0, 4], "not enough values to unpack (expected 3, got 2)"),
        ([0, "x", 6], "'x' is not a whole number of 64 bits"),
        ([9, 0, 6], "tuple index out of range"),
    ],
)
def test_text_that_holds_no_piece_is_refused(member: list[Any], problem: str) -> None:
    assert reading_error(saved(buckets=[[member], [1], [2]])) == (
        f"this is no saved plan: {problem}.\n  Use a file that save_plan() has written."
    )


def test_an_impossible_piece_in_a_saved_plan_is_refused() -> None:
    assert reading_error(saved(buckets=[[[0, 4, 2]], [1], [2]])) == (
        "the piece of parameter 0 is impossible: [4, 2).\n  A piece begins at zero or later and does not end before it begins."
    )


@given(json_values)
def test_any_other_member_of_a_saved_group_makes_a_plan_or_a_config_error(value: Any) -> None:
    with contextlib.suppress(ConfigError):
        Plan.from_json(saved(buckets=[[value], [1], [2], [[0, 4, 6]]]))
