"""Values of one rank that all others take: buffers, before a forward, and parameters.

CommonBuffers, synchronize_buffers    buffers
broadcast_in_place                    parameters
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.errors import ConfigError
from undertow.mesh.local_tensors import local_tensor, local_tensors
from undertow.ranks.handle import Handle
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import private

_CHUNK_BYTES = 25 * 1024 * 1024

# A place where a buffer is registered: the table of a module, the name in it, and the name in the
# model.
Place = tuple[MutableMapping[str, Tensor | None], str, str]

_NOT_SENT: tuple[tuple[Callable[[Tensor], bool], str], ...] = (
    (lambda buffer: buffer.is_nested, "a nested tensor"),
    (
        lambda buffer: buffer.layout is not torch.strided,
        "a tensor whose layout is not torch.strided, such as a sparse one",
    ),
    (lambda buffer: buffer.is_quantized, "a quantized tensor"),
    (private.has_shared_elements, "an expanded tensor: several of its elements share memory"),
)


@dataclass(slots=True)
class _CommonBuffer:
    """A buffer by the first place where it is registered."""

    place: Place
    tensor: Tensor  # the last one there of the kind that the ranks have compared
    is_kept: bool = False  # written in place: another place has the same memory, or a DTensor

    @property
    def values(self) -> Tensor:
        """This rank's values."""
        return local_tensor(self.tensor)


class CommonBuffers:
    """The buffers that every rank has: those in the tables when the ranks compared them.

    Only these are sent, even if a rank's module has changed since. Otherwise ranks would wait for
    each other forever or confuse two buffers. A buffer that was added later is left alone, and so
    is one of another shape or dtype: its last tensor is sent instead.
    """

    def __init__(self, places: Sequence[Place] = ()) -> None:
        """`places` are of all buffers to synchronize."""
        self._places = places
        self._read()

    def _read(self) -> None:
        self._not_sent: tuple[str, str] | None = None  # the name of a buffer, and its kind
        found: dict[Tensor, _CommonBuffer] = {}  # tensors are keys by identity
        at: dict[int, _CommonBuffer] = {}  # by the address of its memory
        for place in self._places:
            table, key, name = place
            tensor = table.get(key)
            if tensor is None or tensor.is_meta:  # which has no values
                continue
            buffer = found.setdefault(tensor, _CommonBuffer(place, tensor))
            kind = why_not_sent(tensor)
            if kind:
                self._not_sent = self._not_sent or (name, kind)
                continue
            buffer.is_kept |= buffer.values is not tensor
            first = at.setdefault(buffer.values.untyped_storage().data_ptr(), buffer)
            if first.place is not place:
                first.is_kept = buffer.is_kept = True
        self.buffers = list(found.values())

    def now(self) -> list[_CommonBuffer]:
        """Returns the buffers with their current tensors, or with earlier ones if the current ones
        have another shape or dtype, or are gone.

        Raises ConfigError if one is of a kind that cannot be sent.
        """
        if self._not_sent is not None:
            self._read()  # it may be another tensor now
        if self._not_sent is not None:
            name, kind = self._not_sent
            raise ConfigError(
                f"buffer {name!r} is {kind}.",
                where="buffers follow rank 0, and only dense tensors can be sent",
                remedy="Register a dense tensor, such as a clone() of it, or leave it out: "
                f"ignore=({name!r},).",
            )
        for buffer in self.buffers:
            table, key, _ = buffer.place
            tensor, earlier = table.get(key), buffer.tensor
            # The usual case comes first: this is checked for every buffer in every forward.
            if tensor is not earlier and tensor is not None and kind_of(tensor) == kind_of(earlier):
                buffer.tensor = tensor
        return self.buffers


def why_not_sent(buffer: Tensor) -> str:
    """Returns the kind of a buffer that cannot be sent, in words, or nothing."""
    return next((words for is_of_kind, words in _NOT_SENT if is_of_kind(buffer)), "")


def kind_of(buffer: Tensor) -> tuple[object, ...]:
    """Returns the properties that a buffer must keep to be sent."""
    # a nested tensor may not have a shape
    return buffer.dtype, buffer.layout, buffer.is_meta, buffer.is_nested or buffer.shape


@torch.no_grad()
def synchronize_buffers(common: CommonBuffers, group: OwnGroup, *, source: int = 0) -> None:
    """Gives every buffer the value that rank `source` of the group has.

    A buffer that changes becomes a new tensor: autograd may have saved the old one for a pending
    backward, which would use the written values. Buffers that share memory with another buffer, or
    require gradients, are written in place.
    """
    buffers = common.now()
    for handle, values in _sent([buffer.values for buffer in buffers], group, source):
        handle.wait()
        arrived = [(buffers[index], value) for index, value in values]
        _replace(arrived, is_host=group.hardware.is_host)


@torch.no_grad()
def broadcast_in_place(tensors: Iterable[Tensor], group: OwnGroup, *, source: int = 0) -> None:
    """Writes the values of rank `source` into `tensors`.

    Used for parameters, which must stay the same tensors.
    """
    targets = local_tensors(tensors)
    for handle, values in _sent(targets, group, source):
        handle.wait()
        for index, value in values:
            _write(targets[index], value)


def _write(target: Tensor, value: Tensor) -> None:
    # One by one: a fused copy refuses conjugate views. A tensor that was made in inference mode is
    # only written there.
    with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
        target.copy_(value)


def _replace(arrived: Iterable[tuple[_CommonBuffer, Tensor]], *, is_host: bool) -> None:
    replaced: list[tuple[_CommonBuffer, Tensor]] = []
    for buffer, value in arrived:
        # On the host, an unchanged buffer stays the same tensor, for code that holds a reference.
        # On a device, the comparison would block the host for every buffer of every forward, so all
        # buffers are replaced.
        if is_host and torch.equal(buffer.values, value):
            continue
        # it must stay the same tensor, as under torch's class
        if buffer.is_kept or buffer.tensor.requires_grad:
            _write(buffer.values, value)
        else:
            replaced.append((buffer, value))
    if not replaced:
        return
    # Separate tensors, not views of the chunk: a small buffer must not keep the whole chunk alive.
    new = [torch.empty_like(buffer.tensor) for buffer, _ in replaced]
    private.copy_each(new, [value for _, value in replaced])
    for (buffer, _), own in zip(replaced, new, strict=True):
        table, key, _ = buffer.place
        if table.get(key) is buffer.tensor:
            table[key] = own
        buffer.tensor = own


def _sent(
    tensors: Sequence[Tensor], group: OwnGroup, source: int = 0
) -> Iterator[tuple[Handle, list[tuple[int, Tensor]]]]:
    """Starts to send chunk after chunk; yields the values of each, by their indices in `tensors`.

    Rank `source` itself gets no values.
    """
    for chunk in _chunks(tensors):
        # As bytes, so that every dtype works, including ones that the backend does not support.
        flat = torch.cat([_bytes(tensors[index]) for index in chunk])
        handle = group.broadcast(flat, "parameters or buffers of another rank", source=source)
        values: list[tuple[int, Tensor]] = []
        parts = torch.split(flat, [tensors[index].nbytes for index in chunk])
        for index, part in zip(chunk, parts, strict=True):
            if group.rank != source:
                tensor = tensors[index]
                values.append((index, part.view(tensor.dtype).view(tensor.shape)))
        yield handle, values


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _chunks(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Splits tensors, by their indices, into chunks of one device, in the same way on all ranks.

    Wide dtypes come first in a chunk, so that every tensor begins at a multiple of its width.
    """
    chunks: dict[object, list[int]] = defaultdict(list)
    num_bytes = Counter[object]()
    for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize):
        device = tensors[index].device
        chunks[device, num_bytes[device] // _CHUNK_BYTES].append(index)
        num_bytes[device] += tensors[index].nbytes
    return list(chunks.values())
