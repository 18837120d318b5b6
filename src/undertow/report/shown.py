"""Prepares external names and texts for rich and matplotlib: no markup, no emoji, no formulas."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from undertow.foreign import printable

__all__ = ["cell", "drawn", "print_line"]


def cell(text: str) -> Text:
    """Returns the text for a cell of a table."""
    return Text(printable(text))


def print_line(console: Console, text: str, style: str = "") -> None:
    """Prints the text on one line, however wide the terminal is."""
    console.print(Text(printable(text), style=style), soft_wrap=True)


def drawn(text: str) -> str:
    """Returns the text for a picture: matplotlib would read text between two dollar signs as a formula."""
    return printable(text).replace("$", r"\$")
