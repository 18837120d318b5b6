"""The folder of a checkpoint. A new one is written next to the old one, completed by its last file, and renamed into place.

path        the checkpoint
path.new    the next one while it is written; complete once it has `.metadata`, which torch writes last
path.old    the previous one, between the two renames:  path -> path.old,  path.new -> path

If a save is interrupted at any point, one of the three is complete.
"""

import contextlib
import io
import json
import os
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from reprlib import repr as brief
from typing import Any, BinaryIO, cast, final

import torch
from torch import Tensor

from undertow.checkpoint.metadata import Entry, Piece, file_sizes, stored_entries
from undertow.errors import CheckpointError
from undertow.foreign import parsed_json

_HEADER, _METADATA = "undertow.json", ".metadata"
_OURS = re.compile(r"undertow\.json|\.metadata(\.tmp)?|__[0-9]+_[0-9]+\.distcp")
_FORMAT = 1
_MOST_CHARACTERS = 500  # of the reason in an error
Target = tuple[Sequence[int], Tensor]  # offsets in a stored tensor, and the tensor that takes its elements from there on
_MOST_BYTES = 1 << 30  # limit for files that are read as a whole; the metadata of a million tensors takes a sixth of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint whose files all exist and have the right sizes."""

    folder: Path
    entries: Mapping[str, Entry]  # the tensors and values, and their places in the files
    optimizer: str | None  # the name of its class
    extra: Any


def folder_for_saving(path: Path, *, header: str) -> Path:
    """Creates a new folder next to `path` with `header_text` in it, and removes the remains of an interrupted save.

    Raises CheckpointError if `path` is something other than a checkpoint, because it would be replaced.
    """
    new, old = _beside(path)
    for folder in (path, new, old):
        _require_ours(folder)
    if not _is_complete(path):
        _remove(path)
        whole = found_at(path)
        if whole is not None:
            os.rename(whole, path)
    for folder in (new, old):
        _remove(folder)
    new.mkdir(parents=True)
    (new / _HEADER).write_text(header, encoding="utf-8")
    _sync(new / _HEADER)
    return new


def put_in_place(path: Path) -> None:
    """Renames the folder written next to `path` to `path`."""
    new, old = _beside(path)
    _sync(new)
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    _sync(path.parent)
    _remove(old)


def found_at(path: Path) -> Path | None:
    """Returns `path`, damaged or not, or the complete folder that an interrupted save left next to it, or None."""
    is_there = path.exists() or path.is_symlink()
    return path if is_there else next((folder for folder in _beside(path) if _is_complete(folder)), None)


def folder_for_loading(path: Path) -> Path:
    """Returns the folder to load; raises CheckpointError if the path has no checkpoint."""
    found = found_at(path)
    if found is None:
        raise CheckpointError(
            "there is no checkpoint.", where=str(path.absolute()), remedy="Look for it in another place; every rank must see it."
        )
    return found


def read_stored(folder: Path) -> Stored:
    """Reads everything except the tensors. CheckpointError names the file that is missing, truncated or foreign."""
    header = _header(folder / _HEADER)
    path = folder / _METADATA
    data = _read(path)
    try:
        entries = stored_entries(data)
    except Exception as error:  # arbitrary bytes can raise any exception
        raise _broken(path, f"was not written by torch.distributed.checkpoint ({_reason(error)})") from error
    for name, size in file_sizes(entries.values()).items():
        found = _size(folder / name)
        if found != size:
            raise _broken(folder / name, f"should have {size:,} bytes, and has {found:,}")
    return Stored(folder=folder, entries=entries, optimizer=header["optimizer"], extra=header["extra"])


def read_entries(folder: Path, entries: Mapping[str, Entry], targets: Mapping[str, Sequence[Target]]) -> dict[str, Any]:
    """Fills the targets of each tensor in `targets`, and returns the values by name; values have an empty list of targets.

    Raises CheckpointError if the contents of a file do not match `entries`.
    """
    values: dict[str, Any] = {}
    reads = sorted(((it.file, it.start, name, it) for name in targets for it in entries[name].pieces), key=lambda read: read[:3])
    for file, of_file in groupby(reads, key=itemgetter(0)):
        try:
            with (folder / file).open("rb") as stream:
                for _, _, name, piece in of_file:
                    if entries[name].dtype is None:
                        values[name] = _loaded(stream, piece)
                    else:
                        _read_tensor(stream, entries[name], piece, targets[name])
        except Exception as error:  # arbitrary bytes can raise any exception
            raise _broken(folder / file, f"cannot be read ({_reason(error)})") from error
    return values


def header_text(*, optimizer: str | None, extra: Any) -> str:
    """Returns the JSON stored alongside the tensors; raises CheckpointError if it would not read back the same."""
    header = {"format": _FORMAT, "optimizer": optimizer, "extra": extra}
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        text = json.dumps(header)
        if parsed_json(text) == header:
            return text
    raise CheckpointError(
        f"extra does not survive being written as JSON: {brief(extra)}.",
        where="save_checkpoint(extra=...)",
        remedy="Give numbers, strings, lists and dicts with strings as keys.",
    )


def _header(path: Path) -> dict[str, Any]:
    try:
        header = parsed_json(_read(path))
    except ValueError:
        header = None
    if not isinstance(header, dict) or not {"format", "optimizer", "extra"} <= header.keys():
        raise _broken(path, "is not Undertow's, or is cut short")
    if type(header["format"]) is not int or header["format"] != _FORMAT:
        raise _broken(path, f"is of format {brief(header['format'])}, and this version reads format {_FORMAT}")
    if not isinstance(header["optimizer"], str | None):
        raise _broken(path, "is not Undertow's: the name of its optimizer is not a text")
    return header


def _read(path: Path) -> bytes:
    size = _size(path)
    if size > _MOST_BYTES:
        raise _broken(path, f"has {size:,} bytes, more than any such file")
    return path.read_bytes()


def _size(path: Path) -> int:
    """Returns the size of a regular file: a link may lead out of the folder, and opening a pipe can block forever."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise _broken(path, "is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise _broken(path, "is not a regular file")
    return found.st_size


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:_MOST_CHARACTERS]}"


def _broken(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint cannot be loaded: {path.name} {how}.",
        where=str(path.absolute()),
        remedy="Load another checkpoint; save_checkpoint() writes a new one whole, and replaces the one before only then.",
    )


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.new"), path.with_name(f"{path.name}.old")


def _is_complete(folder: Path) -> bool:
    return (folder / _METADATA).is_file()


def _require_ours(folder: Path) -> None:
    """Raises CheckpointError if the folder holds foreign files: they are never moved or removed."""
    is_foreign = folder.is_symlink() or (folder.exists() and not folder.is_dir())
    present = [folder] if is_foreign else sorted(folder.iterdir()) if folder.exists() else []
    stranger = next((file for file in present if is_foreign or not _OURS.fullmatch(file.name)), None)
    if stranger is not None:
        raise CheckpointError(
            f"{stranger.name} is not part of a checkpoint, and saving there would remove it.",
            where=str(stranger.absolute()),
            remedy="Save to a separate path, which does not exist or holds an earlier checkpoint.",
        )


def _remove(folder: Path) -> None:
    if folder.exists():
        # Remove `.metadata` first: half a checkpoint must not look like a complete one.
        for file in sorted(folder.iterdir(), key=lambda file: file.name != _METADATA):
            file.unlink()
        folder.rmdir()


def _sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk if the system supports that."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_tensor(stream: BinaryIO, entry: Entry, piece: Piece, targets: Sequence[Target]) -> None:
    """Copies the elements that a piece and the targets share; reads nothing if they share none."""
    overlaps = [(target, common) for target in targets if (common := _common(piece, target)) is not None]
    if not overlaps:
        return
    stored = _loaded(stream, piece)
    is_tensor = type(stored) is Tensor and stored.layout is torch.strided and stored.device.type == "cpu"
    if not is_tensor or stored.dtype != entry.dtype or stored.shape != torch.Size(piece.sizes):
        raise ValueError(f"{entry.name!r} is not a tensor of {entry.dtype} and of shape {piece.sizes}")
    for (offsets, values_there), common in overlaps:
        _box(values_there.detach(), offsets, common).copy_(_box(stored, piece.offsets, common))


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
        self._stream, self._start, self._size, self._place = stream, piece.start, piece.num_bytes, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        if begin + offset < 0:
            raise ValueError("it is cut short")
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


def _box(tensor: Tensor, offsets: Sequence[int], common: Sequence[range]) -> Tensor:
    return tensor[tuple(slice(it.start - offset, it.stop - offset) for it, offset in zip(common, offsets, strict=True))]
