"""The folder of a checkpoint. A new one is written next to the old one, completed by its last file, and renamed into place.

path        the checkpoint
path.new    the next one while it is written; complete once it has `.metadata`, which torch writes last
path.old    the previous one, between the two renames:  path -> path.old,  path.new -> path

If a save is interrupted at any point, one of the three is complete.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from undertow.checkpoint.metadata import Entry, file_sizes, stored_entries
from undertow.errors import CheckpointError
from undertow.foreign import parsed_json

_HEADER, _METADATA = "undertow.json", ".metadata"
_OURS = re.compile(r"undertow\.json|\.metadata(\.tmp)?|__[0-9]+_[0-9]+\.distcp")
_FORMAT = 1
_MOST_CHARACTERS = 500  # of the reason in an error
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
        whole = _left_beside(path)
        if whole is not None:
            os.rename(whole, path)
    for folder in (new, old):
        _remove(folder)
    new.mkdir(parents=True)
    with (new / _HEADER).open("w", encoding="utf-8") as file:
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
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


def folder_for_loading(path: Path) -> Path:
    """Returns `path`, or the complete folder that an interrupted save left next to it; CheckpointError if neither exists."""
    if path.exists() or path.is_symlink():
        return path
    found = _left_beside(path)
    if found is None:
        raise CheckpointError(
            "there is no checkpoint.", where=str(path.absolute()), remedy="Look for it in another place; every rank must see it."
        )
    return found


def is_there(path: Path) -> bool:
    """Returns True if there is something to load at `path`, complete or damaged; otherwise the run has not begun."""
    return path.exists() or path.is_symlink() or _left_beside(path) is not None


def _left_beside(path: Path) -> Path | None:
    """Returns the complete folder of a save that was interrupted between its renames."""
    return next((folder for folder in _beside(path) if _is_complete(folder)), None)


def read_stored(folder: Path) -> Stored:
    """Reads everything except the tensors. CheckpointError names the file that is missing, truncated or foreign."""
    header = _header(folder / _HEADER)
    path = folder / _METADATA
    data = _read(path)
    try:
        entries = stored_entries(data)
    except Exception as error:  # arbitrary bytes can raise any exception
        raise _broken(path, f"is none that torch.distributed.checkpoint has written ({_reason(error)})") from error
    for name, size in file_sizes(entries.values()).items():
        found = _size(folder / name)
        if found != size:
            raise _broken(folder / name, f"should have {size:,} bytes, and has {found:,}")
    return Stored(folder=folder, entries=entries, optimizer=header["optimizer"], extra=header["extra"])


def broken_data(path: Path, error: Exception) -> CheckpointError:
    return _broken(path, f"cannot be read ({_reason(error)})")


def header_text(*, optimizer: str | None, extra: Any) -> str:
    """Returns the JSON stored alongside the tensors; raises ValueError or TypeError if it would not read back the same."""
    try:
        text = json.dumps({"format": _FORMAT, "optimizer": optimizer, "extra": extra})
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if parsed_json(text)["extra"] != extra:
        raise ValueError("it is read back as something else")
    return text


def _header(path: Path) -> dict[str, Any]:
    try:
        header = parsed_json(_read(path).decode("utf-8"))
    except ValueError:
        header = None
    if not isinstance(header, dict) or not {"format", "optimizer", "extra"} <= header.keys():
        raise _broken(path, "is none of ours, or cut short")
    if type(header["format"]) is not int or header["format"] != _FORMAT:
        raise _broken(path, f"is of format {brief(header['format'])}, and this version reads format {_FORMAT}")
    if not isinstance(header["optimizer"], str | None):
        raise _broken(path, "is none of ours: the name of its optimizer is not a text")
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
    stranger: Path | None = None
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        stranger = folder
    elif folder.exists():
        stranger = next((file for file in sorted(folder.iterdir()) if not _OURS.fullmatch(file.name)), None)
    if stranger is not None:
        raise CheckpointError(
            f"{stranger.name} is no part of a checkpoint, and saving there would remove it.",
            where=str(stranger.absolute()),
            remedy="Save to a path of its own, which does not exist or holds an earlier checkpoint.",
        )


def _remove(folder: Path) -> None:
    if folder.exists():
        # Remove `.metadata` first: half a checkpoint must not look like a complete one.
        for file in sorted(folder.iterdir(), key=lambda file: file.name != _METADATA):
            file.unlink()
        folder.rmdir()


def _sync(folder: Path) -> None:
    """Flushes the folder's entries to disk, if the system supports that."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
