"""Boxes of a tensor, and tensors that torch.distributed.checkpoint saves and loads by boxes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from undertow.boxes import Box, boxes_of_range
from undertow.torch_private import checkpoint as private_checkpoint
from undertow.torch_private import private


@st.composite
def ranges(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """A tensor of the numbers in its memory, in any order of its dimensions, and a range of them."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    order, numel = draw(st.permutations(range(len(shape)))), math.prod(shape)
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
    assert ([value for box in boxes for value in values_of(tensor, box)], [box.start for box in boxes]) == (
        list(range(start, stop)),
        [values_of(tensor, box)[0] for box in boxes],
    )
    assert len(boxes) <= max(1, 2 * tensor.dim() - 1)


CHANNELS_LAST = torch.empty(2, 3, 2, 2).to(memory_format=torch.channels_last).stride()


@pytest.mark.parametrize(
    ("shape", "strides", "start", "stop", "boxes"),
    [
        ((5, 4), (4, 1), 3, 14, [((0, 3), (1, 1), 3), ((1, 0), (2, 4), 4), ((3, 0), (1, 2), 12)]),
        ((2, 3, 2, 2), CHANNELS_LAST, 1, 6, [((0, 1, 0, 0), (1, 2, 1, 1), 1), ((0, 0, 0, 1), (1, 3, 1, 1), 3)]),
    ],
    ids=[
        "the end of a row, whole rows, the begin of one",
        "channels are cut first",
    ],
)
def test_boxes_of_a_range(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int, boxes: list[tuple[Any, ...]]
) -> None:
    assert [(box.offsets, box.sizes, box.start) for box in boxes_of_range(shape, strides, start, stop)] == boxes


class InRows(torch.Tensor):
    """A tensor that says to torch.distributed.checkpoint that it lies in two boxes, its first row and the others."""

    BOXES = (Box(offsets=(0, 0), sizes=(1, 2), start=0), Box(offsets=(1, 0), sizes=(2, 2), start=2))
    rows: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor) -> "InRows":
        made = private.wrapper_tensor(cls, rows, dtype=torch.float32, device=torch.device("cpu"))
        made.rows = rows
        return made

    def __create_write_items__(self, name: str, _object: object) -> list[object]:
        return private_checkpoint.write_items(name, self, self.BOXES)

    def __create_chunk_list__(self) -> list[object]:
        return private_checkpoint.chunks(self.BOXES)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.rows[:1] if tuple(index.offset) == (0, 0) else self.rows[1:]

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{op} was called: it has no values")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_saves_a_tensor_in_boxes_and_loads_it_whole_and_in_boxes(tmp_path: Path) -> None:
    dcp.save({"rows": InRows(torch.arange(6.0).view(3, 2))}, checkpoint_id=tmp_path, no_dist=True)
    whole, rows = torch.zeros(3, 2), torch.zeros(3, 2)
    dcp.load({"rows": whole}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"rows": InRows(rows)}, checkpoint_id=tmp_path, no_dist=True)
    assert whole.tolist() == rows.tolist() == [[0, 1], [2, 3], [4, 5]]
