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
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
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
_LAST_NS = 9 * 10**18  # a later time, in the year 2255, is not of a save
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
        not _is_complete(path.parent),
        f"{path.parent.name} is a checkpoint, and another one inside would be foreign to it.",
        where=f"save_checkpoint({str(path)!r})",
        remedy="Save next to it.",
        error=CheckpointError,
    )
    new = new_folder(path)
    for folder in (path, new):
        _require_removable(folder)
    if _is_complete(new) and not _is_complete(path):
        _replace(path, new)
    _remove(new)
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
        if _is_complete(new) and _is_complete(path):  # the one before is found
            os.unlink(new / INDEX)
            raise
        faults.tell(
            f"the checkpoint of {path} is complete, but its folder could not be put in place.\n"
            f"  {type(error).__name__}: {error}\n"
            f"  load_checkpoint finds it. Look into {path} and {new.name} before the next save."
        )


def found_at(path: Path) -> Path | None:
    """Returns the folder of a complete checkpoint; without one, `path` if it exists."""
    complete = _complete_at(path)
    return path if complete is None and os.path.lexists(path) else complete


def _complete_at(path: Path) -> Path | None:
    """Returns the folder of a complete checkpoint."""
    # `path` twice: between two looks a save may give the new one its name.
    folders = (path, new_folder(path), path)
    return next((folder for folder in folders if _is_complete(folder)), None)


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
    if not _is_complete(folder):
        return None
    try:
        with open(folder / INDEX, "rb") as file:
            match = _HEAD.match(file.read(_HEAD_BYTES))
    except OSError:
        return None
    return None if match is None else (match[1].decode(), int(match[2]))


def complete_in(folder: Path, *, skips_foreign: bool = False) -> list[Path]:
    """Returns the complete checkpoints in a folder of checkpoints, the newest first.

    An index of another kind does not tell its age. CheckpointError is raised for it, unless such
    checkpoints, and those with foreign files, are to be skipped.
    """
    found = []
    for path in _paths_in(folder):
        try:
            time_ns = _saved_ns_at(path)
            if skips_foreign:
                _require_removable(path)
                _require_removable(new_folder(path))
        except (CheckpointError, OSError):
            if not skips_foreign:
                raise
            continue
        if time_ns is not None:
            found.append((time_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def has_complete(folder: Path) -> bool:
    """Returns True if a folder of checkpoints has a complete one."""
    return any(_own_complete_at(path) is not None for path in _paths_in(folder))


def _paths_in(folder: Path) -> list[Path]:
    """Returns the paths in a folder of checkpoints that may have one."""
    found = folder.iterdir() if folder.is_dir() else ()
    names = {file.name.removesuffix(".new") for file in found}
    return [folder / name for name in sorted(names - {""})]


def _own_complete_at(path: Path) -> Path | None:
    """Returns the folder of a complete checkpoint, unless it is a link: it is of another folder."""
    complete = _complete_at(path)
    return None if complete is None or complete.is_symlink() else complete


def _saved_ns_at(path: Path) -> int | None:
    """Returns the time of a save, or None without a complete one; raises CheckpointError for a
    foreign index."""
    # A save may remove or rename it between finding and reading: then look once more.
    for is_last in (False, True):
        complete = _own_complete_at(path)
        if complete is None:
            return None
        head = head_of(complete)
        if head is not None:
            return head[1]
        if is_last and _is_complete(complete):
            read_index(complete)  # tells why
            raise broken(complete / INDEX, "does not begin as save_checkpoint writes it")
    return None


def latest_in(folder: Path) -> Path:
    """Returns the newest complete checkpoint in a folder of checkpoints."""
    complete = complete_in(folder)
    if not complete:
        raise CheckpointError(
            "no complete checkpoint was found.",
            where=f"in the folders in {folder.absolute()}",
            remedy="Give the folder that holds the checkpoints; every rank must see it.",
        )
    return complete[0]


def saved_ns(path: Path, now_ns: int) -> int:
    """Returns the time of a save to `path`: now, but after all others next to it, whatever clocks
    say."""
    folder = path.parent
    others = map(head_of, folder.iterdir()) if folder.is_dir() else ()
    times = [1 + head[1] for head in others if head is not None and head[1] < _LAST_NS]
    return max([now_ns, *times])


def remove_older(path: Path, keep: int) -> None:
    """Removes the complete checkpoints next to `path` except `keep` of them: `path`, which has just
    been saved, and the newest others. Folders with foreign files do not count."""
    neighbors = complete_in(path.parent, skips_foreign=True)
    older = [each for each in neighbors if each.name != path.name]
    for each in older[keep - 1 :]:
        for found in (each, new_folder(each)):
            if _is_complete(found):
                _remove(found)


def folder_for_loading(path: Path) -> Path:
    found = found_at(path)
    if found is None:
        raise CheckpointError(
            "no checkpoint was found.",
            where=str(path.absolute()),
            remedy="Look for it in another place; every rank must see it. "
            "A script that also starts without one asks has_checkpoint(path) first.",
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


def _require_removable(folder: Path) -> None:
    """Raises CheckpointError if the folder holds files that saving has not written."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    present = sorted(folder.iterdir()) if is_folder else [folder]
    for file in present:
        if is_folder and _is_place(file):
            _require_removable(file)
            continue
        require(
            _OURS.fullmatch(file.name) if is_folder else not os.path.lexists(folder),
            f"{file.name} is not part of a checkpoint, and saving there would remove it.",
            where=str(file.absolute()),
            remedy="Save to a separate path, which does not exist or holds an earlier checkpoint.",
            error=CheckpointError,
        )


def _is_complete(folder: Path) -> bool:
    return os.path.isfile(folder / INDEX)  # False too if nobody may look there


def _replace(path: Path, new: Path) -> None:
    _remove(path)
    os.rename(new, path)
    _sync(path.parent)


def _remove(folder: Path) -> None:
    if folder.exists():
        # Remove the index first: half a checkpoint must not look like a complete one.
        for file in sorted(folder.iterdir(), key=lambda file: file.name != INDEX):
            if _is_place(file):
                _remove(file)
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


class Statuses:
    """How far each rank is with a save in the background, as names of files in its folder.

        save-<token>-<rank>.writing ──> .written   its files are on the disk
                                   └──> .failed    with a text; of rank 0: the save has failed

    A rank renames its own file, which needs no room on a full disk. The file's time moves whenever
    a part of the rank's files is on the disk.
    """

    def __init__(self, folder: Path, token: str, *, rank: int) -> None:
        self.folder = folder
        self._token, self._rank = token, rank

    def begin(self) -> None:
        """Creates this rank's file. Raises OSError if the rank does not see the folder, or has no
        right to write there."""
        self._of(self._rank, "writing").touch(exist_ok=False)

    def note_progress(self) -> None:
        os.utime(self._of(self._rank, "writing"))

    def end(self, text: str = "") -> None:
        """Tells that this rank's files are written, or have failed with this text."""
        writing = self._of(self._rank, "writing")
        if text:
            with suppress(OSError):  # such as a full disk: the name tells it
                writing.write_text(text, encoding="utf-8")
        os.rename(writing, self._of(self._rank, "failed" if text else "written"))

    def fail_all(self, text: str) -> None:
        """Called on rank 0 when the save has failed on some rank, or at the end.

        A complete folder stays as it is: with one file more, no load would take it.
        """
        written, failed = self._of(0, "written"), self._of(0, "failed")
        if not failed.exists() and not _is_complete(self.folder):
            with suppress(OSError):  # such as a full disk: the name tells it
                written.write_text(text, encoding="utf-8")
            os.rename(written, failed)

    def remove(self) -> None:
        """Called on rank 0 after all have written."""
        for file in self._present("*.written"):
            file.unlink()

    def texts(self, ranks: Iterable[int]) -> dict[int, str]:
        """Returns the errors of the ranks that have failed."""
        found = {}
        for rank in ranks:
            with suppress(FileNotFoundError):
                text = self._of(rank, "failed").read_text(encoding="utf-8", errors="replace")
                found[rank] = text
        return found

    def number_written(self) -> int:
        return len(self._present("*.written"))

    def times(self) -> dict[str, int]:
        """Returns the last change of each rank's file; another result is progress."""
        found = {}
        for file in self._present("*"):
            with suppress(FileNotFoundError):  # it has just got its other name
                found[file.name] = file.stat().st_mtime_ns
        return found

    def _present(self, pattern: str) -> list[Path]:
        """Returns the files of this save; none when rank 0 has just renamed the folder."""
        try:
            return list(self.folder.glob(f"save-{self._token}-{pattern}"))
        except FileNotFoundError:
            return []

    def _of(self, rank: int, state: str) -> Path:
        return self.folder / f"save-{self._token}-{rank}.{state}"
