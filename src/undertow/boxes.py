"""Splits a range of a tensor's memory into boxes of its index space, as
torch.distributed.checkpoint splits tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The elements of a tensor whose index is at least `offsets` and less than `offsets + sizes` in
    every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # position of the first element in the tensor's memory; the elements are contiguous


def boxes_of_range(
    shape: Sequence[int], strides: Sequence[int], start: int, stop: int
) -> list[Box]:
    """Returns elements [start, stop) of a tensor without gaps in memory.

    At most 2k - 1 boxes for k dimensions, in order.
    """
    # A dimension of one element may have any stride. It comes last, so that it changes nothing.
    outer_first = sorted(range(len(shape)), key=lambda dim: (shape[dim] == 1, -strides[dim]))
    boxes = []
    while start < stop:
        offsets, sizes = [0] * len(shape), list(shape)
        row, rest = math.prod(shape), start
        # to the outermost dimension whose next row lies wholly in the range
        for dim in outer_first:
            row //= shape[dim]
            offsets[dim], rest = divmod(rest, row)
            if rest == 0 and start + row <= stop:
                sizes[dim] = min(shape[dim] - offsets[dim], (stop - start) // row)
                break
            sizes[dim] = 1
        boxes.append(Box(offsets=tuple(offsets), sizes=tuple(sizes), start=start))
        start += math.prod(sizes)
    return boxes
