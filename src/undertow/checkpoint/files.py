"""The folder of a checkpoint. A new one is written next to the old one, and renamed into place.

path                            the checkpoint
    model.safetensors           the module's tensors, whole
    optimizer-<n>.safetensors   tensors of the optimizer's state, from rank n
    replica-<n>.safetensors     with outer synchronization: the tensors of replica n
    outer.safetensors           the global values and the momentum of outer synchronization
    undertow.json               the index. It is written last, so a folder that has it is complete
path.new                        the next checkpoint while it is written; `path` is removed only then

If a save is interrupted at any point, one of the two folders is complete.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from undertow.errors import CheckpointError, require
from undertow.foreign import MOST_LEVELS, parsed_json

MODEL = "model.safetensors"
OUTER = "outer.safetensors"
_INDEX = "undertow.json"
_FORMAT = 3
_OURS = re.compile(
    r"undertow\.json(\.tmp)?|(model|outer|(optimizer|replica)-[0-9]+)\.safetensors"
    r"|\.tmp[A-Za-z0-9]+",  # of safetensors, while it writes
)
_MOST_BYTES = 1 << 28  # of the index, which is read as a whole
_LEVELS = MOST_LEVELS - 5  # of a value in the index, which nests it further
_NOT_STORED = (torch.complex32, torch.complex128)  # safetensors has no names for them


def optimizer_file(folder: Path, number: int) -> Path:
    return folder / f"optimizer-{number}.safetensors"


def replica_file(number: int) -> str:
    return f"replica-{number}.safetensors"


def folder_for_saving(path: Path) -> Path:
    """Creates an empty folder next to `path`; first ends a save that was interrupted.

    Raises CheckpointError if a folder holds foreign files, because saving would remove them.
    """
    new = _new(path)
    for folder in (path, new):
        is_folder = folder.is_dir() and not folder.is_symlink()
        present = sorted(folder.iterdir()) if is_folder else [folder]
        for file in present:
            require(
                _OURS.fullmatch(file.name) if is_folder else not os.path.lexists(folder),
                f"{file.name} is not part of a checkpoint, and saving there would remove it.",
                where=str(file.absolute()),
                remedy="Save to a separate path, which does not exist or holds an earlier "
                "checkpoint.",
                error=CheckpointError,
            )
    if _is_complete(new) and not _is_complete(path):
        _replace(path, new)
    _remove(new)
    new.mkdir(parents=True)
    return new


def write_tensors(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Writes a safetensors file, with `texts` as its metadata, and flushes it to disk."""
    stored: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        require(
            tensor.layout is torch.strided and tensor.dtype not in _NOT_STORED,
            f"{name!r} is of {tensor.dtype} and {tensor.layout}, which safetensors files do not "
            "hold.",
            where="save_checkpoint",
            remedy="Convert it, or save model.state_dict() and optimizer.state_dict() by "
            "torch.save().",
            error=CheckpointError,
        )
        storage = tensor.untyped_storage()
        shares_memory = storage.nbytes() > tensor.nbytes or storage.data_ptr() in storages
        storages.add(storage.data_ptr())
        # safetensors refuses tensors that share memory.
        stored[name] = (tensor.clone() if shares_memory else tensor).contiguous()
    save_file(stored, path, metadata={"format": "pt", **texts})
    _sync(path)


def put_in_place(path: Path, index: str) -> None:
    """Completes the folder next to `path` with its index, and replaces `path` by it."""
    new = _new(path)
    unnamed = new / f"{_INDEX}.tmp"
    unnamed.write_text(index, encoding="utf-8")
    for file in new.iterdir():  # safetensors lets only the owner read its files
        file.chmod(unnamed.stat().st_mode)
    _sync(unnamed)
    os.rename(unnamed, new / _INDEX)
    _sync(new)
    _replace(path, new)


def found_at(path: Path) -> Path | None:
    """Returns the folder of a complete checkpoint; without one, `path` if it exists."""
    complete = [folder for folder in (path, _new(path)) if _is_complete(folder)]
    if not complete and os.path.lexists(path):
        return path
    return complete[0] if complete else None


def index_text(fields: Mapping[str, object]) -> str:
    text = json.dumps({"format": _FORMAT, **fields}, default=Tensor.item)  # of a learning rate
    require(
        len(text) <= _MOST_BYTES,
        f"extra and the names of parameters take {len(text):,} bytes as JSON, more than an index "
        "may have.",
        where="save_checkpoint",
        remedy="Save large values in separate files.",
        error=CheckpointError,
    )
    return text


def folder_for_loading(path: Path) -> Path:
    found = found_at(path)
    if found is None:
        raise CheckpointError(
            "no checkpoint was found.",
            where=str(path.absolute()),
            remedy="Look for it in another place; every rank must see it.",
        )
    return found


def read_index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    _require_regular(path)
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise broken(path, f"has {size:,} bytes, more than any index")
    try:
        index: dict[str, Any] = {"extra": None, **parsed_json(path.read_bytes())}
    except (TypeError, ValueError):
        raise broken(path, "is not Undertow's, or is cut short") from None
    version = index.get("format")
    if version != _FORMAT:
        raise broken(
            path, f"is of format {brief(version)}, and this version reads format {_FORMAT}"
        )
    return index


def open_tensors(path: Path) -> Any:
    """Opens a safetensors file; tensors are read only when they are used.

    safetensors checks that each byte of the file belongs to one tensor.
    """
    _require_regular(path)
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # arbitrary bytes can raise any exception
        raise broken(path, f"cannot be read ({type(error).__name__}: {error})") from error


def require_json(value: object, place: str, *, num_levels: int = _LEVELS) -> None:
    """Raises CheckpointError, naming the place, unless JSON gives the value back as it is."""
    parts: dict[Any, object] = {}
    is_right = isinstance(value, str | int | float | None)
    if num_levels and isinstance(value, list | dict):
        parts = value if isinstance(value, dict) else dict(enumerate(value))
        is_right = isinstance(value, list) or all(isinstance(key, str) for key in parts)
    require(
        is_right,
        f"{place} cannot be stored as JSON: {brief(value)}.",
        where="save_checkpoint",
        remedy="Give numbers, strings, lists and dicts with strings as keys.",
        error=CheckpointError,
    )
    for key, part in parts.items():
        require_json(part, f"{place}[{key!r}]", num_levels=num_levels - 1)


def broken(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint cannot be loaded: {path.name} {how}.",
        where=str(path.absolute()),
        remedy="Load another checkpoint; save_checkpoint() writes a new one whole, and replaces "
        "the one before only then.",
    )


def _require_regular(path: Path) -> None:
    # A link may lead out of the folder, and opening a pipe can block forever.
    if path.is_symlink() or not path.is_file():
        raise broken(path, "is not a regular file" if os.path.lexists(path) else "is missing")


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _is_complete(folder: Path) -> bool:
    return (folder / _INDEX).is_file()


def _replace(path: Path, new: Path) -> None:
    _remove(path)
    os.rename(new, path)
    _sync(path.parent)


def _remove(folder: Path) -> None:
    if folder.exists():
        # Remove the index first: half a checkpoint must not look like a complete one.
        for file in sorted(folder.iterdir(), key=lambda file: file.name != _INDEX):
            file.unlink()
        folder.rmdir()


def _sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
