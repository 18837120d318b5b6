"""Engines of one module, which meet other ranks in the same backwards."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from undertow.errors import UndertowError


class SiblingEngine(Protocol):
    """What an engine is to others."""

    current_plan: Any

    def take_part(self, task: int) -> None: ...

    def finish_owed(self) -> None: ...

    def complete(self) -> None: ...


class SiblingEngines:
    """Engines whose rounds belong to the same backwards: one that reaches any of them is a round of all.

    None of a rank's tokens may reach its experts; the ranks that hold the same ones wait for it in that backward all the same.
    The order is the same on every rank, so that they also wait for one another in one order.
    """

    def __init__(self, engines: Sequence[SiblingEngine]) -> None:
        self._engines = [weakref.ref(engine) for engine in engines]  # which hold us

    def __len__(self) -> int:
        return len(self._engines)

    def take_part(self, task: int) -> None:
        """Every engine begins a round in backward `task`, unless it is in one."""
        for engine in self._present():
            engine.take_part(task)

    def finish_owed(self) -> None:
        """One of them has run a round outside of backward: the others run theirs, for which ranks in backwards wait too."""
        all_of(*(engine.finish_owed for engine in self._present()))

    def complete(self) -> None:
        """One of them has failed: what the others have launched ends, and their errors, if any, come second."""
        for engine in self._present():
            with contextlib.suppress(UndertowError):
                engine.complete()

    def wait_for_parameters(self) -> None:
        """Returns when those of all of them have come, or what was to bring them has failed, of which nobody is told."""
        for engine in self._present():
            with contextlib.suppress(RuntimeError):
                if engine.current_plan.group.is_alive:
                    engine.current_plan.wait_for_parameters()

    def _present(self) -> Iterator[SiblingEngine]:
        return (engine for ref in self._engines if (engine := ref()) is not None)


def all_of(*calls: Callable[[], object]) -> None:
    """Calls all of them, for other ranks wait in each; the first error is raised then."""
    first: UndertowError | None = None
    for call in calls:
        try:
            call()
        except UndertowError as error:
            first = first or error
    if first is not None:
        raise first
