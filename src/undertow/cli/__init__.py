"""The command `undertow`."""

import importlib.util
import sys

from rich.console import Console
from rich.text import Text

from undertow.errors import UndertowError

__all__ = ["main"]


def main() -> None:
    """Runs the command; an UndertowError prints its text and exits with code 2, without a traceback."""
    if importlib.util.find_spec("typer") is None:
        sys.exit('The command needs typer, which is not installed.\n  Install it with: pip install "undertow[cli]"')
    try:
        from undertow.cli.app import app

        app()
    except UndertowError as error:
        Console(stderr=True).print(Text.assemble(("Error:", "bold red"), " ", (str(error), "red")), soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # as shells expect of a process ended by Ctrl-C
