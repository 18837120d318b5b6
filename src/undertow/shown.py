"""Values that print themselves, and texts from elsewhere prepared for rich: no markup, no emoji.

Rich is imported when something is shown: training does not need it.
"""

import io
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from undertow.foreign import printable

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text

_HTML = '<pre style="font-family:monospace;line-height:1.2;white-space:pre">{code}</pre>'


def counted(number: int, name: str) -> str:
    """Returns "1 rank", "2 ranks" and so on."""
    return f"{number} {name}{'' if number == 1 else 's'}"


class Shown:
    """A value that `print`, `rich.print` and a notebook show as tables or lines."""

    __slots__ = ()

    def __rich__(self) -> "RenderableType":
        raise NotImplementedError

    def __str__(self) -> str:
        # It is usually printed, and must not end a training by its characters: rich draws tables in
        # ASCII for such an encoding.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        text = self._printed(encoding).export_text()
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        return "\n".join(line.rstrip() for line in text.splitlines())

    def _repr_html_(self) -> str:
        return self._printed().export_html(code_format=_HTML, inline_styles=True)

    def _printed(self, encoding: str = "utf-8") -> "Console":
        from rich.console import Console

        width = max(shutil.get_terminal_size().columns, 80)  # a narrower table would cut names
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
        console = Console(file=file, width=width, record=True, force_jupyter=False)
        console.print(self, soft_wrap=True)  # lines stay whole, however wide the terminal is
        return console


def cell(text: str) -> "Text":
    """Returns the text for a cell of a table."""
    from rich.text import Text

    return Text(printable(text))


def narrow_table(first: str) -> "Table":
    """Returns a table that fits into 80 columns, with its first column."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table


def table_of(columns: Mapping[str, tuple[str, str]], rows: Iterable[Mapping[str, Any]]) -> "Table":
    """Returns a table of plain values.

    `columns` has the title of each column by its key in `rows`, and the format of its numbers; ""
    if it has texts. None is shown as "-".
    """
    from rich.table import Table

    table = Table(padding=0)
    for title, form in columns.values():
        table.add_column(title, justify="right" if form else "left", overflow="fold")
    for row in rows:
        values = [(row[name], form) for name, (_, form) in columns.items()]
        table.add_row(
            *(cell("-" if value is None else f"{value:{form}}") for value, form in values)
        )
    return table


def with_experts(parts: "Iterable[RenderableType]", experts: Mapping[str, Shown]) -> "Group":
    """Returns the parts, and below them the values of the groups of experts under their names."""
    from rich.console import Group

    return Group(
        *parts,
        *(
            part
            for name, table in experts.items()
            for part in (cell(""), cell(f"Experts {name}:"), table)
        ),
    )


def print_line(console: "Console", text: str, style: str = "") -> None:
    """Prints the text on one line, however wide the terminal is."""
    from rich.text import Text

    console.print(Text(printable(text), style=style), soft_wrap=True)
