"""Plans as values: the layout of their buckets, as JSON, from files, and what is refused."""

import dataclasses
import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import Call, text_of
from support.strategies import plans, spec
from undertow.errors import ConfigError
from undertow.lab.cost.payloads import payload_of
from undertow.plan import (
    ParamSpec,
    Plan,
    SizeCaps,
    Trailer,
    group_by_size,
    plan_from_groups,
    signature_of,
)
from undertow.plan.facts import FACTS, FactKind, ranks_differ
from undertow.plan.layout import padded_numel
from undertow.wire import WIRES

PARAMS = (spec("weight", 6), spec("bias", 2), spec("half", 3, dtype="bfloat16"))
NARROW = (spec("wide", 6), dataclasses.replace(spec("narrow", 6), own_dtype="bfloat16"))


def planned(groups: Any = ((1, 0), (2,)), params: tuple[ParamSpec, ...] = PARAMS, num_ranks: int = 2) -> Plan:
    return plan_from_groups(params, groups, num_ranks=num_ranks)


PLAN = planned()


def saved(**changes: Any) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **changes})


def test_a_plan_lays_groups_out_in_their_order() -> None:
    assert (
        [(bucket.index, bucket.dtype, bucket.device, bucket.params) for bucket in PLAN.buckets],
        planned([(), (1, 0), (), (2,), ()]),  # an empty group makes no bucket
    ) == (
        [
            (0, "float32", "cpu", (1, 0)),
            (1, "bfloat16", "cpu", (2,)),
        ],
        PLAN,
    )
    (only,) = planned([], ()).buckets
    assert (only.slots, only.dtype, only.itemsize, only.device) == ((), "float32", 4, "cpu")
    # 8 elements, 2 used flags and 48 signature bits are 58 elements, padded to 60 for 16 bytes.
    bucket = PLAN.buckets[0]
    assert (bucket.numel, bucket.num_bytes, bucket.storage_numel, bucket.wire_bytes) == (8, 32, 60, 240)


@pytest.mark.parametrize(
    ("plan", "slots"),
    [
        (planned([(0,)], (dataclasses.replace(spec("scalar", 1), shape=()),)), [[(0, 0, 1)]]),
        (PLAN, [[(1, 0, 2), (0, 2, 8)], [(2, 0, 3)]]),
        (planned([(0, 1)], (spec("rows", 40, is_sparse=True), spec("none", 0, is_sparse=True))), [[(0, 0, 0), (1, 0, 0)]]),
        (planned([(0, 1, 2)], (spec("a", 2), spec("none", 0), spec("b", 1))), [[(0, 0, 2), (1, 2, 2), (2, 2, 3)]]),
        (planned([], ()), [[]]),
    ],
    ids=[
        "a scalar",
        "whole",
        "sparse, which takes no room",
        "without elements",
        "no parameters",
    ],
)
def test_parameters_lie_one_after_another_in_their_bucket(plan: Plan, slots: list[list[tuple[int, ...]]]) -> None:
    found = [[(slot.param, slot.start, slot.stop) for slot in bucket.slots] for bucket in plan.buckets]
    assert (found, [len(bucket.trailer.used) for bucket in plan.buckets], [bucket.numel for bucket in plan.buckets]) == (
        slots,
        [len(of_bucket) for of_bucket in slots],
        [of_bucket[-1][2] if of_bucket else 0 for of_bucket in slots],
    )
    assert plan.buckets[-1].trailer.facts


def test_parameters_of_two_dtypes_do_not_share_a_bucket_where_their_gradients_have_one() -> None:
    assert (
        len(group_by_size(NARROW, (0, 1), SizeCaps(cap_bytes=1e6))),
        "narrow" in text_of(ConfigError, lambda: planned([(0, 1)], NARROW)),
    ) == (2, True)
    plan = planned([(0,), (1,)], NARROW)
    assert ([bucket.own_dtype for bucket in plan.buckets], Plan.from_json(plan.to_json())) == ([None, "bfloat16"], plan)
    assert "own_dtype" not in planned([(0,)], NARROW[:1]).to_json()  # as plans were saved before


@given(plans())
def test_a_plan_has_each_parameter_once_and_is_the_same_from_its_text(plan: Plan) -> None:
    read = Plan.from_json(plan.to_json())
    assert read == plan == planned(plan.groups, plan.params, plan.num_ranks)
    for bucket in plan.buckets:
        assert {plan.params[i].kind for i in bucket.params} <= {bucket.kind}  # kinds do not share a bucket
        assert len({*bucket.params}) == len(bucket.params)
    for param, param_spec in enumerate(plan.params):
        (slot,) = [slot for bucket in plan.buckets for slot in bucket.slots if slot.param == param]
        assert slot.numel == param_spec.slot_numel


EACH_ONCE = "a plan must hold each of its 3 parameters exactly once.\n  first difference: "
FOREIGN = "\n  Make the plan from the parameters of this model."
INDICES = "Give each bucket the indices of its parameters, such as [2, 0]."
NUM_RANKS = "a plan is for 1 to 1,048,576 ranks, got num_ranks="
NO_PLAN, SAVE = "this is not a saved plan: ", ".\n  Use a file that save_plan() has written."
ONE_KIND = "\n  A bucket is of one dtype, device and optimizer, and sparse gradients are apart."
SIZES = "Sizes are zero or more, an element has at least one byte, and all of them fit into 64 bits."


REFUSALS: dict[str, tuple[Call, str]] = {
    **{
        f"the text {text}": (lambda text=text: Plan.from_json(text), error)
        for text, error in {
            "": f"{NO_PLAN}Expecting value: line 1 column 1 (char 0){SAVE}",
            None: f"{NO_PLAN}the JSON object must be str, bytes or bytearray, not NoneType{SAVE}",
            "{}": f"{NO_PLAN}it has no 'format'{SAVE}",
            '{"format": 2}': f"{NO_PLAN}format 2, expected 1{SAVE}",
            '{"format": 1}': f"{NO_PLAN}it has no 'params'{SAVE}",
            saved(num_ranks=float("inf")): f"{NUM_RANKS}inf.\n  Give the size of the process group.",
            # Not for more ranks than can be simulated.
            saved(num_ranks=2**31): f"{NUM_RANKS}2147483648.\n  Give the size of the process group.",
            **{
                saved(buckets=buckets): text
                for buckets, text in (
                    ([[0, 1], ["two"]], f"buckets[1] must be a list of parameters' indices, got ['two'].\n  {INDICES}"),
                    ([[0, 1], [2, 3]], f"{EACH_ONCE}parameter 3 is in 1 slots{FOREIGN}"),
                    ([[0, 1], [[2, 0, 3]]], f"buckets[1] must be a list of parameters' indices, got [[2, 0, 3]].\n  {INDICES}"),
                    ([[0, 1]], f"{EACH_ONCE}parameter 2 ('half') is in 0 slots{FOREIGN}"),
                    ([[0], [2]], f"{EACH_ONCE}parameter 1 ('bias') is in 0 slots{FOREIGN}"),
                    ([[1, 0, 0], [2]], f"{EACH_ONCE}parameter 0 ('weight') is in 2 slots{FOREIGN}"),
                    ([[0, 1], [2], [1]], f"{EACH_ONCE}parameter 1 ('bias') is in 2 slots{FOREIGN}"),
                    ([[0, 1], [2], [-1]], f"{EACH_ONCE}parameter -1 is in 1 slots{FOREIGN}"),
                )
            },
        }.items()
    },
    "sparse and dense in one group": (
        lambda: planned([(0, 1)], (spec("weight", 6), spec("rows", 6, is_sparse=True))),
        f"parameter 'rows' does not fit bucket 0.\n  it is sparse float32 on cpu; the bucket holds float32 on cpu{ONE_KIND}",
    ),
    "two dtypes in one group": (
        lambda: planned([(0, 1, 2)]),
        f"parameter 'half' does not fit bucket 0.\n  it is bfloat16 on cpu; the bucket holds float32 on cpu{ONE_KIND}",
    ),
    **{
        f"{num_ranks} ranks": (
            lambda num_ranks=num_ranks: planned(num_ranks=num_ranks),
            f"{NUM_RANKS}{num_ranks}.\n  Give the size of the process group.",
        )
        for num_ranks in (0, -2)
    },
    **{
        f"shape {shape}, {itemsize} bytes": (
            lambda shape=shape, itemsize=itemsize: ParamSpec(name="w", shape=shape, dtype="float32", itemsize=itemsize),
            f"parameter 'w' has an impossible size: shape {shape}, {itemsize} bytes per element.\n  {SIZES}",
        )
        for shape, itemsize in (((-1,), 4), ((2, -3), 4), ((2.5,), 4), (("2",), 4), ((2,), 0), ((2,), -4))
    },
}


@pytest.mark.parametrize(("call", "error"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_no_plan_is_refused(call: Call, error: str) -> None:
    assert text_of(ConfigError, call) == error


# Where a rank is: step, generation of the plan, mode. As far as the bits reach.
places = st.tuples(st.integers(0, 2**8 - 1), st.integers(0, 2**4 - 1))


def ranges_of(trailer: Trailer) -> list[range]:
    return [trailer.used, trailer.signature, *(place for _, place in trailer.facts)]


@pytest.mark.parametrize(
    ("numel", "itemsize", "num_ranks", "padded"),
    [(0, 4, 2, 0), (1, 4, 1, 4), (4, 4, 1, 4), (5, 4, 3, 12), (1, 2, 2, 8), (1, 1, 1, 16), (1, 16, 3, 3), (9, 8, 4, 12)],
)
def test_padding_reaches_the_next_multiple_of_ranks_and_16_bytes(numel: int, itemsize: int, num_ranks: int, padded: int) -> None:
    assert padded_numel(numel, itemsize=itemsize, num_ranks=num_ranks) == padded


@given(plans())
def test_a_bucket_is_slots_a_trailer_and_equal_aligned_shards(plan: Plan) -> None:
    for bucket in plan.buckets:
        assert [*(slot.start for slot in bucket.slots), bucket.numel] == [0, *(slot.stop for slot in bucket.slots)]
        ranges = ranges_of(bucket.trailer)
        sharded_numel = bucket.shard_numel * plan.num_ranks
        assert bucket.numel <= sharded_numel <= bucket.trailer.start == bucket.trailer.used.start
        assert all(earlier.stop == later.start for earlier, later in pairwise(ranges))
        assert ranges[-1].stop == bucket.trailer.stop == bucket.storage_numel
        # Only the last one carries facts.
        sizes = {FactKind.DIGEST: 48, FactKind.ITEM_FLAGS: len(plan.buckets)}
        of_last = [sizes.get(kind, plan.num_ranks) for kind in FACTS.values()]
        assert [len(part) for part in ranges[2:]] == (of_last if bucket is plan.buckets[-1] else [])
        assert bucket.storage_numel % plan.num_ranks == bucket.wire_bytes % 16 == sharded_numel * bucket.itemsize % 16 == 0


def bits_of(signature: int) -> tuple[int, ...]:
    return tuple(signature >> bit & 1 for bit in range(48))


def test_signature_is_the_bits_and_their_complements() -> None:
    bits = bits_of(signature_of(generation=2, mode=1))
    assert bits[:24] == (*[0] * 12, 0, 1, *[0] * 6, 1, 0, 0, 0)
    assert bits[24:] == tuple(1 - bit for bit in bits[:24])
    assert signature_of(generation=256 + 2, mode=1) == signature_of(generation=2, mode=1)  # plans wrap around


def summed(signatures: Iterable[tuple[int, ...]]) -> list[bool]:
    return [sum(column) != 0 for column in zip(*signatures, strict=True)]


@given(st.lists(places, min_size=1, max_size=9), st.booleans())
def test_any_difference_of_any_rank_is_seen(ranks: list[tuple[int, int]], are_alike: bool) -> None:
    if are_alike:
        ranks = ranks[:1] * len(ranks)
    signatures = [bits_of(signature_of(generation=generation, mode=mode)) for generation, mode in ranks]
    assert ranks_differ(summed(signatures)) == (len(set(ranks)) > 1)


# Sizes around the borders of blocks.
NUMELS = st.one_of(st.integers(0, 3), st.integers(510, 514), st.integers(1000, 5000))


@given(
    numels=st.lists(NUMELS, min_size=1, max_size=6),
    dtype=st.sampled_from(["float64", "float32", "bfloat16", "uint8"]),
    wire=st.sampled_from([None, *WIRES]),
    num_ranks=st.integers(1, 5),
)
def test_the_bytes_that_are_planned_for_are_those_of_the_bucket(
    numels: list[int], dtype: str, wire: str | None, num_ranks: int
) -> None:
    params = [spec(f"p{i}", numel, dtype=dtype) for i, numel in enumerate(numels)]
    (bucket,) = plan_from_groups(params, [range(len(params))], num_ranks=num_ranks, wires=wire).buckets
    expected = payload_of(params, range(len(params)), wire)
    rest = bucket.storage_numel - bucket.trailer.start  # the trailer, and padding in full width
    if bucket.wire is None:
        rest = bucket.storage_numel - sum(numels)
    assert bucket.wire_bytes == expected.num_bytes + rest * bucket.itemsize
    if bucket.wire is not None:
        assert bucket.narrow_numel == expected.num_encoded
