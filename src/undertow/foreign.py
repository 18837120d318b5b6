"""Texts and JSON that come from files, from other ranks, or from the names of a model.

Everything that is shown passes through `printable`: in a terminal, an error, a log, a picture or a page.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

__all__ = ["MOST_LEVELS", "as_object", "parsed_json", "printable", "printable_lines"]

MOST_LEVELS = 100  # of nested lists and objects; readers of a value may recurse once per level


def printable(text: str) -> str:
    """Returns the text on one line, with a visible escape such as \\x1b for each character that could control a terminal."""
    return text if text.isprintable() else "".join(map(_visible, text))


def printable_lines(text: str) -> str:
    """Does the same as `printable` for a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def parsed_json(text: str | bytes, *, object_of: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parses a JSON text, in UTF-8 if it is bytes. Raises ValueError, and nothing else, for any other text.

    A name that an object gives twice is an error, unless `object_of` builds a value from its pairs. NaN and Infinity are read as
    numbers, as Python writes them.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        value = json.loads(text, object_pairs_hook=as_object if object_of is None else object_of)
    except RecursionError:
        raise _too_deep() from None
    _require_shallow(value)
    return value


def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a dict of these pairs. Raises ValueError if a name is given twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found


def _require_shallow(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_LEVELS):
        children = (child for part in level for child in (part.values() if isinstance(part, dict) else part))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested too deeply, in more than {MOST_LEVELS} levels")


def _visible(character: str) -> str:
    # Spaces of other widths are shown as they are; line and paragraph separators are not spaces.
    is_shown = character.isprintable() or unicodedata.category(character) == "Zs"
    return character if is_shown else character.encode("unicode_escape").decode()
