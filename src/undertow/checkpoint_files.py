"""The folder of a checkpoint: written beside the one before, complete with its last file, and renamed into its place.

path        the checkpoint
path.new    the next one while it is written; complete once it has `.metadata`, which torch writes last
path.old    the one before, between the two renames:  path -> path.old,  path.new -> path

Whenever a save ends early, one of the three is complete.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.errors import CheckpointError
from undertow.runtime import private_checkpoint

_HEADER, _METADATA = "undertow.json", ".metadata"
_OURS = re.compile(r"undertow\.json|\.metadata(\.tmp)?|__\d+_\d+\.distcp")
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint whose files are all there, of the sizes that they should have."""

    folder: Path
    metadata: Any  # torch's, which says what tensors there are and where
    optimizer: str | None  # the name of its class
    extra: Any


def folder_for_saving(path: Path, *, optimizer: str | None, extra: Any) -> Path:
    """A new folder beside `path`, with our part of a checkpoint in it; what an interrupted save has left there is gone.

    CheckpointError where `path` is something else than a checkpoint: it would be replaced.
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
    with (new / _HEADER).open("w", encoding="utf-8") as header:
        json.dump({"format": _FORMAT, "optimizer": optimizer, "extra": extra}, header)
        header.flush()
        os.fsync(header.fileno())
    return new


def put_in_place(path: Path) -> None:
    """What was written beside `path` becomes the checkpoint."""
    new, old = _beside(path)
    _sync(new)
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    _sync(path.parent)
    _remove(old)


def folder_for_loading(path: Path) -> Path:
    """`path`, or what a save that was interrupted between its renames has left in its stead. CheckpointError."""
    if path.exists() or path.is_symlink():
        return path
    found = _left_beside(path)
    if found is None:
        raise CheckpointError(
            "there is no checkpoint.", where=str(path.absolute()), remedy="Look for it in another place; every rank must see it."
        )
    return found


def is_there(path: Path) -> bool:
    """Whether there is something to load at `path`, whole or not: nothing else counts as a run that has not begun."""
    return path.exists() or path.is_symlink() or _left_beside(path) is not None


def _left_beside(path: Path) -> Path | None:
    """What a save that was interrupted between its renames has left whole."""
    return next((folder for folder in _beside(path) if _is_complete(folder)), None)


def read_stored(folder: Path) -> Stored:
    """Everything but the tensors. CheckpointError, which names the file, where one is missing, cut short or not ours."""
    header = _header(folder / _HEADER)
    path = folder / _METADATA
    try:
        metadata = private_checkpoint.read_checkpoint_metadata(path)
        sizes = private_checkpoint.sizes_in_checkpoint(metadata)
    except FileNotFoundError:
        raise _broken(path, "is missing") from None
    except Exception as error:  # whatever bytes that mean something else lead to
        raise _broken(path, f"is none that torch.distributed.checkpoint has written ({type(error).__name__}: {error})") from None
    for name, size in sizes.items():
        _require_size(folder / name, size)
    return Stored(folder=folder, metadata=metadata, optimizer=header["optimizer"], extra=header["extra"])


def broken_data(path: Path, error: Exception) -> CheckpointError:
    return _broken(path, f"cannot be read ({type(error).__name__}: {error})")


def _header(path: Path) -> dict[str, Any]:
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise _broken(path, "is missing") from None
    except ValueError:
        header = None
    if not isinstance(header, dict) or not {"format", "optimizer", "extra"} <= header.keys():
        raise _broken(path, "is none of ours, or cut short")
    if header["format"] != _FORMAT:
        raise _broken(path, f"is of format {header['format']}, and this version reads format {_FORMAT}")
    return header


def _require_size(path: Path, size: int) -> None:
    if Path(path.name) != path.relative_to(path.parent) or not _OURS.fullmatch(path.name):
        raise _broken(path, "is not a file of this checkpoint")
    if not path.is_file():
        raise _broken(path, "is missing")
    found = path.stat().st_size
    if found != size:
        raise _broken(path, f"should have {size:,} bytes, and has {found:,}")


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
    """Nothing of anybody else's is ever moved or removed."""
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
        # Last what makes it complete would be wrong: half a checkpoint must not look like a whole one.
        for file in sorted(folder.iterdir(), key=lambda file: file.name != _METADATA):
            file.unlink()
        folder.rmdir()


def _sync(folder: Path) -> None:
    """Has the folder's entries on the disk, in so far as the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
