"""Gradients on their way, for whoever waits."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.errors import PhaseError
from undertow.runtime import private
from undertow.runtime.engine import Engine


class Reduction:
    """Gradients on their way, from `Sync.reduce_gradients_async`."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def wait(self) -> None:
        """Returns when every `.grad` is the mean over ranks."""
        for engine in self._engines:
            engine.complete()


def start_reduction(engines: Sequence[Engine]) -> Reduction:
    """See Sync.reduce_gradients_async."""
    if private.graph_task_id() != -1:
        raise PhaseError(
            "reduce_gradients_async() was called inside a backward.",
            where="Sync.reduce_gradients_async",
            remedy="Call it after the last backward of the step.",
        )
    for engine in engines:
        engine.reduce_accumulated()
    return Reduction(engines)
