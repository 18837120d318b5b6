"""Gradients on their way, for whoever waits."""

from __future__ import annotations

from undertow.runtime.engine import Engine


class Reduction:
    """Gradients on their way, from `Sync.reduce_gradients_async`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def wait(self) -> None:
        """Returns when every `.grad` is the mean over ranks."""
        self._engine.complete()
