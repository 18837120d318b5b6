"""The boxes of a tensor that a range of its memory makes up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from undertow.boxes import Box, boxes_of_range


@st.composite
def ranges(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """A tensor of the numbers in its memory, in any order of its dimensions, and a range of them."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    numel = math.prod(shape)
    tensor = torch.arange(numel).view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    start = draw(st.integers(0, numel))
    return tensor, start, draw(st.integers(start, numel))


def values_of(tensor: torch.Tensor, box: Box) -> list[int]:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return sorted(tensor.flatten().tolist())


@given(ranges())
def test_boxes_hold_the_elements_of_the_range_once_and_in_order(case: tuple[torch.Tensor, int, int]) -> None:
    tensor, start, stop = case
    boxes = boxes_of_range(tensor.shape, tensor.stride(), start, stop)
    assert [value for box in boxes for value in values_of(tensor, box)] == list(range(start, stop))
    assert [box.start for box in boxes] == [values_of(tensor, box)[0] for box in boxes]
    assert len(boxes) <= max(1, 2 * tensor.dim() - 1)


CHANNELS_LAST = torch.empty(2, 3, 2, 2).to(memory_format=torch.channels_last).stride()


@pytest.mark.parametrize(
    ("shape", "strides", "start", "stop", "boxes"),
    [
        ((5, 4), (4, 1), 3, 14, [((0, 3), (1, 1), 3), ((1, 0), (2, 4), 4), ((3, 0), (1, 2), 12)]),
        ((2, 3, 2, 2), CHANNELS_LAST, 1, 6, [((0, 1, 0, 0), (1, 2, 1, 1), 1), ((0, 0, 0, 1), (1, 3, 1, 1), 3)]),
        ((), (), 0, 1, [((), (), 0)]),
        ((), (), 0, 0, []),
        ((0, 3), (3, 1), 0, 0, []),
        ((1, 1), (1, 1), 0, 1, [((0, 0), (1, 1), 0)]),
    ],
    ids=[
        "the end of a row, whole rows, the begin of one",
        "channels are cut first",
        "a scalar",
        "none of it",
        "empty",
        "one element",
    ],
)
def test_boxes_of_a_range(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int, boxes: list[tuple[Any, ...]]
) -> None:
    assert [(box.offsets, box.sizes, box.start) for box in boxes_of_range(shape, strides, start, stop)] == boxes
