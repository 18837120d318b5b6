"""The order in which engines wait if one backward has reached several."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

from undertow.torch_private import private


class WaitTurn:
    """The turn of an engine to wait after a backward: engines wait in the order of their
    construction.

    One backward may reach them in another order on another rank, and some waits need calls of all
    ranks: a rebuild, and the comparison of a change that only some ranks have found.
    """

    _numbers: ClassVar[Iterator[int]] = count()
    # By the number of an engine that waits, the backward after which it does.
    _waiting: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self.number = next(self._numbers)  # in the order of construction

    def begins(self) -> None:
        """Called when a backward ends, before any engine waits."""
        self._waiting[self.number] = private.graph_task_id()

    def ends(self) -> None:
        """Called when the round of that backward has ended.

        Need not be called after an error: torch never gives another backward the same id.
        """
        self._waiting.pop(self.number, None)

    @property
    def has_come(self) -> bool:
        """True unless an engine that was made earlier still waits after this backward."""
        this = private.graph_task_id()
        # Another thread may run a backward, and change these.
        for number, backward in tuple(self._waiting.items()):
            if number < self.number and backward == this:
                return False
        return True
