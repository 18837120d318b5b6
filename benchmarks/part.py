"""A benchmark of `make bench`: how it is measured, and the table that the terminal and the pages show of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # one measurement as flat values
Table = list[list[str]]  # the first line is the head
Tell = Callable[[str], None]  # says what is being measured now


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a part is measured."""

    out: Path  # long parts keep here what is finished
    is_quick: bool  # only shows that it works
    resumes: bool  # what `out` has is not measured again
    tell: Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One benchmark."""

    name: str
    title: str
    measure: Callable[[Run], Sequence[Row]]
    table: Callable[[Sequence[Row]], Table]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns the table as lines of Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))
