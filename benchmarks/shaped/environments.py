"""The virtual environments that systems run in: the project's own, and one for each file of benchmarks/peers.

.venv-peers/megatron/                  an environment
.venv-peers/megatron/installed.txt     the pins it was made from; written last
.venv-peers/megatron.log               what pip said
"""

from __future__ import annotations

import sys
from pathlib import Path

MAIN = "main"  # the project's own
_ROOT = Path(__file__).parents[2]
FOLDER = _ROOT / ".venv-peers"  # made by `make bench-peers`
PINS = _ROOT / "benchmarks" / "peers"


def peers() -> list[str]:
    """Returns the names of the environments that can be made."""
    return sorted(path.stem for path in PINS.glob("*.txt"))


def pins_of(environment: str) -> Path:
    return PINS / f"{environment}.txt"


def interpreter_of(environment: str) -> Path:
    return FOLDER / environment / "bin" / "python"


def installed_of(environment: str) -> Path:
    return FOLDER / environment / "installed.txt"


def log_of(environment: str) -> Path:
    return FOLDER / f"{environment}.log"


def python_of(environment: str) -> Path | None:
    """Returns the interpreter of an environment; None if it is not there, whole and of today's pins."""
    if environment == MAIN:
        return Path(sys.executable)
    return interpreter_of(environment) if _is_installed(environment) else None


def why_absent(environment: str) -> str:
    """Returns the error of a system whose environment is not there."""
    place = f"{FOLDER.name}/{environment}"
    if installed_of(environment).exists():
        return f"{place} is not whole, or not of the versions in {PINS.name}/{environment}.txt; make bench-peers makes it again"
    if log_of(environment).exists():
        return f"the virtual environment {place} could not be made; {place}.log says why"
    return f"no virtual environment {place}; make bench-peers makes it"


def _is_installed(environment: str) -> bool:
    pins, installed = pins_of(environment), installed_of(environment)
    # A link to an interpreter that is gone does not exist either.
    is_whole = pins.exists() and installed.exists() and interpreter_of(environment).exists()
    return is_whole and installed.read_bytes() == pins.read_bytes()
