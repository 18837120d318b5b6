"""Buffers follow a rank or become the mean over ranks; parameters follow a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.runtime import private
from undertow.runtime.group import OwnGroup

_CHUNK_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BufferOwner:
    """A place in the model where a buffer is registered; a shared buffer has several."""

    buffers: dict[str, Tensor | None]  # a module's own
    name: str

    def get(self) -> Tensor | None:
        return self.buffers.get(self.name)

    def put(self, value: Tensor) -> None:
        self.buffers[self.name] = value


# By tensor, not by place: a shared buffer travels once, and stays shared. Tensors are keys by identity.
_Places = dict[Tensor, list[BufferOwner]]


def broadcast_buffers(owners: Sequence[BufferOwner], group: OwnGroup, *, source: int = 0) -> None:
    """Gives every buffer the value that rank `source` of the group has.

    A buffer that changes becomes a new tensor: autograd may have saved the old one for a backward that is still to
    come, and would use whatever was written into it.
    """
    places = _places_of(owners)
    _follow(list(places), places, group, source)


def average_buffers(owners: Sequence[BufferOwner], group: OwnGroup, *, source: int = 0) -> None:
    """Floating-point and complex buffers become their mean over ranks, others (counters, flags) follow rank `source`.

    One that changes becomes a new tensor, as in `broadcast_buffers`, here on every rank.
    """
    places = _places_of(owners)
    for chunk in _chunks([buffer for buffer in places if _has_mean(buffer)]):
        _replace(chunk, _means(chunk, group), places)
    _follow([buffer for buffer in places if not _has_mean(buffer)], places, group, source)


@torch.no_grad()
def broadcast_in_place(tensors: Sequence[Tensor], group: OwnGroup, *, source: int = 0) -> None:
    """Writes the values of rank `source` into `tensors`: for parameters, which stay the same tensors for ever."""
    for chunk in _chunks(tensors):
        for tensor, value in zip(chunk, _values_of(source, chunk, group), strict=True):
            if group.rank != source:
                tensor.copy_(value)


def _places_of(owners: Sequence[BufferOwner]) -> _Places:
    places: _Places = defaultdict(list)
    for owner in owners:
        buffer = owner.get()
        if buffer is not None:
            places[buffer].append(owner)
    return places


def _has_mean(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _follow(buffers: Sequence[Tensor], places: _Places, group: OwnGroup, source: int) -> None:
    for chunk in _chunks(buffers):
        values = _values_of(source, chunk, group)
        if group.rank != source:
            _replace(chunk, values, places)


def _replace(chunk: Sequence[Tensor], values: Sequence[Tensor], places: _Places) -> None:
    """Puts new tensors with these values where the buffers of `chunk` are."""
    # On the host a buffer that does not change stays the same tensor, for whoever holds it. On a device the comparison
    # would make the host wait, for every buffer of every forward: there all are replaced.
    changed = [
        (buffer, value)
        for buffer, value in zip(chunk, values, strict=True)
        if buffer.device.type != "cpu" or not torch.equal(buffer, value)
    ]
    if not changed:
        return
    # Tensors of their own, not parts of the chunk: it must not live on because one small buffer of it does.
    new = [torch.empty_like(buffer) for buffer, _ in changed]
    private.copy_each(new, [value for _, value in changed])
    for (buffer, _), own in zip(changed, new, strict=True):
        for owner in places[buffer]:
            owner.put(own)


def _values_of(source: int, chunk: Sequence[Tensor], group: OwnGroup) -> list[Tensor]:
    """What rank `source` has in the tensors of `chunk`."""
    flat = _flat(chunk)
    # Bytes travel, so that every dtype can, also those that the backend knows nothing of.
    dist.broadcast(flat.view(torch.uint8), group=group.process_group, group_src=source)
    return _parts(flat, chunk)


def _means(chunk: Sequence[Tensor], group: OwnGroup) -> list[Tensor]:
    """The means over ranks of the tensors of `chunk`."""
    # A wider dtype, because buffers are averaged anew in every step: what is the same on every rank, such as a table of
    # constants, comes back to the bit, where rounding in its own dtype would move it. Divided before the sum, which then
    # cannot overflow either, as that of masks filled with the lowest number would. Buffers are small; the bytes are too.
    flat = _flat(chunk)
    wide = flat.to(_wider(flat.dtype)).div_(group.num_ranks)
    dist.all_reduce(wide, group=group.process_group)
    return _parts(wide.to(flat.dtype), chunk)


def _wider(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.itemsize >= torch.float32.itemsize else torch.float32


def _flat(chunk: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in chunk])


def _parts(flat: Tensor, chunk: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` of the shapes of the tensors that it was made of."""
    parts = torch.split(flat, [tensor.numel() for tensor in chunk])
    return [part.view(tensor.shape) for part, tensor in zip(parts, chunk, strict=True)]


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in their order, of one dtype and device each; all ranks cut alike."""
    open_chunks: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        open_chunks[kind].append(tensor)
        sizes[kind] += tensor.nbytes
        if sizes[kind] >= _CHUNK_BYTES:
            del sizes[kind]
            yield open_chunks.pop(kind)
    yield from open_chunks.values()
