"""Runs programs that do not know Undertow, with Undertow's class instead of torch's.

`undertow run` puts the folder `site` at the front of PYTHONPATH and becomes the command. Every Python process that inherits the
environment imports `site/sitecustomize.py` first, which redirects torch's class as soon as torch defines it.
"""

import sys

from undertow.errors import require
from undertow.version import is_older

_LEAST_TORCH = "2.11"


def require_torch(version: str) -> None:
    """Raises ConfigError if this version of torch is too old for Undertow."""
    require(
        not is_older(version, _LEAST_TORCH),
        f"Undertow needs torch {_LEAST_TORCH} or newer, and this is {version}.",
        where=f"undertow run, {sys.executable}",
        remedy="Install a newer torch, or start the program without `undertow run`.",
    )
