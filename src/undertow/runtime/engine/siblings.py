"""Engines of one module, whose rounds belong to the same backwards."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from undertow.errors import UndertowError


class SiblingEngines:
    """Engines whose rounds belong to the same backwards: a backward that reaches one of them is a round of all.

    No token of a rank may reach its experts; the ranks with the same experts wait for it in that backward nevertheless. The
    order is the same on every rank, so that engines also wait for each other in one order.
    """

    def __init__(self, engines: Sequence[Any], *, close: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._engines = [weakref.ref(engine) for engine in engines]  # which hold this object
        self._close = close  # of the object that users hold
        self.are_several = len(engines) > 1

    @property
    def watched_ids(self) -> set[int]:
        """The parameters, by id, whose gradients the engines wait for."""
        return {key for engine in self._present() for key in engine.current_plan.hooks.ids}

    def close_model(self) -> None:
        """Closes the model: a newer wrapper averages its gradients."""
        close = self._close()
        if close is not None:
            close()

    def take_part(self, task: int) -> None:
        """Begins a round of every engine in backward `task`, unless it is in one."""
        for engine in self._present():
            engine.take_part(task)

    @property
    def follow_forward(self) -> bool:
        """True if a forward has run since all parameters of every engine were stepped."""
        return any(engine.follows_forward for engine in self._present())

    def finish_owed(self) -> None:
        """Called after one engine has run a round outside of backward: the others run theirs, for which other ranks wait too."""
        all_of(*(engine.finish_owed for engine in self._present()))

    def complete(self) -> None:
        """Called after one engine has failed: ends the launched rounds of the others, and drops their errors."""
        for engine in self._present():
            with contextlib.suppress(UndertowError):
                engine.complete()

    def wait_for_parameters(self) -> None:
        """Waits for the parameters of all engines; drops errors."""
        for engine in self._present():
            with contextlib.suppress(RuntimeError):
                if engine.current_plan.group.is_alive:
                    engine.current_plan.wait_for_parameters()

    def _present(self) -> Iterator[Any]:
        return (engine for ref in self._engines if (engine := ref()) is not None)


def all_of(*calls: Callable[[], object]) -> None:
    """Calls all of `calls`, because other ranks wait in each, and then raises the first error."""
    first: UndertowError | None = None
    for call in calls:
        try:
            call()
        except UndertowError as error:
            first = first or error
    if first is not None:
        raise first
