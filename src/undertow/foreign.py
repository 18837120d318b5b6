"""Texts and JSON that come from files, from other ranks, or from the names of a model.

Everything that is shown passes through `printable`: in a terminal, an error, a log, a picture or a
page.
"""

import json
import math
import unicodedata
from typing import Any

MOST_LEVELS = 100  # of nested lists and objects; readers of a value may recurse once per level
_TOO_DEEP = f"it is nested too deeply, in more than {MOST_LEVELS} levels"


def printable(text: str) -> str:
    """Returns the text on one line, with a visible escape such as \\x1b for each character that
    could control a terminal."""
    return text if text.isprintable() else "".join(map(_visible, text))


def printable_lines(text: str) -> str:
    """Does the same as `printable`, for a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice")
    return found


def parsed_json(text: str | bytes) -> Any:
    """Parses a JSON text, in UTF-8 if it is bytes. Raises ValueError, and nothing else, for any
    other text.

    A name that an object gives twice is an error. NaN and Infinity are read as numbers, as Python
    writes them.
    """
    try:
        value = json.loads(
            text.decode("utf-8") if isinstance(text, bytes) else text, object_pairs_hook=_as_object
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return value
        level = [
            child for part in level for child in (part.values() if isinstance(part, dict) else part)
        ]
    raise ValueError(_TOO_DEEP)


def as_float(value: object) -> float:
    """Returns a number as a float.

    NaN for other values, for True and False, and for an integer beyond all floats.
    """
    try:
        return (
            float(value)
            if isinstance(value, int | float) and not isinstance(value, bool)
            else math.nan
        )
    except OverflowError:
        return math.nan


def _visible(character: str) -> str:
    # Spaces of other widths are shown as they are; line and paragraph separators are not spaces.
    is_shown = character.isprintable() or unicodedata.category(character) == "Zs"
    return character if is_shown else character.encode("unicode_escape").decode()
