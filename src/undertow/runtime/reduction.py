"""Gradients on their way, for whoever waits."""

from __future__ import annotations

from undertow.errors import PhaseError
from undertow.runtime import private
from undertow.runtime.engine import Engine


class Reduction:
    """Gradients on their way, from `Sync.reduce_gradients_async`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def wait(self) -> None:
        """Returns when every `.grad` is the mean over ranks."""
        self._engine.complete()


def start_reduction(engine: Engine) -> Reduction:
    """See Sync.reduce_gradients_async."""
    if private.graph_task_id() != -1:
        raise PhaseError(
            "reduce_gradients_async() was called inside a backward.",
            where="Sync.reduce_gradients_async",
            remedy="Call it after the last backward of the step.",
        )
    engine.reduce_accumulated()
    return Reduction(engine)
