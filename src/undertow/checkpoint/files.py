"""The folder of a checkpoint. A new one is written next to the old one, and renamed into place.

path                            the checkpoint
    model.safetensors           the module's tensors, whole
    optimizer-<n>.safetensors   tensors of the optimizer's state, from rank n
    replica-<n>.safetensors     with outer synchronization: the tensors of replica n
    outer.safetensors           the global values and the momentum of outer synchronization
    undertow.json               the index. It is written last, so a folder that has it is complete
path.new                        the next checkpoint while it is written; `path` is removed only then
    save-<token>-<n>.writing    of a save in the background: how far rank n is (`Statuses`)

Beside tensor parallelism, a folder `place-<n>` for each place of the axes over which parameters are
cut has all of these files except the index.

If a save is interrupted at any point, one of the two folders is complete.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from safetensors import safe_open
from torch import Tensor

from undertow.checkpoint.index import why_not_an_index
from undertow.checkpoint.tensors import Progress, write_safetensors
from undertow.errors import CheckpointError, require
from undertow.foreign import MOST_LEVELS, parsed_json
from undertow.ranks import faults

MODEL = "model.safetensors"
OUTER = "outer.safetensors"
INDEX = "undertow.json"
_FORMAT = 4
_OURS = re.compile(
    r"undertow\.json(\.tmp)?|(model|outer|(optimizer|replica)-[0-9]+)\.safetensors"
    r"|save-[0-9a-f]+-[0-9]+\.(writing|written|failed)",
)
_PLACE = re.compile(r"place-(0|[1-9][0-9]{0,8})")
_HEAD = re.compile(
    rb'\{"format": %d, "save": "([0-9a-f]+)", "saved_ns": ([0-9]{1,19})[,}]' % _FORMAT
)
_HEAD_BYTES = 128  # of an index, which are read to tell saves apart
_MOST_BYTES = 1 << 28  # of the index, which is read as a whole
_LEVELS = MOST_LEVELS - 5  # of a value in the index, which nests it further


def optimizer_file(number: int) -> str:
    return f"optimizer-{number}.safetensors"


def replica_file(number: int) -> str:
    return f"replica-{number}.safetensors"


def at_place(number: int, name: str = "") -> str:
    """Returns the path of a file of one place of a mesh, or of its folder."""
    return f"place-{number}/{name}".rstrip("/")


def new_folder(path: Path) -> Path:
    """Returns the folder in which the next checkpoint of `path` is written."""
    return path.with_name(f"{path.name}.new")


def path_of(new: Path) -> Path:
    """Returns the path of the checkpoint that is written in the folder `new`."""
    return new.with_name(new.name.removesuffix(".new"))


def folder_for_saving(path: Path, *, num_places: int = 0) -> Path:
    """Creates an empty folder next to `path`, on a mesh with folders for its places; first ends a
    save that was interrupted.

    Raises CheckpointError if a folder holds foreign files, because saving would remove them.
    """
    require(
        not path.name.endswith(".new"),
        f"{path.name} cannot be the name of a checkpoint: .new marks an incomplete one.",
        where=f"save_checkpoint({str(path)!r})",
        remedy="Save to a path that does not end in .new.",
        error=CheckpointError,
    )
    require(
        not is_complete(path.parent),
        f"{path.parent.name} is a checkpoint, and another one inside would be foreign to it.",
        where=f"save_checkpoint({str(path)!r})",
        remedy="Save next to it.",
        error=CheckpointError,
    )
    new = new_folder(path)
    for folder in (path, new):
        require_removable(folder)
    if is_complete(new) and not is_complete(path):
        _replace(path, new)
    remove(new)
    new.mkdir(parents=True)
    for number in range(num_places):
        (new / at_place(number)).mkdir()
    return new


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, str],
    *,
    note: Progress = lambda _num_bytes: None,
) -> None:
    """Writes a safetensors file, with `texts` as its metadata, and flushes it to disk.

    `note` is called with the number of bytes of each part that is on the disk.
    """
    write_safetensors(path, tensors, {"format": "pt", **texts}, note=note)


def put_in_place(path: Path, index: str) -> None:
    """Completes the folder next to `path` with its index, and replaces `path` by it.

    An error after which the new checkpoint is the one that is found is told, and not raised.
    """
    new = new_folder(path)
    unnamed = new / f"{INDEX}.tmp"
    unnamed.write_text(index, encoding="utf-8")
    _sync(unnamed)
    for place in _places_in(new):
        _sync(place)
    os.rename(unnamed, new / INDEX)
    _sync(new)
    try:
        _replace(path, new)
    except OSError as error:
        if is_complete(new) and is_complete(path):  # the one before is found
            os.unlink(new / INDEX)
            raise
        faults.tell(
            f"the checkpoint of {path} is complete, but its folder could not be put in place.\n"
            f"  {type(error).__name__}: {error}\n"
            f"  load_checkpoint finds it. Look into {path} and {new.name} before the next save."
        )


def found_at(path: Path) -> Path | None:
    """Returns the folder of a complete checkpoint; without one, `path` if it exists."""
    complete = complete_at(path)
    return path if complete is None and os.path.lexists(path) else complete


def complete_at(path: Path) -> Path | None:
    """Returns the folder of a complete checkpoint."""
    # `path` twice: between two looks a save may give the new one its name.
    folders = (path, new_folder(path), path)
    return next((folder for folder in folders if is_complete(folder)), None)


def index_text(token: str, saved_ns: int, fields: Mapping[str, object]) -> str:
    """Returns the text of an index; `token` tells this save from all others."""
    text = json_text({"format": _FORMAT, "save": token, "saved_ns": saved_ns, **fields})
    require(
        len(text) <= _MOST_BYTES,
        f"extra and the names of parameters take {len(text):,} bytes as JSON, more than an index "
        "may have.",
        where="save_checkpoint",
        remedy="Save large values in separate files.",
        error=CheckpointError,
    )
    return text


def json_text(fields: Mapping[str, object]) -> str:
    return json.dumps(fields, default=Tensor.item)  # of a learning rate


def is_of_save(path: Path, token: str) -> bool:
    """Returns True if the checkpoint at `path` is complete and of this save."""
    head = head_of(path)
    return head is not None and head[0] == token


def head_of(folder: Path) -> tuple[str, int] | None:
    """Returns the token and the time of a save by the start of its index; None if it has none."""
    if not is_complete(folder):
        return None
    try:
        with open(folder / INDEX, "rb") as file:
            match = _HEAD.match(file.read(_HEAD_BYTES))
    except OSError:
        return None
    return None if match is None else (match[1].decode(), int(match[2]))


def folder_for_loading(path: Path) -> Path:
    found = found_at(path)
    if found is None:
        raise CheckpointError(
            "no checkpoint was found.",
            where=str(path.absolute()),
            remedy="Look for it in another place; every rank must see it. "
            "If the script may start without one, ask has_checkpoint(path) first.",
        )
    return found


def read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
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
    how = why_not_an_index(index)
    if how:
        raise broken(path, how)
    return index


def require_no_others(folder: Path, index: Mapping[str, Any]) -> None:
    """Raises CheckpointError if the folder, or the folder of a place, has a file that the index
    does not name."""
    if "places" in index:
        places = {at_place(number): of for number, of in enumerate(index["places"])}
        _require_only({INDEX, *places}, folder)
        for name, of_place in places.items():
            require_folder(folder / name)
            require_no_others(folder / name, of_place)
        return
    known = {MODEL, *index["files"], *([INDEX] if "save" in index else [])}
    if "outer" in index:
        known |= {OUTER, *map(replica_file, range(index["num_replicas"]))}
    _require_only(known, folder)


def _require_only(known: Collection[str], folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        if file.name not in known:
            raise broken(file, "belongs to no entry of undertow.json")


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
        remedy="Load another checkpoint. A save that was interrupted leaves the previous one as "
        "it was.",
    )


def require_folder(path: Path) -> None:
    """Raises CheckpointError unless this is a folder; a link to one may lead out."""
    if path.is_symlink() or not path.is_dir():
        raise broken(path, "is not a folder" if os.path.lexists(path) else "is missing")


def _require_regular(path: Path) -> None:
    # A link may lead out of the folder, and opening a pipe can block forever.
    if path.is_symlink() or not path.is_file():
        raise broken(path, "is not a regular file" if os.path.lexists(path) else "is missing")


def require_removable(folder: Path) -> None:
    """Raises CheckpointError if the folder holds files that saving has not written."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    present = sorted(folder.iterdir()) if is_folder else [folder]
    for file in present:
        if is_folder and _is_place(file):
            require_removable(file)
            continue
        require(
            _OURS.fullmatch(file.name) if is_folder else not os.path.lexists(folder),
            f"{file.name} is not part of a checkpoint, and saving there would remove it.",
            where=str(file.absolute()),
            remedy="Save to a separate path, which does not exist or holds an earlier checkpoint.",
            error=CheckpointError,
        )


def is_complete(folder: Path) -> bool:
    return os.path.isfile(folder / INDEX)  # False too if nobody may look there


def _replace(path: Path, new: Path) -> None:
    remove(path)
    os.rename(new, path)
    _sync(path.parent)


def remove(folder: Path) -> None:
    if folder.exists():
        # Remove the index first: half a checkpoint must not look like a complete one.
        for file in sorted(folder.iterdir(), key=lambda file: file.name != INDEX):
            if _is_place(file):
                remove(file)
            else:
                file.unlink()
        folder.rmdir()


def _is_place(path: Path) -> bool:
    """Returns True for the folder of a place of a mesh."""
    is_named = _PLACE.fullmatch(path.name) is not None
    return is_named and path.is_dir() and not path.is_symlink()


def _places_in(folder: Path) -> list[Path]:
    return list(filter(_is_place, folder.iterdir()))


def _sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
