"""The directory to which pictures are written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from undertow.errors import ConfigError

__all__ = ["checked_writing", "make_directory"]


def make_directory(path: Path, *, where: str) -> None:
    """Creates the directory if it is missing; raises ConfigError if nothing can be written there."""
    with checked_writing(path, where=where):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass


@contextmanager
def checked_writing(path: Path, *, where: str) -> Iterator[None]:
    """Raises ConfigError, naming `path` and the reason, instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"nothing can be written to '{path}': {error.strerror or type(error).__name__}.",
            where=where,
            remedy="Give another directory for the pictures: --out DIR.",
        ) from error
