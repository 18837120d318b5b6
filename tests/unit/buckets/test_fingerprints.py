"""Fingerprints of parameters."""

import math
from collections.abc import Sequence
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from undertow.buckets import fingerprints as module
from undertow.buckets.fingerprints import fingerprints


def num_different(tensors: Sequence[Tensor]) -> int:
    return len(set(fingerprints(tensors, device=torch.device("cpu")).tolist()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.uint8, torch.bool])
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 8, 1000])
def test_every_single_bit_counts(dtype: torch.dtype, numel: int) -> None:
    tensors = [torch.zeros(numel, dtype=dtype)]
    num_bytes, num_bits = min(64, tensors[0].nbytes), 1 if dtype == torch.bool else 8
    for byte, bit in product(range(num_bytes), range(num_bits)):
        tensors.append(tensors[0].clone())
        tensors[-1].view(torch.uint8)[byte] ^= 1 << bit
    assert num_different(tensors) == len(tensors)


def test_minus_zero_and_every_nan_are_values_of_their_own() -> None:
    values = [
        torch.tensor([0.0]),
        torch.tensor([-0.0]),
        torch.tensor([math.nan]),
        torch.tensor([-math.nan]),
        torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
    ]
    assert num_different(values) == num_different([*values, *(value.clone() for value in values)]) == 5


def test_the_same_elements_in_another_order_differ() -> None:
    tensors = [torch.tensor(order) for order in permutations(torch.arange(6.0).tolist())]
    assert num_different(tensors) == len(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_signs_of_several_elements_do_not_make_up_for_each_other(dtype: torch.dtype) -> None:
    tensors = [torch.ones(1000, dtype=dtype)]
    for first in range(0, 100, 7):
        for second in range(first + 1, 1000, 31):
            tensors.append(tensors[0].clone())
            tensors[-1][[first, second]] *= -1
    assert num_different(tensors) == len(tensors)


def test_chunks_in_another_order_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HOST_WORDS", 8)  # at least as many as a rest has bytes
    tensor = torch.randn(83, generator=torch.Generator().manual_seed(1))
    tensors = [tensor, torch.cat([tensor[16:32], tensor[:16], tensor[32:]]), tensor[:-1], tensor * 2]
    for index in range(83):
        tensors.append(tensor.clone())
        tensors[-1][index] += 1
    assert num_different(tensors) == len(tensors)


CUBE = torch.randn(2, 3, 4, 5)


@pytest.mark.parametrize(
    "tensors",
    [
        [CUBE, CUBE.to(memory_format=torch.channels_last), torch.cat([torch.zeros(1), CUBE.flatten()])[1:].view(2, 3, 4, 5)],
        [torch.zeros(0, 3), torch.zeros(0)],
        [torch.tensor(1.5), torch.tensor([1.5])],
    ],
    ids=["another layout in memory", "no elements", "no dimensions"],
)
def test_equal_values_have_one_fingerprint_whatever_their_layout(tensors: list[Tensor]) -> None:
    assert num_different(tensors) == 1
