"""The command `undertow`."""

import importlib.util
import io
import sys

from undertow.errors import UndertowError
from undertow.lab.runner.command import main as run

__all__ = ["main"]


def main() -> None:
    """Runs the command.

    An UndertowError prints its text and exits with code 2, without a traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # as stderr is: no character ends a command, in any locale
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.argv[1:2] == ["run"]:  # without typer and rich, which take time to load
        run(sys.argv[2:])
    if importlib.util.find_spec("typer") is None:
        sys.exit(
            "The command needs typer, which is not installed.\n  Install it with: pip "
            'install "undertow[cli]"'
        )
    try:
        from undertow.lab.cli.app import app

        app()
    except UndertowError as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(
            Text.assemble(("Error:", "bold red"), " ", (str(error), "red")), soft_wrap=True
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # as shells expect of a process ended by Ctrl-C
