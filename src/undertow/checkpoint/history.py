"""The checkpoints that lie in one folder: which are complete, in which order they were saved, and
which are removed.

Their order is the time in the index, because times of files change when they are copied.
"""

from pathlib import Path

from undertow.checkpoint import files
from undertow.errors import CheckpointError

_LAST_NS = 9 * 10**18  # a later time, in the year 2255, is not of a save


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
                files.require_removable(path)
                files.require_removable(files.new_folder(path))
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
    complete = files.complete_at(path)
    return None if complete is None or complete.is_symlink() else complete


def _saved_ns_at(path: Path) -> int | None:
    """Returns the time of a save, or None without a complete one; raises CheckpointError for a
    foreign index."""
    # A save may remove or rename it between finding and reading: then look once more.
    for is_last in (False, True):
        complete = _own_complete_at(path)
        if complete is None:
            return None
        head = files.head_of(complete)
        if head is not None:
            return head[1]
        if is_last and files.is_complete(complete):
            files.read_index(complete)  # tells why
            raise files.broken(
                complete / files.INDEX, "does not begin as save_checkpoint writes it"
            )
    return None


def latest_in(folder: Path) -> Path:
    """Returns the newest complete checkpoint in a folder of checkpoints."""
    complete = complete_in(folder)
    if not complete:
        raise CheckpointError(
            "no complete checkpoint was found.",
            where=f"in the folders in {folder.absolute()}",
            remedy="Give the folder that holds the checkpoints; every rank must see it. "
            'If the script may start without one, ask has_checkpoint(path, "latest") first.',
        )
    return complete[0]


def saved_ns(path: Path, now_ns: int) -> int:
    """Returns the time of a save to `path`: now, but after all others next to it, whatever clocks
    say."""
    folder = path.parent
    others = map(files.head_of, folder.iterdir()) if folder.is_dir() else ()
    times = [1 + head[1] for head in others if head is not None and head[1] < _LAST_NS]
    return max([now_ns, *times])


def remove_older(path: Path, keep: int) -> None:
    """Removes the complete checkpoints next to `path` except `keep` of them: `path`, which has just
    been saved, and the newest others. Folders with foreign files do not count."""
    neighbors = complete_in(path.parent, skips_foreign=True)
    older = [each for each in neighbors if each.name != path.name]
    for each in older[keep - 1 :]:
        for found in (each, files.new_folder(each)):
            if files.is_complete(found):
                files.remove(found)
