"""Texts that ranks tell each other about themselves: ranks with the same text are one entry.

MOST_TEXTS  of an error
Alike       the ranks with one text
alike       ranks by their texts
lines_of    a line for each entry
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from undertow.ranks.answers import named

MOST_TEXTS = 8  # of different ones that an error lists


class Alike(NamedTuple):
    """Ranks that have the same text."""

    ranks: list[int]
    text: str | None  # None if it was not sent: only the first texts are


def alike(texts: Mapping[int, str]) -> list[Alike]:
    """Returns the ranks by their texts, in the order of their lowest ranks."""
    found: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        found.setdefault(text, []).append(rank)
    return [Alike(ranks, text) for text, ranks in found.items()]


def lines_of(found: Sequence[Alike]) -> list[str]:
    """Returns a line for each text, and one for the ranks whose texts were not sent."""
    lines = [f"{named(one.ranks)}: {one.text}" for one in found if one.text is not None]
    others = list(chain.from_iterable(one.ranks for one in found if one.text is None))
    return [*lines, f"{named(others)}: something else"] if others else lines
