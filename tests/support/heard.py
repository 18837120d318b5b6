"""What is logged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def heard(logger: str = "undertow") -> Iterator[list[str]]:
    """The warnings of that logger, and of those below it, as they come."""
    handler = _Heard()
    logging.getLogger(logger).addHandler(handler)
    try:
        yield handler.texts
    finally:
        logging.getLogger(logger).removeHandler(handler)
