"""Parameters and buffers follow rank 0."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.runtime.group import OwnGroup

_CHUNK_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BufferOwner:
    """A place in the model where a buffer is registered; a shared buffer has several."""

    module: nn.Module
    name: str

    def get(self) -> Tensor | None:
        return self.module._buffers.get(self.name)

    def put(self, value: Tensor) -> None:
        self.module._buffers[self.name] = value


def buffer_owners(module: nn.Module, ignore: Sequence[str]) -> list[BufferOwner]:
    """Every place where a buffer of `module` lives, but for those whose full names are in `ignore`."""
    return [
        BufferOwner(owner, name)
        for prefix, owner in module.named_modules()
        for name in owner._buffers
        if (f"{prefix}.{name}" if prefix else name) not in ignore
    ]


def broadcast_buffers(owners: Sequence[BufferOwner], group: OwnGroup) -> None:
    """Gives every buffer the value of rank 0's.

    A buffer that changes becomes a new tensor: autograd may have saved the old one for a backward that is still to
    come, and would use whatever was written into it.
    """
    by_tensor: dict[int, list[BufferOwner]] = defaultdict(list)
    for owner in owners:
        value = owner.get()
        if value is not None:
            by_tensor[id(value)].append(owner)
    values = [owner.get() for owner, *_ in by_tensor.values()]
    received = _from_rank_zero([value for value in values if value is not None], group)
    for value, new in received:  # by dtype and device, not in the order of `values`
        if group.rank != 0 and not torch.equal(value, new):
            own = torch.empty_like(value).copy_(new)  # a chunk must not live on because one small buffer of it does
            for owner in by_tensor[id(value)]:
                owner.put(own)


@torch.no_grad()
def broadcast_in_place(tensors: Sequence[Tensor], group: OwnGroup) -> None:
    """Writes rank 0's values into `tensors`: for parameters, which stay the same tensors for ever."""
    for value, new in _from_rank_zero(tensors, group):
        if group.rank != 0:
            value.copy_(new)


def _from_rank_zero(tensors: Sequence[Tensor], group: OwnGroup) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor with rank 0's value of it; coalesced, a broadcast per dtype, device and chunk, as they are taken."""
    for chunk in _chunks(tensors):
        yield from _broadcast_chunk(chunk, group)


def _broadcast_chunk(chunk: Sequence[Tensor], group: OwnGroup) -> Iterator[tuple[Tensor, Tensor]]:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
    # Bytes travel, so that every dtype can, also those that the backend knows nothing of.
    dist.broadcast(flat.view(torch.uint8), group=group.process_group, group_src=0)
    start = 0
    for tensor in chunk:
        yield tensor, flat[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()


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
