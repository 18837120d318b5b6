"""Copies buffers from one rank or averages them over ranks; copies parameters from one rank."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.handles import started
from undertow.runtime.torch_private import private

_CHUNK_BYTES = 25 * 1024 * 1024
_MOST_ON_THEIR_WAY = 3
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class BufferOwner:
    """A place in the model where a buffer is registered; a shared buffer has several."""

    buffers: dict[str, Tensor | None]  # of one module
    name: str

    def get(self) -> Tensor | None:
        return self.buffers.get(self.name)

    def put(self, value: Tensor) -> None:
        self.buffers[self.name] = value


@dataclass(frozen=True, slots=True)
class _Shared:
    """A buffer and all places where it is registered. It is sent once and stays shared."""

    tensor: Tensor
    owners: Sequence[BufferOwner]

    def now(self) -> _Shared:
        """Returns the current buffer, or the earlier one if the current one has another shape or dtype, or is gone."""
        tensor = self.owners[0].get()
        if tensor is self.tensor or tensor is None:  # the usual case: called for every buffer in every forward
            return self
        is_same_kind = tensor.shape == self.tensor.shape and tensor.dtype == self.tensor.dtype
        return _Shared(tensor, self.owners) if is_same_kind else self

    def put(self, value: Tensor) -> None:
        for owner in self.owners:
            if owner.get() is self.tensor:
                owner.put(value)


class CommonBuffers:
    """The buffers that every rank has, as of the ranks' last comparison.

    Only these are sent, whatever has changed in a rank's module since. Otherwise ranks would wait for each other forever or
    confuse two buffers. A buffer that was added later is left alone. If a buffer's shape or dtype has changed, its last tensor is
    sent, until all ranks have new buffers and compare them.
    """

    def __init__(self, owners: Sequence[BufferOwner], tables: Sequence[dict[str, Tensor | None]] = ()) -> None:
        """`owners` are all places of buffers to synchronize; `tables` are the buffer tables of all modules, which may grow."""
        places: dict[Tensor, list[BufferOwner]] = defaultdict(list)  # tensors are keys by identity
        for owner in owners:
            tensor = owner.get()
            if tensor is not None:
                places[tensor].append(owner)
        self._buffers = [_Shared(tensor, tuple(owners)) for tensor, owners in places.items()]
        self._owners = tuple(owners)
        self._tables = tables
        self._known = self._kinds()

    def are_others(self) -> bool:
        """True if the number or kind of the buffers has changed since they were last accepted."""
        return self._kinds() != self._known

    def accept(self) -> None:
        """Accepts the current buffers as unchanged, although the new ones are not sent."""
        self._known = self._kinds()

    def _kinds(self) -> tuple[list[int], list[object]]:
        present = [owner.get() for owner in self._owners]
        kinds: list[object] = [None if buffer is None else (buffer.shape, buffer.dtype) for buffer in present]
        return list(map(len, self._tables)), kinds

    def now(self) -> list[_Shared]:
        self._buffers = [buffer.now() for buffer in self._buffers]
        return self._buffers

    @property
    def tensors(self) -> list[Tensor]:
        return [buffer.tensor for buffer in self.now()]


def broadcast_buffers(common: CommonBuffers, group: OwnGroup, *, source: int = 0) -> None:
    """Gives every buffer the value that rank `source` of the group has.

    A buffer that changes becomes a new tensor: autograd may have saved the old one for a pending backward, which would use
    whatever was written into it.
    """
    _follow(common.now(), group, source)


def average_buffers(common: CommonBuffers, group: OwnGroup, *, source: int = 0) -> None:
    """Averages floating-point and complex buffers over ranks; others (counters, flags) take the value of rank `source`.

    A buffer that changes becomes a new tensor, as in `broadcast_buffers`, here on every rank.
    """
    buffers = common.now()
    for chunk in _chunks([buffer for buffer in buffers if _has_mean(buffer.tensor)], _tensor_of):
        _replace(chunk, _means([buffer.tensor for buffer in chunk], group))
    _follow([buffer for buffer in buffers if not _has_mean(buffer.tensor)], group, source)


def broadcast_in_place(tensors: Sequence[Tensor], group: OwnGroup, *, source: int = 0) -> None:
    """Writes the values of rank `source` into `tensors`; used for parameters, which must stay the same tensors."""
    for chunk in _chunks(tensors, _itself):
        _Sent(chunk, group, source).write()


def send_in_place(tensors: Sequence[Tensor], group: OwnGroup) -> Callable[[], None]:
    """Starts `broadcast_in_place` from rank 0; the returned function waits and writes the values."""
    on_their_way = [_Sent(chunk, group, 0) for chunk in _chunks(tensors, _itself)]

    def write() -> None:
        for sent in on_their_way:
            sent.write()

    return write


class _Sent:
    """Values of rank `source` in flight, from `tensors` of one dtype and device."""

    def __init__(self, tensors: Sequence[Tensor], group: OwnGroup, source: int) -> None:
        self._tensors = tensors
        self._is_source = group.rank == source
        self._flat = _flat(tensors)
        # Sent as bytes, so that every dtype works, including ones that the backend does not support.
        payload = self._flat.view(torch.uint8)
        self._group = group
        with group.waiting():
            self._work = started(dist.broadcast(payload, group=group.process_group, group_src=source, async_op=True))

    def values(self) -> list[Tensor] | None:
        """Returns the source's values, or None on the source itself."""
        with self._group.waiting("parameters or buffers of another rank"):
            self._group.complete(self._work)
        return None if self._is_source else _parts(self._flat, self._tensors)

    @torch.no_grad()
    def write(self) -> None:
        for tensor, value in zip(self._tensors, self.values() or (), strict=False):
            tensor.copy_(value)


def _has_mean(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _follow(buffers: Sequence[_Shared], group: OwnGroup, source: int) -> None:
    # Two broadcasts are in flight at a time: the forward is blocked meanwhile, and a model with counters among its buffers pays
    # one latency instead of two. More would cost memory, because each is a copy.
    on_their_way: deque[tuple[list[_Shared], _Sent]] = deque()
    for chunk in _chunks(buffers, _tensor_of):
        if len(on_their_way) == _MOST_ON_THEIR_WAY:
            _arrive(*on_their_way.popleft())
        on_their_way.append((chunk, _Sent([buffer.tensor for buffer in chunk], group, source)))
    for chunk, sent in on_their_way:
        _arrive(chunk, sent)


def _arrive(chunk: Sequence[_Shared], sent: _Sent) -> None:
    if (values := sent.values()) is not None:
        _replace(chunk, values)


def _replace(chunk: Sequence[_Shared], values: Sequence[Tensor]) -> None:
    """Replaces the buffers of `chunk` by new tensors with these values."""
    # On the host, an unchanged buffer stays the same tensor, for code that holds a reference. On a device, the comparison would
    # block the host for every buffer of every forward, so all buffers are replaced.
    changed = [
        (buffer, value)
        for buffer, value in zip(chunk, values, strict=True)
        if value.device.type != "cpu" or not torch.equal(buffer.tensor, value)
    ]
    if not changed:
        return
    # Separate tensors, not views of the chunk: a small buffer must not keep the whole chunk alive.
    new = [torch.empty_like(buffer.tensor) for buffer, _ in changed]
    private.copy_each(new, [value for _, value in changed])
    for (buffer, _), own in zip(changed, new, strict=True):
        buffer.put(own)


def _means(chunk: Sequence[Tensor], group: OwnGroup) -> list[Tensor]:
    """Returns the means of the tensors of `chunk` over ranks."""
    # Buffers are averaged again in every step. In a wider dtype, values that are the same on every rank, such as tables of
    # constants, come back bit-identical; rounding in their own dtype would change them. Dividing before the sum also avoids
    # overflow, for example of masks filled with the lowest number. Buffers are small, so the extra bytes do not matter.
    flat = _flat(chunk)
    wide = flat.to(_wider(flat.dtype)).div_(group.num_ranks)
    with group.waiting("the mean of buffers"):
        group.all_reduce(wide)
    return _parts(wide.to(flat.dtype), chunk)


def _wider(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.itemsize >= torch.float32.itemsize else torch.float32


@torch.no_grad()
def _flat(chunk: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in chunk])


def _parts(flat: Tensor, chunk: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of `flat` with the shapes of the tensors that it was made of."""
    parts = torch.split(flat, [tensor.numel() for tensor in chunk])
    return [part.view(tensor.shape) for part, tensor in zip(parts, chunk, strict=True)]


def _chunks(items: Sequence[_Item], tensor_of: Callable[[_Item], Tensor]) -> Iterator[list[_Item]]:
    """Splits items, in order, into chunks of one dtype and device; all ranks split alike."""
    open_chunks: dict[tuple[torch.dtype, torch.device], list[_Item]] = defaultdict(list)
    sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for item in items:
        tensor = tensor_of(item)
        kind = tensor.dtype, tensor.device
        open_chunks[kind].append(item)
        sizes[kind] += tensor.nbytes
        if sizes[kind] >= _CHUNK_BYTES:
            del sizes[kind]
            yield open_chunks.pop(kind)
    yield from open_chunks.values()


def _tensor_of(buffer: _Shared) -> Tensor:
    return buffer.tensor


def _itself(tensor: Tensor) -> Tensor:
    return tensor
