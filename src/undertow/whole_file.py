"""Files for users: a folder must exist, and a file is written whole or not at all."""

import gzip
import os
from pathlib import Path

from undertow.errors import ConfigError, require


def require_folder(folder: Path, *, where: str) -> None:
    """Raises ConfigError if there is no such folder."""
    require(
        folder.is_dir(),
        f"the folder '{folder}' does not exist.",
        where=where,
        remedy="Give the folder that the run wrote its files to.",
    )


def write_whole(path: str | Path, content: bytes, *, where: str) -> None:
    """Writes a file, compressed if its name ends with .gz, under another name and renames it, so
    that no half of it remains.

    Raises ConfigError if it cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(
                gzip.compress(content, mtime=0) if path.suffix == ".gz" else content
            )
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be written: {error.strerror or error}.",
            where=where,
            remedy="Give a path in a folder that exists, is writable and has space.",
        ) from error
