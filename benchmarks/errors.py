"""What can go wrong in a benchmark, as text for the user who started it.

BenchmarkError
├── UnknownName    a workload, system or tree that does not exist
├── NoNamespaces   this machine or user cannot make shaped links
└── RankFailed     a rank died or fell silent; carries the last lines of its log
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class BenchmarkError(Exception):
    """Base of all errors of the benchmarks."""


class UnknownName(BenchmarkError):
    """A name that is in no list; the text has the list."""


class NoNamespaces(BenchmarkError):
    """Network namespaces cannot be made here; the text says what is missing."""


class RankFailed(BenchmarkError):
    """A rank died or did not answer in time."""


def require_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raises UnknownName, with what exists and the nearest guess, if `name` is not in `known`."""
    if name in known:
        return
    near = get_close_matches(name, known, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownName(f"there is no {kind} {name!r}.{guess}\n  {kind}s: {', '.join(known)}")
