"""The text that the demo trains on: the standard library's source, or a file."""

from __future__ import annotations

import stat
import sysconfig
from pathlib import Path

from undertow.errors import ConfigError

__all__ = ["load_corpus"]

_MAX_BYTES = 4 * 1024 * 1024
_MIN_BYTES = 4096


def load_corpus(path: Path | None = None) -> bytes:
    """Reads the first few MiB of the file at `path`, or of the standard library's modules in alphabetical order.

    Raises ConfigError if there is nothing to read, or too little.
    """
    text = _standard_library() if path is None else _file(path)
    if len(text) < _MIN_BYTES:
        source = "the standard library's source" if path is None else f"'{path}'"
        raise ConfigError(
            f"{source} is too short to train on: {len(text)} bytes.",
            where="the text of undertow demo",
            remedy=f"Give a file of {_MIN_BYTES} bytes or more: --text FILE.",
        )
    return text


def _standard_library() -> bytes:
    text = bytearray()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += module.read_bytes()
        if len(text) >= _MAX_BYTES:
            break
    return bytes(text[:_MAX_BYTES])


def _file(path: Path) -> bytes:
    try:
        # Checked before opening: a pipe without a writer would block forever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise _unreadable(path, "it is no regular file")
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise _unreadable(path, error.strerror or type(error).__name__) from error


def _unreadable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"'{path}' cannot be read: {reason}.",
        where="the text of undertow demo",
        remedy="Give a file that you may read: --text FILE; or leave --text out for the standard library's source.",
    )
