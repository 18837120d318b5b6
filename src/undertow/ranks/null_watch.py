"""The watch of a rank without others: the methods of every watch, which do nothing here.

`watch` has the watch over the other ranks of a model.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Protocol

from undertow.ranks.alike import Alike
from undertow.ranks.faults import Activity, Fault


class Interruptible(Protocol):
    """A group over which this rank may wait: `OwnGroup`, or a group of the user's."""

    def interrupt(self) -> None:
        """Ends every wait for them."""


class NullWatch:
    """The watch of a rank that has no other ranks, or is connected to none."""

    fault: Fault | None = None  # why no collective can succeed
    here: Activity | None = None  # of this rank, if others may ask for it

    def __init__(self) -> None:
        self.groups: list[weakref.ref[Interruptible]] = []  # that this rank may wait for

    def waiting(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Context for a wait for other ranks; an error inside it is replaced by its reason if that
        is known.

        `name` names the wait in reports. Without one, the wait may take any time. Worker threads
        have none, because a rank reports one wait at a time, the training thread's.
        """
        return contextlib.nullcontext()

    def check(self) -> None:
        """Raises if a rank is gone or has failed."""

    def fail(self, reason: Fault | BaseException) -> None:
        """Tells all ranks of a fault, or of an error after which this rank cannot continue.

        A fault ends the waits of all ranks at once, and so does an error of this rank alone; raises
        the reason of the error if it is known. An UndertowError may be one that all ranks are about
        to raise: it ends the waits for this rank, a little later.
        """

    def ask(self, text: str, of: Sequence[int] = (), *, most: int = 2) -> list[Alike]:
        """Tells all ranks a text, and returns the texts of the ranks `of`, by default all, that
        call this for the same ranks within a second.

        A rank without a text is not among them. Texts may be long, and ranks many: each rank tells
        a digest, and only the lowest rank of each of the first `most` texts tells all of it.
        """
        return []

    def leave(self, error: BaseException | None) -> None:
        """Leaves the model; with an error, tells the ranks that wait for this one."""
