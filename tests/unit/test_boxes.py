from __future__ import annotations

import math

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


def test_a_middle_of_a_matrix_is_the_end_of_a_row_whole_rows_and_the_begin_of_one() -> None:
    assert boxes_of_range((5, 4), (4, 1), 3, 14) == [
        Box(offsets=(0, 3), sizes=(1, 1), start=3),
        Box(offsets=(1, 0), sizes=(2, 4), start=4),
        Box(offsets=(3, 0), sizes=(1, 2), start=12),
    ]


def test_of_a_channels_last_tensor_the_channels_are_cut_first() -> None:
    strides = torch.empty(2, 3, 2, 2).to(memory_format=torch.channels_last).stride()
    assert boxes_of_range((2, 3, 2, 2), strides, 1, 6) == [
        Box(offsets=(0, 1, 0, 0), sizes=(1, 2, 1, 1), start=1),
        Box(offsets=(0, 0, 0, 1), sizes=(1, 3, 1, 1), start=3),
    ]


@pytest.mark.parametrize(("shape", "stop", "num_boxes"), [((), 1, 1), ((), 0, 0), ((0, 3), 0, 0), ((1, 1), 1, 1)])
def test_tensors_with_hardly_any_elements(shape: tuple[int, ...], stop: int, num_boxes: int) -> None:
    assert len(boxes_of_range(shape, torch.empty(shape).stride(), 0, stop)) == num_boxes
