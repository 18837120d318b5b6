"""Reads tensors and values of a checkpoint, on each rank only its own; no communication."""

from __future__ import annotations

import io
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast, final

import torch
from torch import Tensor

from undertow.checkpoint.metadata import Entry, Piece

__all__ = ["Target", "read_entries"]

Target = tuple[Sequence[int], Tensor]  # offsets in a stored tensor, and the tensor that takes its elements from there on
_Read = tuple[Entry, Piece, Sequence[Target]]


def read_entries(
    folder: Path,
    entries: Mapping[str, Entry],
    targets: Mapping[str, Sequence[Target]],
    *,
    on_error: Callable[[Path, Exception], Exception],
) -> dict[str, Any]:
    """Fills the targets of each tensor in `targets`, and returns the values by name; values have an empty list of targets.

    `on_error` makes the error for a file whose contents do not match `entries`.
    """
    values: dict[str, Any] = {}
    by_file: dict[str, list[_Read]] = defaultdict(list)
    for name, wanted in targets.items():
        for piece in entries[name].pieces:
            by_file[piece.file].append((entries[name], piece, wanted))
    for file, reads in sorted(by_file.items()):
        try:
            with (folder / file).open("rb") as stream:
                for entry, piece, wanted in sorted(reads, key=lambda read: read[1].start):
                    _read(stream, entry, piece, wanted, values)
        except Exception as error:  # arbitrary bytes can raise any exception
            raise on_error(folder / file, error) from error
    return values


def _read(stream: BinaryIO, entry: Entry, piece: Piece, targets: Sequence[Target], values: dict[str, Any]) -> None:
    if entry.dtype is None:
        values[entry.name] = _loaded(stream, piece)
        return
    overlaps = [(target, common) for target in targets if (common := _common(piece, target)) is not None]
    if not overlaps:
        return
    stored = _loaded(stream, piece)
    is_tensor = type(stored) is Tensor and stored.layout is torch.strided and stored.device.type == "cpu"
    if not is_tensor or stored.dtype != entry.dtype or stored.shape != torch.Size(piece.sizes):
        raise ValueError(f"{entry.name!r} is not a tensor of {entry.dtype} and of shape {piece.sizes}")
    for (offsets, values_there), common in overlaps:
        _narrowed(values_there.detach(), offsets, common).copy_(_narrowed(stored, piece.offsets, common))


def _loaded(stream: BinaryIO, piece: Piece) -> Any:
    """Loads the output of torch.save: an archive in the current format, without compression."""
    with zipfile.ZipFile(_Part(stream, piece)) as archive:
        members = archive.infolist()
    if any(it.compress_type != zipfile.ZIP_STORED for it in members) or sum(it.file_size for it in members) > piece.num_bytes:
        raise ValueError("it is compressed")
    return torch.load(cast("BinaryIO", _Part(stream, piece)), map_location="cpu", weights_only=True, mmap=False)


@final
class _Part(io.RawIOBase):
    """The bytes of a piece as a file, because a second copy of a large tensor may not fit in memory."""

    def __init__(self, stream: BinaryIO, piece: Piece) -> None:
        self._stream = stream
        self._start, self._size, self._place = piece.start, piece.num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        if begin + offset < 0:
            raise ValueError("it ends before its end")
        self._place = begin + offset
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        room = memoryview(buffer).cast("B")[: max(0, self._size - self._place)]
        self._stream.seek(self._start + self._place)
        found: int = self._stream.readinto(room)  # type: ignore[attr-defined]  # a file opened for reading
        self._place += found
        return found


def _common(piece: Piece, target: Target) -> list[range] | None:
    """Returns the range of indices that the two share in each dimension, or None if they do not overlap."""
    offsets, tensor = target
    common = [
        range(max(mine, theirs), min(mine + size, theirs + length))
        for mine, size, theirs, length in zip(piece.offsets, piece.sizes, offsets, tensor.shape, strict=True)
    ]
    return common if all(common) else None


def _narrowed(tensor: Tensor, offsets: Sequence[int], common: Sequence[range]) -> Tensor:
    for dim, indices in enumerate(common):
        tensor = tensor.narrow(dim, indices.start - offsets[dim], len(indices))
    return tensor
