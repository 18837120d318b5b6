"""The limit of open files, which connections count towards: a named error instead of a broken
connection."""

import os

from undertow.shown import counted

_SPARE = 16  # for files that other code opens meanwhile
_OPEN_FILES = "/proc/self/fd"
_LAZY, _YES = "TORCH_GLOO_LAZY_INIT", ("y", "yes", "1", "t", "true")  # as torch reads it


def why_too_few(num_ranks: int, *, rank: int) -> str:
    """Returns why this process may not open a connection to each other rank, and a remedy in a
    second line; an empty text if it may.

    If gloo connects two ranks with their first message only, nothing is known before: an empty
    text.
    """
    limit, num_open = limit_of_descriptors(), num_open_descriptors()
    needed = num_ranks - 1
    if limit is None or num_open + needed + _SPARE <= limit or connects_late():
        return ""
    enough = 1 << (num_open + 4 * num_ranks + _SPARE).bit_length()
    return (
        f"rank {rank} may open {limit} files, of which {num_open} are open, and a process group of "
        f"{num_ranks} ranks needs {counted(needed, 'connection')} in each process.\n"
        "Raise the limit in the shell that starts the ranks, on every node: "
        f"`ulimit -n {enough}`."
    )


def connects_late() -> bool:
    """Returns True if torch makes new groups of gloo connect ranks with their first message."""
    return os.environ.get(_LAZY, "").lower() in _YES


def limit_of_descriptors() -> int | None:
    """Returns how many files this process may open, or None if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def num_open_descriptors() -> int:
    """Returns how many files this process has open; 0 if the system does not tell."""
    try:
        return len(os.listdir(_OPEN_FILES))
    except OSError:
        return 0
