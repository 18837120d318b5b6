"""A group without ranks that could be lost."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


class Alone:
    """What a communication hook asks of the group of its model."""

    is_broken = False
    member = "of one"

    def result(self, future: Future[Any]) -> Any:
        return future.result()


ALONE = Alone()
