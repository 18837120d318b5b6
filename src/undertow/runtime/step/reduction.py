"""Gradients on their way, for whoever waits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from undertow.errors import ConfigError, PhaseError, UndertowError
from undertow.runtime.execute import agreed_errors
from undertow.runtime.step.engine import Engine
from undertow.runtime.step.siblings import all_of
from undertow.runtime.torch_private import private


class Reduction:
    """Gradients on their way, from `GradientSync.reduce_gradients_async`."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    @private.untraced
    def wait(self) -> None:
        """Returns when every `.grad` is the mean over ranks, or what else `op` says."""
        all_of(*(engine.complete for engine in self._engines))


def start_reduction(engines: Sequence[Engine], *, op: str | None, has_hook: bool, is_weighted: bool) -> Reduction:
    """See GradientSync.reduce_gradients_async; with `op=None` it is the op of the settings."""
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
            reduction.wait()  # what has left over other groups of ranks
        raise
    return reduction


def _reduce_accumulated(engine: Engine, op: str | None) -> None:
    """Sends what was accumulated; `complete` waits for it. PhaseError on every rank where that cannot be right on some."""
    progress, uses = engine._progress, engine.current_plan.watch.uses
    if uses is not None:  # a rank alone
        if uses.is_over or not (progress.has_accumulated or uses.has_accumulated):
            raise agreed_errors.misused(
                agreed_errors.Misuse.NOTHING, [engine.current_plan.group.rank], number=progress.num_rounds
            )
        uses.reduces()
        progress.has_accumulated = progress.is_owed = False
    elif engine.current_plan.is_active:
        misuse = _misuse(engine, op)
        engine._launch(op=op) if misuse is None else _refuse(engine, misuse)


def _misuse(engine: Engine, op: str | None) -> agreed_errors.Misuse | None:
    """Why what was accumulated cannot be reduced now; ends what is under way."""
    if engine._open is not None:
        is_launched = engine._open.is_launched
        engine._abandon()
        if is_launched:
            return agreed_errors.Misuse.TWICE
    if not engine._progress.has_accumulated:
        return agreed_errors.Misuse.NOTHING
    return agreed_errors.Misuse.SHARDS if op is not None and engine.current_plan.holds_shards else None


def _refuse(engine: Engine, misuse: agreed_errors.Misuse) -> None:
    """A round that tells all ranks of it; `.grad` stays as it is here."""
    number = engine._progress.num_rounds
    engine._begin(is_synchronized=True)
    assert engine._open is not None
    engine._open.round.misuse = misuse
    engine._give_up(engine._open)
    raise agreed_errors.misused(
        misuse, [engine.current_plan.group.rank], number=number
    )  # on a device, where others read it later
