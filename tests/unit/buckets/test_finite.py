"""Which gradients of a bucket are not finite, or would not be when they arrive."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.strategies import spec
from undertow.buckets.finite import bad_slots
from undertow.plan import Bucket, plan_from_groups
from undertow.plan.layout import equal_parts
from undertow.ranks.parcels import Encoded
from undertow.wire import WIRES

SIZES = (700, 3, 512, 0, 1500, 511)
VALUES = [math.nan, math.inf, -math.inf, 1e38, 0.0]


def bucket_of(wire: str, dtype: str, *, block: int = 1) -> Bucket:
    params = [spec(f"p{index}", size, dtype=dtype) for index, size in enumerate(SIZES)]
    (bucket,) = plan_from_groups(params, [range(len(SIZES))], num_ranks=2, wires=wire, block=block).buckets
    return bucket


def found_in(values: Tensor, bucket: Bucket, *, largest: float, is_host: bool) -> list[int]:
    bad = bad_slots((values,), bucket, largest, is_host=is_host)
    return [] if bad is None else bad.nonzero().flatten().tolist()


def arrived(bucket: Bucket, values: Tensor) -> Tensor:
    """The values as another rank decodes them."""
    parts = equal_parts(2, bucket.shard_numel, stop=bucket.numel)
    parcel = Encoded(WIRES[bucket.wire or ""], values.dtype, bucket.narrow_numel, parts)
    received = torch.empty_like(values)
    parcel.open(parcel.messages(values, lambda numel, dtype: torch.empty(numel, dtype=dtype)), received)
    return received


@given(
    wire=st.sampled_from(list(WIRES)),
    dtype=st.sampled_from(["float32", "float64"]),
    places=st.lists(st.tuples(st.integers(0, sum(SIZES) - 1), st.sampled_from(VALUES)), max_size=3),
    is_host=st.booleans(),
)
def test_a_gradient_that_arrives_infinite_is_found_before_it_is_sent(
    wire: str, dtype: str, places: list[tuple[int, float]], is_host: bool
) -> None:
    bucket = bucket_of(wire, dtype)
    values = torch.zeros(bucket.numel, dtype=getattr(torch, dtype))
    elements = torch.cat([torch.arange(slot.start, slot.stop) for slot in bucket.slots])
    for place, value in places:
        values[elements[place]] = value
    largest = min(torch.finfo(values.dtype).max, WIRES[wire].largest)
    most = torch.finfo(values.dtype).max
    expected = found_in(arrived(bucket, values), bucket, largest=most, is_host=is_host)
    assert found_in(values, bucket, largest=largest, is_host=is_host) == expected


@pytest.mark.parametrize("wire", WIRES)
def test_the_largest_number_is_messages_if_it_arrives_infinite(wire: str) -> None:
    bucket = bucket_of(wire, "float64")
    (first, *_) = bucket.slots
    values = torch.zeros(bucket.numel, dtype=torch.float64)
    found = []
    # By more than the roundings of fp32, through which casts go, smaller and larger than the largest that arrives.
    for value in (WIRES[wire].largest * (1 - 2.0**-20), WIRES[wire].largest * (1 + 2.0**-20)):
        values[first.start] = value
        found.append(found_in(values, bucket, largest=WIRES[wire].largest, is_host=True))
    assert found == [[], [0]]


def test_a_gradient_in_full_width_may_be_larger_than_the_format_of_its_bucket_allows() -> None:
    bucket = bucket_of("float16", "float32", block=512)  # of `param_wire`
    values = torch.zeros(bucket.numel)
    for slot in bucket.slots:
        values[slot.start : slot.stop] = 1e5
    encoded = [position for position, slot in enumerate(bucket.slots) if slot.numel >= 512]
    found = found_in(values, bucket, largest=WIRES["float16"].largest, is_host=True)
    arrives = found_in(arrived(bucket, values), bucket, largest=torch.finfo(torch.float32).max, is_host=True)
    assert found == encoded == arrives
