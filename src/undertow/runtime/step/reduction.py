"""Reductions that user code starts and waits for."""

import contextlib
from collections.abc import Sequence
from functools import partial

from undertow.errors import PhaseError, UndertowError, require
from undertow.runtime.step.engine import Engine
from undertow.runtime.step.siblings import all_of
from undertow.runtime.torch_private import private


class Reduction:
    """Gradients in flight, as `GradientSync.reduce_gradients_async` returns them."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    @private.untraced
    def wait(self) -> None:
        """Waits until every `.grad` is the mean over ranks, or the result of another `op`."""
        all_of(*(engine.complete for engine in self._engines))


def start_reduction(engines: Sequence[Engine], *, op: str | None, has_hook: bool, is_weighted: bool) -> Reduction:
    """Starts GradientSync.reduce_gradients_async; `op=None` is the op of the settings."""
    require(
        private.graph_task_id() == -1,
        "reduce_gradients_async() was called inside a backward.",
        where="GradientSync.reduce_gradients_async",
        remedy="Call it after the last backward of the step.",
        error=PhaseError,
    )
    require_op = partial(require, where="reduce_gradients_async(op)")
    require_op(
        op in (None, "mean", "sum"),
        f'op must be "mean" or "sum", got {op!r}.',
        remedy="Leave it out for the op of the settings.",
    )
    require_op(
        op is None or not has_hook,
        "with a communication hook it is the hook that divides gradients.",
        remedy="Leave op out, and have the hook do what you want.",
    )
    require_op(
        op is None or not is_weighted,
        f'SyncConfig(op="weighted") divides gradients by weights, and op="{op}" does not.',
        remedy="Leave op out.",
    )
    reduction = Reduction(engines)
    try:
        all_of(*(partial(engine.reduce_accumulated, op) for engine in engines))
    except UndertowError:
        with contextlib.suppress(UndertowError):
            reduction.wait()  # for reductions over other groups of ranks
        raise
    return reduction
