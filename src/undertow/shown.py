"""Values that print themselves, and texts from elsewhere prepared for rich: no markup, no emoji."""

import io
import shutil
from collections.abc import Iterable, Mapping

from rich.console import Console, Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.text import Text

from undertow.foreign import printable


class Shown(JupyterMixin):
    """A value that `print`, `rich.print` and a notebook show as tables or lines."""

    __slots__ = ()

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def __str__(self) -> str:
        file, width = io.StringIO(), max(shutil.get_terminal_size().columns, 120)  # a narrower table would cut names
        console = Console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False)
        console.print(self, soft_wrap=True)  # lines stay whole, however wide the terminal is
        return file.getvalue().removesuffix("\n")


def cell(text: str) -> Text:
    """Returns the text for a cell of a table."""
    return Text(printable(text))


def with_experts(parts: Iterable[RenderableType], experts: Mapping[str, Shown]) -> Group:
    """Returns the parts, and below them the values of the groups of experts under their names."""
    return Group(*parts, *(part for name, it in experts.items() for part in (cell(""), cell(f"Experts {name}:"), it)))


def print_line(console: Console, text: str, style: str = "") -> None:
    """Prints the text on one line, however wide the terminal is."""
    console.print(Text(printable(text), style=style), soft_wrap=True)
