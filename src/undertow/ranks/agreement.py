"""Facts that all ranks have alike: they compare them, and share the values of one rank, or means.

require_agreement                     settings, parameters and buffers: raises where ranks differ
gather_json, gather_bytes             a full message of each rank
CommonBuffers, synchronize_buffers    buffers, before a forward
broadcast_in_place, send_in_place     parameters
"""

import contextlib
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from undertow.errors import PlanMismatch, require
from undertow.ranks.transport import Handle, OwnGroup
from undertow.torch_private import private
from undertow.version import __version__

# Tensors that are compared: their key, the word for one of them, and the words for all.
_TENSORS = (
    ("params", "parameter", "the parameters"),
    ("others", "tensor", "the frozen parameters or the buffers"),
    ("new", "new parameter", "the new parameters"),
)
_SETTINGS = "the settings"
_COMPARISON = "the comparison of all ranks' parameters"
_CHUNK_BYTES = 25 * 1024 * 1024

# A place where a buffer is registered: the table of a module, the name in it, and the name in the
# model. A shared buffer has several.
Place = tuple[MutableMapping[str, Tensor | None], str, str]

_NOT_SENT: tuple[tuple[Callable[[Tensor], bool], str], ...] = (
    (lambda buffer: buffer.is_nested, "a nested tensor"),
    (
        lambda buffer: buffer.layout is not torch.strided,
        "a tensor whose layout is not torch.strided, such as a sparse one",
    ),
    (lambda buffer: buffer.is_quantized, "a quantized tensor"),
    (lambda buffer: type(buffer).__name__ == "DTensor", "a DTensor"),
    (private.has_shared_elements, "an expanded tensor: several of its elements share memory"),
)


def gather_json(group: OwnGroup, value: object, *, waits_for: str = _COMPARISON) -> list[Any]:
    """Gathers a value of every rank as JSON, in rank order. Reports name the wait `waits_for`."""
    text = json.dumps(value, sort_keys=True).encode()

    def all_gather(tensor: Tensor) -> Tensor:
        return group.all_gather(tensor, waits_for).result()

    return list(map(json.loads, gather_bytes(text, all_gather, group.device)))


def gather_bytes(
    mine: bytes, all_gather: Callable[[Tensor], Tensor], device: torch.device
) -> list[bytes]:
    """Gathers the bytes of every rank, in rank order. Pickled objects would run the sender's
    code."""
    sizes = all_gather(torch.tensor(len(mine), device=device)).tolist()
    padded = torch.frombuffer(bytearray(mine.ljust(max(1, *sizes), b"\0")), dtype=torch.uint8)
    rows = all_gather(padded.to(device))
    return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]


def surroundings(group: OwnGroup) -> dict[str, Any]:
    """Returns what must match on every rank besides parameters and settings."""
    return {
        "torch": str(torch.__version__),
        "undertow": __version__,
        # they freeze the plan
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "mesh": group.user.rows or None,
    }


def require_agreement(
    group: OwnGroup,
    *,
    settings: dict[str, Any],
    params: Sequence[dict[str, Any]] = (),
    others: Sequence[dict[str, Any]] = (),
    new: Sequence[str] = (),
) -> None:
    """Compares all ranks' settings, parameters and other tensors, and names of new parameters.

    A collective call. Raises PlanMismatch, on every rank, if ranks differ.
    """
    named = [{"name": name} for name in new]
    mine = {"settings": settings, "params": params, "others": others, "new": named}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).digest()
    sent = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(group.device)
    rows = group.all_gather(sent, _COMPARISON).result().tolist()
    digests = [bytes(row).hex() for row in rows]
    other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
    if other is None:
        return
    described = gather_json(group, mine)
    what, difference = _first_difference(described[0], described[other], other)
    ranks = [
        f"rank {rank}: {len(described[rank]['params'])} parameters, fingerprint {digests[rank][:4]}"
        for rank in (0, other)
    ]
    raise PlanMismatch(
        f"ranks disagree on {what}.",
        where=f"{'   '.join(ranks)}\n  first difference: {difference}",
        remedy="Give every rank the same settings and the same versions."
        if what == _SETTINGS
        else "Build the model the same way on every rank before wrapping it.",
    )


def _first_difference(first: dict[str, Any], second: dict[str, Any], rank: int) -> tuple[str, str]:
    """Returns the kind of the first difference between rank 0 and `rank`, and the difference in
    words."""
    for key, kind, name_of_all in _TENSORS:
        for index, (mine, theirs) in enumerate(zip_longest(first[key], second[key])):
            here, there = (
                "missing" if spec is None else repr(spec["name"]) for spec in (mine, theirs)
            )
            if here != there:
                return name_of_all, f"{kind} {index} is {here} on rank 0 and {there} on rank {rank}"
            if mine != theirs:
                # The shape first: other fields, such as the order of axes in memory, follow from
                # it.
                field = next(
                    name for name in ("shape", *mine, *theirs) if mine.get(name) != theirs.get(name)
                )
                values = f"{mine.get(field)} on rank 0 and {theirs.get(field)} on rank {rank}"
                return name_of_all, f"{field} of {kind} {index} ({here}) is {values}"
    mine, theirs = first["settings"], second["settings"]
    name = next(name for name in mine | theirs if mine.get(name) != theirs.get(name))
    return _SETTINGS, (
        f"{name} is {mine.get(name)!r} on rank 0 and {theirs.get(name)!r} on rank {rank}"
    )


@dataclass(slots=True)
class _Item:
    """A tensor that is sent once; of a buffer also all its places, so that it stays shared."""

    tensor: Tensor
    places: Sequence[Place] = ()
    overlaps: bool = False  # another buffer has the same memory
    is_checked: bool = False  # its tensor can be sent


_Values = list[tuple[_Item, Tensor]]  # items with their new values
_Arriving = Iterator[tuple[Handle, _Values]]


class CommonBuffers:
    """The buffers that every rank has: those that the ranks compared when the model was wrapped, or
    its parameters changed.

    Only these are sent, whatever has changed in a rank's module since. Otherwise ranks would wait
    for each other forever or confuse two buffers. A buffer that was added later is left alone, and
    so is one of another shape or dtype: its last tensor is sent instead.
    """

    def __init__(self, places: Sequence[Place] = ()) -> None:
        """`places` are of all buffers to synchronize."""
        found: dict[Tensor, list[Place]] = defaultdict(list)  # tensors are keys by identity
        for place in places:
            tensor = place[0].get(place[1])
            if tensor is not None and not tensor.is_meta:  # which has no values
                found[tensor].append(place)
        self.buffers = list(map(_Item, found, found.values()))
        sent = [item for item in self.buffers if not why_not_sent(item.tensor)]
        pointers = [item.tensor.untyped_storage().data_ptr() for item in sent]
        num_buffers = Counter(pointers)
        for item, pointer in zip(sent, pointers, strict=True):
            item.overlaps = num_buffers[pointer] > 1

    def now(self) -> list[_Item]:
        """Returns the current buffers, or an earlier one if the current one has another shape or
        dtype, or is gone.

        Raises ConfigError for a buffer of a kind that cannot be sent.
        """
        for buffer in self.buffers:
            (table, key, name), earlier = buffer.places[0], buffer.tensor
            tensor = table.get(key)
            # The usual case comes first: this is checked for every buffer in every forward.
            if tensor is not earlier and tensor is not None and _kind(tensor) == _kind(earlier):
                buffer.tensor = tensor
                buffer.is_checked = False
            if not buffer.is_checked:
                kind = why_not_sent(buffer.tensor)
                require(
                    not kind,
                    f"buffer {name!r} is {kind}.",
                    where="buffers follow rank 0, and only dense tensors can be sent",
                    remedy="Register a dense tensor, such as a clone() of it, or leave it out: "
                    f"ignore=({name!r},).",
                )
                buffer.is_checked = True
        return self.buffers


def why_not_sent(buffer: Tensor) -> str:
    """Returns the kind of a buffer that cannot be sent, in words, or nothing."""
    return next((words for is_of_kind, words in _NOT_SENT if is_of_kind(buffer)), "")


def _kind(buffer: Tensor) -> tuple[object, ...]:
    # a nested tensor may not have a shape
    return buffer.dtype, buffer.is_meta, buffer.is_nested or buffer.shape


@torch.no_grad()
def synchronize_buffers(
    common: CommonBuffers, group: OwnGroup, *, source: int = 0, averages: bool = False
) -> None:
    """Gives every buffer the value that rank `source` of the group has, or `averages`
    floating-point and complex ones over ranks.

    A buffer that changes becomes a new tensor: autograd may have saved the old one for a pending
    backward, which would use whatever was written into it. Buffers that share
    memory with another buffer, or require gradients, are written in place.
    """
    of_source: list[_Item] = []
    averaged: list[_Item] = []
    for buffer in common.now():
        has_mean = averages and (buffer.tensor.is_floating_point() or buffer.tensor.is_complex())
        (averaged if has_mean else of_source).append(buffer)
    for handle, values in chain(_means(averaged, group), _sent(of_source, group, source)):
        handle.wait()
        _replace(values, is_host=group.hardware.is_host)


@torch.no_grad()
def broadcast_in_place(tensors: Iterable[Tensor], group: OwnGroup, *, source: int = 0) -> None:
    """Writes the values of rank `source` into `tensors`.

    Used for parameters, which must stay the same tensors.
    """
    for handle, values in _sent(list(map(_Item, tensors)), group, source):
        handle.wait()
        _write(values)


@torch.no_grad()
def send_in_place(
    tensors: Iterable[Tensor], group: OwnGroup, *, averages: bool = False
) -> Callable[[], None]:
    """Starts to send rank 0's values, or means over ranks.

    The returned function waits and writes them into `tensors`.
    """
    on_their_way = list((_means if averages else _sent)(list(map(_Item, tensors)), group))

    @torch.no_grad()
    def write() -> None:
        for handle, values in on_their_way:
            handle.wait()
            _write(values)

    return write


def _write(arrived: _Values) -> None:
    for item, value in arrived:
        # One by one: a fused copy refuses conjugate views. A tensor that was made in inference mode
        # is only written there.
        with torch.inference_mode() if item.tensor.is_inference() else contextlib.nullcontext():
            item.tensor.copy_(
                value.to_sparse(item.tensor.sparse_dim()) if item.tensor.is_sparse else value
            )


def _replace(arrived: _Values, *, is_host: bool) -> None:
    replaced: _Values = []
    for item, value in arrived:
        # On the host, an unchanged buffer stays the same tensor, for code that holds a reference.
        # On a device, the comparison would block the host for every buffer of every forward, so all
        # buffers are replaced.
        value = value.to(item.tensor.dtype)
        if is_host and torch.equal(item.tensor, value):
            continue
        # it must stay the same tensor, as under torch's class
        if item.overlaps or item.tensor.requires_grad:
            _write([(item, value)])
        else:
            replaced.append((item, value))
    if not replaced:
        return
    # Separate tensors, not views of the chunk: a small buffer must not keep the whole chunk alive.
    new = [torch.empty_like(item.tensor) for item, _ in replaced]
    private.copy_each(new, [value for _, value in replaced])
    for (item, _), own in zip(replaced, new, strict=True):
        for table, key, _ in item.places:
            if table.get(key) is item.tensor:
                table[key] = own
        item.tensor = own


def _means(items: Sequence[_Item], group: OwnGroup) -> _Arriving:
    """Starts to average chunk after chunk; the means are in double precision."""
    # Buffers are averaged again in every step. In fp64, values that are the same on every rank,
    # such as tables of constants, come back bit-identical; rounding in their own dtype would change
    # them. Dividing before the sum also avoids overflow, for example of masks filled with the
    # lowest number. Buffers are small, so the extra bytes do not matter.
    for chunk in _chunks(items):
        flat = torch.cat([item.tensor.to_dense().flatten() for item in chunk])
        wide = flat.to(torch.promote_types(flat.dtype, torch.float64)).div_(group.num_ranks)
        handle = group.all_reduce(wide, "the mean of buffers or gradients")
        parts = torch.split(wide, [item.tensor.numel() for item in chunk])
        means = [part.view(item.tensor.shape) for item, part in zip(chunk, parts, strict=True)]
        yield handle, list(zip(chunk, means, strict=True))


def _sent(items: Sequence[_Item], group: OwnGroup, source: int = 0) -> _Arriving:
    """Starts to send chunk after chunk; rank `source` itself gets no values."""
    for chunk in _chunks(items):
        # As bytes, so that every dtype works, including ones that the backend does not support.
        flat = torch.cat([_bytes(item.tensor) for item in chunk])
        handle = group.broadcast(flat, "parameters or buffers of another rank", source=source)
        values: _Values = []
        parts = torch.split(flat, [item.tensor.nbytes for item in chunk])
        for item, part in zip(chunk, parts, strict=True):
            if group.rank != source:
                values.append((item, part.view(item.tensor.dtype).view(item.tensor.shape)))
        yield handle, values


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _chunks(items: Sequence[_Item]) -> list[list[_Item]]:
    """Splits items into chunks of one device, either complex or real; all ranks split alike.

    Wide dtypes come first in a chunk, so that every tensor begins at a multiple of its width.
    """
    chunks: dict[object, list[_Item]] = defaultdict(list)
    num_bytes = Counter[object]()
    for item in sorted(items, key=lambda item: -item.tensor.itemsize):
        kind = item.tensor.device, item.tensor.is_complex()
        chunks[kind, num_bytes[kind] // _CHUNK_BYTES].append(item)
        num_bytes[kind] += item.tensor.numel() * item.tensor.itemsize  # also of a sparse one
    return list(chunks.values())
