"""The limit of open files, which connections count towards: a named error instead of a broken
connection."""

import os

from undertow.errors import require

_SPARE = 16  # for files that other code opens meanwhile
_OPEN_FILES = "/proc/self/fd"


def require_descriptors(num_ranks: int, *, rank: int) -> None:
    """Raises ConfigError if this process may not open a connection to each other rank."""
    limit, num_open = limit_of_descriptors(), num_open_descriptors()
    needed = num_ranks - 1
    if limit is None:
        return
    enough = 1 << (num_open + 4 * num_ranks + _SPARE).bit_length()
    require(
        num_open + needed + _SPARE <= limit,
        f"a process group of {num_ranks} ranks needs {needed} connections in each process, and "
        f"this process may open {limit} files, of which {num_open} are open.",
        where=f"the making of a process group, rank {rank}",
        remedy=f"Raise the limit in the shell that starts the ranks, on every node: "
        f"`ulimit -n {enough}`.",
    )


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
