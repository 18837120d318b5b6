"""Splits a range of a tensor's memory into boxes of its index space, as torch.distributed.checkpoint splits tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Extent = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The elements of a tensor whose index is at least `offsets` and less than `offsets + sizes` in every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # position of the first element in the tensor's memory; the elements are contiguous


def boxes_of_range(shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> list[Box]:
    """Returns elements [start, stop) of a tensor without gaps in memory: at most 2k - 1 boxes for k dimensions, in order."""
    # A dimension of one element may have any stride. It comes last, so that it changes nothing.
    outer_first = sorted(range(len(shape)), key=lambda dim: (shape[dim] == 1, -strides[dim]))
    place_of = sorted(range(len(shape)), key=outer_first.__getitem__)
    return [
        Box(
            offsets=tuple(offsets[place] for place in place_of),
            sizes=tuple(sizes[place] for place in place_of),
            start=sum(offset * strides[dim] for dim, offset in zip(outer_first, offsets, strict=True)),
        )
        for offsets, sizes in _row_major([shape[dim] for dim in outer_first], start, stop)
    ]


def _row_major(shape: Sequence[int], start: int, stop: int) -> list[_Extent]:
    """Returns the rest of a first row, whole rows, and the start of a last row; a row is cut like a smaller tensor."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row_shape, row = shape[1:], math.prod(shape[1:])
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, _row_major(row_shape, begin, end))
    found: list[_Extent] = []
    if begin:
        found += _in_row(first, _row_major(row_shape, begin, row))
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in row_shape)), (last - first, *row_shape)))
    return found + _in_row(last, _row_major(row_shape, 0, end))


def _in_row(index: int, extents: Sequence[_Extent]) -> list[_Extent]:
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in extents]
