"""The command `undertow`."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]

_INTERRUPTED = 130  # exit code that shells expect of a process ended by Ctrl-C


def main() -> None:
    """Runs the command."""
    if importlib.util.find_spec("typer") is None:
        sys.exit('The command needs typer, which is not installed.\n  Install it with: pip install "undertow[cli]"')
    try:
        from undertow.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
