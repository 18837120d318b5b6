"""The engine's part when optimizers step, gradient scalers unscale, and states are loaded.

An optimizer that holds a synchronized parameter must not step on gradients that are not
synchronized yet, and a scaler that unscales before it steps must not read them.
"""

from __future__ import annotations

from itertools import compress, repeat
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from undertow.config import SyncConfig
from undertow.engine.checks import Arguments, after_closure
from undertow.engine.engine import Engine
from undertow.engine.progress import Gradients, params_of
from undertow.engine.step_events import StepListener, has_closure
from undertow.engine.step_settings import settings_of
from undertow.errors import PhaseError
from undertow.schedule import DDP


class EngineSteps(StepListener):
    """Steps on the gradients of one engine: before one, gradients are averaged and checked."""

    def __init__(self, engine: Engine, config: SyncConfig) -> None:
        self._engine, self._current_plan = engine, engine.current_plan
        self._strategy = config.strategy

    def step_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        params = self._params_of(optimizer)
        if params is None:
            return None
        self._require_stepper(optimizer)
        engine, current_plan = self._engine, self._current_plan
        is_closure_given = has_closure(args, kwargs)
        if is_closure_given:
            engine.finish_before_step(params)
        else:
            self._synchronize(optimizer, params)
        trained, names = current_plan.hooks.ids, current_plan.members.names
        # A rank alone compares settings with nobody.
        settings = settings_of(optimizer, trained, names) if current_plan.is_active else ()
        engine.progress.optimizer_steps(
            params,
            settings,
            of=trained,
            has_closure=is_closure_given,
            is_alone=engine.is_accumulating,
        )
        if current_plan.shards is not None:
            return None  # a sharded optimizer asks for the rest itself, after its closure
        changed: Arguments | None = None
        if is_closure_given and current_plan.is_active:
            # its backward is still to come
            changed = args, kwargs = after_closure(
                args, kwargs, lambda: self._average(optimizer, params)
            )
        numbers = engine.checks.numbers
        return numbers.before_step(optimizer, args, kwargs) or changed if numbers.is_on else changed

    def unscaling_begins(self, optimizer: Optimizer) -> None:
        params = self._params_of(optimizer)
        if params is not None:
            self._require_stepper(optimizer)
            self._synchronize(optimizer, params)

    def load_begins(self) -> None:
        if self._current_plan.is_active:
            self._engine.checks.loads.begins()

    def _params_of(self, optimizer: Optimizer) -> set[int] | None:
        """Returns the parameters of the optimizer, by id, or None if it has none of the model."""
        # An optimizer over shards has other tensors: if it were asked about those, every model
        # would search its parameters.
        stepped = list(params_of(optimizer))
        params = set(compress(map(id, stepped), map(isinstance, stepped, repeat(nn.Parameter))))
        if len(params) < len(stepped):  # TorchScript may have parameters that are plain tensors
            params |= self._current_plan.members.ids & set(map(id, stepped))
        if self._engine.is_closed or not self._current_plan.owns_any(params):
            return None
        return params

    def _require_stepper(self, optimizer: Optimizer) -> None:
        """Raises PhaseError if another optimizer is to step the model."""
        shards = self._current_plan.shards
        if shards is not None:
            shards.require_stepper(optimizer)
        elif self._strategy not in (None, DDP.name):
            raise PhaseError(
                f"strategy={self._strategy!r} needs a sharded optimizer, and "
                f"{type(optimizer).__name__} is not one.",
                where="the first step of the optimizer",
                remedy="Make it with "
                f"undertow.ShardedOptimizer(torch.optim.{type(optimizer).__name__}, "
                "model, ...).",
            )

    def _synchronize(self, optimizer: Optimizer, params: set[int]) -> None:
        """Runs the synchronizations that are owed before the gradients of these parameters, by id,
        are read."""
        engine, reader = self._engine, type(optimizer).__name__
        engine.finish_before_step(params, reader=reader)
        self._average(optimizer, params)
        if engine.progress.gradients is not Gradients.SOUND:
            engine.require_sound_gradients(params, reader=reader)

    def _average(self, optimizer: Optimizer, params: set[int]) -> None:
        self._engine.average_before_step(
            params,
            reader=type(optimizer).__name__,
            is_sharded=self._current_plan.shards is not None,
        )
