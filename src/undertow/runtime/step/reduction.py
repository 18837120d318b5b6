"""Reductions that user code starts and waits for."""

import contextlib
from collections.abc import Sequence
from functools import partial

from undertow.errors import ConfigError, PhaseError, UndertowError
from undertow.runtime.execute.agreed_errors import Misuse, misused
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
    if private.graph_task_id() != -1:
        raise PhaseError(
            "reduce_gradients_async() was called inside a backward.",
            where="GradientSync.reduce_gradients_async",
            remedy="Call it after the last backward of the step.",
        )
    if op not in (None, "mean", "sum"):
        raise ConfigError(
            f'op must be "mean" or "sum", got {op!r}.',
            where="reduce_gradients_async(op)",
            remedy="Leave it out for the op of the settings.",
        )
    if op is not None and has_hook:
        raise ConfigError(
            "with a communication hook it is the hook that divides gradients.",
            where="reduce_gradients_async(op)",
            remedy="Leave op out, and have the hook do what you want.",
        )
    if op is not None and is_weighted:
        raise ConfigError(
            f'SyncConfig(op="weighted") divides gradients by weights, and op="{op}" does not.',
            where="reduce_gradients_async(op)",
            remedy="Leave op out.",
        )
    reduction = Reduction(engines)
    try:
        all_of(*(partial(_reduce_accumulated, engine, op) for engine in engines))
    except UndertowError:
        with contextlib.suppress(UndertowError):
            reduction.wait()  # for reductions over other groups of ranks
        raise
    return reduction


def _reduce_accumulated(engine: Engine, op: str | None) -> None:
    """Sends accumulated gradients; `complete` waits for them. Raises PhaseError on every rank if some rank must not reduce."""
    progress, current_plan = engine.progress, engine.current_plan
    alone = current_plan.now.hooks.alone
    if alone is not None:
        if alone.is_complete or not (progress.has_accumulated or alone.has_accumulated):
            raise misused(Misuse.NOTHING, [current_plan.group.rank], number=progress.num_rounds)
        alone.reduces()
        progress.has_accumulated = progress.is_owed = False
    elif current_plan.is_active:
        if engine.abandon_launched():
            engine.refuse(Misuse.TWICE)
        if not progress.has_accumulated:
            engine.refuse(Misuse.NOTHING)
        sharding = current_plan.now.compiled.sharding
        if op is not None and sharding is not None and sharding.holds_gradients:
            engine.refuse(Misuse.SHARDS)
        engine.launch_accumulated(op=op)
