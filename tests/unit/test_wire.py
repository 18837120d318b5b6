"""The forms in which values travel: errors, special values, and independence from the bucket."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from undertow import wire as wire_module
from undertow.wire import WIRES, BlockInt8, Wire

INT8 = BlockInt8()
SCALES = st.sampled_from([0.0, 1e-45, 1e-40, 1e-38, 1e-20, 1.0, 1e20, 3e38])


def sent(wire: Wire, values: Tensor, dtype: torch.dtype = torch.float32, dither: Tensor | None = None) -> Tensor:
    message = torch.zeros(wire.num_bytes(values.numel()), dtype=torch.uint8)
    wire.encode(values, message, dither)
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
    assert bool(((blocks - arrived).abs() <= 0.5 * scale_of(blocks)).all())
    dithered = sent(INT8, values, dither=torch.linspace(-0.4999, 0.4999, INT8.block)).view(-1, INT8.block).double()
    assert bool(((blocks - dithered).abs() < scale_of(blocks)).logical_or(blocks == dithered).all())


def scale_of(blocks: Tensor) -> Tensor:
    """A multiple of the least fp32 number, and 2^-15 for the roundings of the scale, its inverse and two products in fp32."""
    largest = blocks.double().abs().amax(1, keepdim=True) if len(blocks) else torch.zeros(0, 1)
    return (largest / 127 * 2.0**149).ceil() * 2.0**-149 * (1 + 2**-15)


def test_zeros_arrive_as_zeros_and_halves_are_rounded_to_even() -> None:
    assert torch.equal(sent(INT8, torch.zeros(1024)), torch.zeros(1024))
    values = torch.arange(512) - 127.0
    values[255:] = 0.5
    values[300:] = 1.5
    arrived = sent(INT8, values)
    assert torch.equal(arrived[:255], values[:255])
    assert set(arrived[255:300].tolist()) == {0.0}
    assert set(arrived[300:].tolist()) == {2.0}


@pytest.mark.parametrize("dither", [None, torch.full((512,), 0.4999), torch.full((512,), -0.4999)])
@pytest.mark.parametrize("device", ["cpu", "other"])
def test_each_inf_arrives_as_such_and_its_block_as_nan(
    dither: Tensor | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "other":  # the host reads nothing: all blocks are encoded as rare ones are
        monkeypatch.setattr(wire_module, "_encode_on_host", wire_module._encode_on_device)
    values = drawn(4, 3, [1.0])
    values[512:515] = torch.tensor([math.inf, -math.inf, math.nan])
    arrived = sent(INT8, values, dither=dither)
    assert arrived[512:514].tolist() == [math.inf, -math.inf]
    assert bool(arrived[514:1024].isnan().all())
    others = torch.cat([values[:512], values[1024:]])
    expected = sent(INT8, others, dither=dither)
    assert torch.equal(torch.cat([arrived[:512], arrived[1024:]]), expected)


@given(
    seed=st.integers(0, 2**16), scales=st.lists(SCALES, min_size=1, max_size=5), bad=st.sampled_from([None, math.nan, math.inf])
)
def test_a_block_arrives_as_it_does_alone(seed: int, scales: list[float], bad: float | None) -> None:
    values, dither = drawn(seed, 6, scales), torch.linspace(-0.4999, 0.4999, INT8.block)
    if bad is not None:
        values[seed % values.numel()] = bad
    alone = torch.cat([sent(INT8, block.clone(), dither=dither) for block in values.view(6, -1)])
    assert torch.equal(sent(INT8, values, dither=dither).nan_to_num(7.0), alone.nan_to_num(7.0))


def test_zeros_arrive_as_zeros_and_the_largest_as_itself_with_any_offset() -> None:
    values = torch.zeros(3 * 512)
    values[0], values[511], values[1024] = 3.0, -3.0, 1e-41  # codes of 127 and -127; zeros only; a tiny scale
    for offset in (-0.4999, 0.0, 0.4999):
        arrived = sent(INT8, values, dither=torch.full((512,), offset))
        assert torch.equal(arrived == 0, values == 0)
        assert torch.allclose(arrived, values, rtol=1e-2, atol=0)  # the tiny scale is rounded up by up to 1/78
        assert bool((arrived.abs()[:512] <= 3.0 * (1 + 2**-20)).all())


@pytest.mark.deep
def test_the_mean_over_all_offsets_is_the_value() -> None:
    values = drawn(5, 1, [1.0])
    number = 1 << 10
    total = torch.zeros(512, dtype=torch.float64)
    for step in range(number):
        total += sent(INT8, values, dither=torch.full((512,), (step + 0.5) / number - 0.5))
    # An offset of one of the steps decides whether the value is rounded up.
    assert torch.allclose(total / number, values.double(), rtol=0, atol=2 / number / 127)


@pytest.mark.parametrize("name", WIRES)
def test_the_least_number_that_a_format_names_arrives_as_zero_and_the_next_does_not(name: str) -> None:
    values = torch.zeros(512, dtype=torch.float64)
    found = []
    for factor in (1.0, 2.0):
        values[0] = WIRES[name].least * factor * (1 + 2.0**-20)
        found.append(bool(sent(WIRES[name], values).any()))
    values[0] = WIRES[name].least
    assert (sent(WIRES[name], values).any(), found[1]) == (False, True)


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
