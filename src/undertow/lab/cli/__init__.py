"""The command `undertow`."""

import importlib.util
import io
import sys

from undertow.errors import UndertowError
from undertow.lab.cli.docs import show_docs
from undertow.lab.runner.command import main as run

__all__ = ["main"]


def main() -> None:
    """Runs the command.

    An UndertowError prints its text and exits with code 2, without a traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # as stderr is: no character ends a command, in any locale
        sys.stdout.reconfigure(errors="backslashreplace")
    # These two work without typer and rich: `run` because they take time to load, and `docs`
    # because errors name pages in every installation.
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
    try:
        if sys.argv[1:2] == ["docs"]:
            show_docs(sys.argv[2:])
            sys.exit(0)
        _run_app()
    except UndertowError as error:
        _print_error(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # as shells expect of a process ended by Ctrl-C


def _run_app() -> None:
    if importlib.util.find_spec("typer") is None:
        sys.exit(
            "The command needs typer, which is not installed.\n  Install it with: pip "
            'install "undertow[cli]"'
        )
    from undertow.lab.cli.app import app

    app()


def _print_error(error: UndertowError) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(
        Text.assemble(("Error:", "bold red"), " ", (str(error), "red")), soft_wrap=True
    )
