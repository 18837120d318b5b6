"""The forms in which values travel: errors, special values, and independence from the bucket."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from undertow.plan.layout import equal_parts
from undertow.ranks.parcels import Encoded
from undertow.wire import WIRES, BlockInt8, Wire

INT8 = BlockInt8()
SCALES = st.sampled_from([0.0, 1e-45, 1e-40, 1e-38, 1e-20, 1.0, 1e20, 3e38])


def sent(wire: Wire, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    message = torch.zeros(wire.num_bytes(values.numel()), dtype=torch.uint8)
    wire.encode(values, message)
    into = torch.full(values.shape, math.nan, dtype=dtype)
    wire.decode(message, into, adds=False)
    return into


def drawn(seed: int, num_blocks: int, scales: list[float]) -> Tensor:
    made = torch.empty(num_blocks, INT8.block).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
    made *= torch.tensor([scales[block % len(scales)] for block in range(num_blocks)]).view(-1, 1)
    return made.view(-1)


@given(seed=st.integers(0, 2**16), num_blocks=st.integers(0, 300), scales=st.lists(SCALES, min_size=1, max_size=5))
def test_an_element_is_off_by_at_most_half_its_scale(seed: int, num_blocks: int, scales: list[float]) -> None:
    values = drawn(seed, num_blocks, scales)
    blocks, arrived = (each.view(-1, INT8.block).double() for each in (values, sent(INT8, values)))
    scale = blocks.abs().amax(1, keepdim=True) / 127 if num_blocks else torch.zeros(0, 1)
    # Half the scale, up to the rounding of the scale, its inverse and the two products in fp32; no scale is below the least
    # normal number.
    allowed = 0.5 * scale.clamp(min=torch.finfo(torch.float32).tiny) * (1 + 2**-15)
    assert bool(((blocks - arrived).abs() <= allowed).all())


def test_zeros_arrive_as_zeros_and_halves_are_rounded_to_even() -> None:
    assert torch.equal(sent(INT8, torch.zeros(1024)), torch.zeros(1024))
    values = torch.arange(512) - 127.0
    values[255:] = 0.5
    values[300:] = 1.5
    arrived = sent(INT8, values)
    assert torch.equal(arrived[:255], values[:255])
    assert set(arrived[255:300].tolist()) == {0.0}
    assert set(arrived[300:].tolist()) == {2.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_arrives_so_and_others_do_not(bad: float) -> None:
    values = torch.ones(3 * 512)
    values[700] = bad
    finite = sent(INT8, values).isfinite().view(3, -1)
    assert (finite.all(1).tolist(), finite.any(1).tolist()) == ([True, False, True], [True, False, True])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_of_other_dtypes_are_encoded_as_their_32_bits_are(dtype: torch.dtype) -> None:
    values = drawn(1, 300, [1.0, 1e-3]).to(dtype)
    assert torch.equal(sent(INT8, values, dtype), sent(INT8, values.float()).to(dtype))


@pytest.mark.parametrize("name", WIRES)
def test_messages_are_added(name: str) -> None:
    wire, values = WIRES[name], drawn(2, 5, [1.0])
    message = torch.zeros(wire.num_bytes(values.numel()), dtype=torch.uint8)
    wire.encode(values, message)
    total = torch.ones_like(values)
    wire.decode(message, total, adds=True)
    assert torch.equal(total, 1 + sent(wire, values))


@given(
    name=st.sampled_from(list(WIRES)),
    num_ranks=st.integers(1, 5),
    narrow_blocks=st.integers(0, 7),
    wide_numel=st.integers(0, 2000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_a_bucket_arrives_in_parts_as_it_does_whole(
    name: str, num_ranks: int, narrow_blocks: int, wide_numel: int, dtype: torch.dtype
) -> None:
    wire, block = WIRES[name], INT8.block
    narrow_numel = narrow_blocks * block
    numel = narrow_numel + wide_numel
    part_numel = -(-numel // (block * num_ranks)) * block
    storage = drawn(3, numel // block + 1, [1.0, 1e-6]).to(dtype)[:numel]
    parcel = Encoded(wire, dtype, narrow_numel, equal_parts(num_ranks, part_numel, stop=numel))
    messages = parcel.messages(storage, lambda numel, dtype: torch.empty(numel, dtype=dtype))
    arrived = torch.full_like(storage, math.nan)
    parcel.open(messages, arrived)
    assert torch.equal(arrived[narrow_numel:], storage[narrow_numel:])
    assert torch.equal(arrived[:narrow_numel], sent(wire, storage[:narrow_numel].clone(), dtype))
    assert sum(message.numel() for message in messages) <= (
        wire.num_bytes(narrow_numel) + wide_numel * dtype.itemsize + 16 * num_ranks
    )
