"""The order in which engines wait if one backward has reached several."""

from __future__ import annotations

import weakref
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
    _all: ClassVar[weakref.WeakSet[WaitTurn]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.number = next(self._numbers)  # in the order of construction
        self._backward = -1  # the one after which its engine waits
        self._all.add(self)

    def begins(self) -> None:
        """Called when a backward ends, before any engine waits."""
        self._backward = private.graph_task_id()

    def ends(self) -> None:
        """Called when the round of that backward has ended.

        Need not be called after an error: torch never gives another backward the same id.
        """
        self._backward = -1

    @property
    def has_come(self) -> bool:
        """True unless an engine that was made earlier still waits after this backward."""
        backward = private.graph_task_id()
        earlier = [turn for turn in list(self._all) if turn.number < self.number]
        return all(turn._backward != backward for turn in earlier)
