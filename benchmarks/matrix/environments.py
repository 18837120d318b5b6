"""The virtual environments that systems run in."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.matrix.catalog import MAIN

FOLDER = Path(__file__).parents[2] / ".venv-peers"  # one folder per environment, made by `make bench-peers`


def python_of(environment: str) -> Path | None:
    """The interpreter of an environment; None if it has not been made."""
    if environment == MAIN:
        return Path(sys.executable)
    python = FOLDER / environment / "bin" / "python"
    return python if python.exists() else None
