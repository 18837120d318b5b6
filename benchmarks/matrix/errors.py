"""What can go wrong in the matrix, as text for whoever started it.

MatrixError
├── UnknownName    a workload, system or link that does not exist
├── NoNamespaces   this machine or user cannot make shaped links
└── RankFailed     a rank died or fell silent; carries the last lines of its log
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class MatrixError(Exception):
    """Base of all errors of the matrix."""


class UnknownName(MatrixError):
    """A name that is in no list; the text has the list."""


class NoNamespaces(MatrixError):
    """Network namespaces cannot be made here; the text says what is missing."""


class RankFailed(MatrixError):
    """A rank of a run died or did not end in time."""


def require_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raises UnknownName, with what exists and the nearest guess, if `name` is not in `known`."""
    if name in known:
        return
    near = get_close_matches(name, known, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownName(f"there is no {kind} {name!r}.{guess}\n  {kind}s: {', '.join(known)}")
