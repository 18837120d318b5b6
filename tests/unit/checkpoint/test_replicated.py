"""Bytes of tensors that follow each other, read and written like one."""

import random

import pytest
import torch

from support.levels import some
from undertow.checkpoint.replicated import _Bytes


@pytest.mark.parametrize("seed", some(range(20), most=8))
def test_tensors_one_after_another_are_read_and_written_as_the_bytes_of_one(seed: int) -> None:
    chance = random.Random(seed)
    tensors = [torch.randint(256, (chance.randrange(1, 9),), dtype=torch.uint8) for _ in range(chance.randrange(1, 7))]
    whole = torch.cat(tensors)
    for start in range(whole.nbytes + 2):
        for size in range(1, whole.nbytes + 3):
            row = torch.zeros(size, dtype=torch.uint8)
            _Bytes(tensors).read(start, row)
            wanted = torch.zeros(size, dtype=torch.uint8)
            wanted[: max(0, whole.nbytes - start)] = whole[start : start + size]
            assert torch.equal(row, wanted)

            written = [torch.zeros_like(tensor) for tensor in tensors]
            values = torch.arange(1, size + 1, dtype=torch.uint8)
            _Bytes(written).write(start, values)
            expected = torch.zeros_like(whole)
            expected[start : start + size] = values[: max(0, whole.nbytes - start)]
            assert torch.equal(torch.cat(written), expected)
