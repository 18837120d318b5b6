"""The engine's part when optimizers step, scalers unscale, and states are loaded.

An optimizer that holds a synchronized parameter must not step on gradients that are not
synchronized yet, and a scaler that unscales before it steps must not read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from undertow.config import SyncConfig
from undertow.engine import agreed_errors
from undertow.engine.engine import Engine
from undertow.engine.nonfinite import Arguments, after_closure
from undertow.engine.progress import Accumulated, Gradients, params_of
from undertow.engine.step_events import StepListener, has_closure
from undertow.engine.step_settings import settings_of
from undertow.errors import PhaseError
from undertow.schedule import DDP
from undertow.torch_private import private


class BeforeSteps(StepListener):
    """Averages and checks the gradients of one engine before an optimizer steps on them."""

    def __init__(self, engine: Engine, config: SyncConfig) -> None:
        self._engine, self._current_plan = engine, engine.current_plan
        self._strategy, self._has_replicas = config.strategy, config.outer is not None
        self._takes_any = config.strategy in (None, DDP.name)  # a plain optimizer may step

    def step_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        params = self._params_of(optimizer)
        if params is None:
            return None
        engine, current_plan = self._engine, self._current_plan
        if not self._takes_any or current_plan.shards is not None:
            self._require_stepper(optimizer)
        is_closure_given = (len(args) > 1 or bool(kwargs)) and has_closure(args, kwargs)
        if is_closure_given:
            self.finish_before_step(params)
        else:
            self._synchronize(optimizer, params)
        trained, names = current_plan.hooks.ids, current_plan.members.names
        # A single rank has no other settings to compare with.
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
                args, kwargs, lambda: self._closure_ends(optimizer, params)
            )
        numbers = engine.checks.numbers
        if not numbers.is_on:
            return changed
        accumulates = engine.is_accumulating
        return numbers.before_step(optimizer, args, kwargs, accumulates=accumulates) or changed

    def step_ends(self, optimizer: Optimizer) -> None:
        self._engine.checks.numbers.step_ends(optimizer)

    def unscaling_begins(self, optimizer: Optimizer) -> None:
        params = self._params_of(optimizer)
        if params is not None:
            self._require_stepper(optimizer)
            self._synchronize(optimizer, params)

    def load_begins(self) -> None:
        if self._current_plan.is_active:
            self._engine.checks.loads.begins()

    def finish_before_step(self, params: set[int], *, reader: str | None = None) -> None:
        """Called by all ranks before the optimizer `reader` steps on these parameters, by id.

        Runs a round if one is owed, and raises the errors of comparisons. Raises PhaseError inside
        a backward.
        """
        self._finish_rounds(params, reader)
        if self._engine.checks.sent:
            self._engine.checks.require_alike()

    def _finish_rounds(self, params: set[int], reader: str | None) -> None:
        """Runs a round if one is owed before `reader` reads gradients of these parameters.

        Not inside `accumulate()`, where no other rank communicates. Raises PhaseError inside a
        backward.
        """
        engine, current_plan = self._engine, self._current_plan
        progress = engine.progress
        if (engine.rounds.now is not None or progress.is_owed) and private.graph_task_id() != -1:
            raise agreed_errors.step_within_backward(self._place(reader))
        if engine.rounds.now is not None:
            engine.rounds.abandon()
        # A sharded optimizer steps without new parameters until a forward has found them: other
        # ranks may have none, and be in the step that sends the shards.
        has_new = current_plan.members.has_new_of(
            params, with_gradients=current_plan.shards is not None
        )
        is_up_to_date = progress.steps.are_due_for(params) and not has_new
        if not is_up_to_date:
            # the next backward may run without a forward that finds a change
            current_plan.is_stale = True
            current_plan.find_change()
            current_plan.is_stale = True
            # parameters that no forward has found
            progress.is_owed |= current_plan.change is not None
        progress.is_owed = progress.is_owed and engine.needs_others
        is_due = progress.is_owed and engine.synchronizes
        if is_due and not (is_up_to_date and current_plan.has_result):
            is_late = reader is not None and progress.accumulated is Accumulated.GRADIENTS
            where = self._place(reader)
            engine.run_outside_of_backward()
            if is_late:
                self._tell_of_late_average(where, follows_forward=True)

    def average_before_step(self, params: set[int], *, reader: str, is_sharded: bool) -> None:
        """Averages gradients that were only accumulated, if the optimizer `reader` is about to use
        the gradients of these parameters, by id.

        Inside `accumulate()` a plain optimizer steps on this rank's own gradients; a sharded one
        cannot. Raises PhaseError there, inside a backward, and inside `join()`.
        """
        engine, current_plan = self._engine, self._current_plan
        progress = engine.progress
        if not engine.needs_others or not self._has_own_gradients(params):
            return
        where = self._place(reader)
        if engine.is_accumulating:
            if is_sharded:
                raise agreed_errors.step_in_accumulation(where)
            return
        if private.graph_task_id() != -1:
            raise agreed_errors.step_within_backward(where)
        if "join" in current_plan.group.borrowers:
            raise agreed_errors.step_in_join(where)
        follows_forward = progress.accumulated is not Accumulated.NOTHING
        engine.siblings.owe_averages()
        engine.run_outside_of_backward()
        self._tell_of_late_average(where, follows_forward=follows_forward)

    def finish_before_look(self, params: Iterable[Tensor], *, reader: str, is_by_all: bool) -> None:
        """Runs a synchronization before `reader` reads gradients of these parameters, if one is
        owed, or if gradients were only accumulated and this is outside of `accumulate()`.

        Other ranks may be in theirs. If the look `is_by_all` ranks, it raises the errors of
        comparisons. One rank alone must not: ranks that find a difference gather its values.
        """
        ids = set(map(id, params))
        if self._engine.is_closed or not self._current_plan.members.has_any_of(ids):
            return
        self._finish_rounds(ids, None)
        if is_by_all:
            self._engine.checks.require_alike()
        self.average_before_step(ids, reader=reader, is_sharded=False)

    def _place(self, reader: str | None) -> str:
        """Returns the optimizer or the call, and the synchronization, for a message."""
        number, rank = self._engine.progress.num_rounds, self._current_plan.group.name
        where = f"synchronization {number}, rank {rank}"
        return where if reader is None else f"{reader}, {where}"

    def _tell_of_late_average(self, where: str, *, follows_forward: bool) -> None:
        """Warns of a synchronization before a step, which nothing hides: once for each reason.

        Called after it: a warning may be an error, and other ranks would wait.
        """
        told = self._engine.progress.told_of_averages
        if follows_forward not in told:
            told.add(follows_forward)
            agreed_errors.warn_of_late_average(where, follows_forward=follows_forward)

    def _has_own_gradients(self, params: set[int]) -> bool:
        """Returns True if other ranks, too, may wait to average gradients of these parameters.

        Not if they have stepped on them inside `accumulate()`. A backward of the bare module counts
        only if no synchronization has followed the last step: beside one it is this rank's own.
        """
        progress, current_plan = self._engine.progress, self._current_plan
        if progress.gradients is Gradients.INCOMPLETE:
            return False
        if progress.accumulated is Accumulated.GRADIENTS:
            return not params <= progress.stepped_alone
        if progress.accumulated is Accumulated.FORWARD:  # or for a look at the loss
            has_mean = progress.steps.are_due_for(params) and current_plan.has_result
            return not has_mean and not params <= progress.stepped_alone
        if progress.gradients is Gradients.SOUND or progress.steps.are_due_for(params):
            return False
        hooks = current_plan.hooks
        return current_plan.has_result and not hooks.arrived_before.isdisjoint(
            hooks.indices(params)
        )

    def require_sound_gradients(self, params: set[int], *, reader: str) -> None:
        """Called when `reader` is about to use the gradients of these parameters, by id.

        Raises PhaseError if they are incomplete, and warns if they are this rank's own because no
        forward preceded the backward.
        """
        progress, hooks = self._engine.progress, self._current_plan.hooks
        where = f"{reader}, rank {self._current_plan.group.name}"
        if progress.gradients is Gradients.INCOMPLETE:
            # Whatever `.grad` holds: on the rank whose backward failed it is None, cleared or not,
            # if its bucket had left.
            raise agreed_errors.step_after_failure(where)
        if progress.gradients is Gradients.LOCAL and self._current_plan.has_result:
            local = hooks.arrived_before & hooks.indices(params)
            if local:
                progress.gradients = Gradients.REPORTED
                agreed_errors.warn_of_local_gradients(hooks.named_params[min(local)][0], where)

    def _params_of(self, optimizer: Optimizer) -> set[int] | None:
        """Returns the parameters of the optimizer, by id, or None if it has none of the model."""
        # An optimizer over shards has other tensors: if it were asked about those, every model
        # would search its parameters.
        stepped = list(params_of(optimizer))
        params = set(compress(map(id, stepped), map(isinstance, stepped, repeat(nn.Parameter))))
        if len(params) < len(stepped):  # TorchScript may have parameters that are plain tensors
            params |= self._current_plan.members.ids & set(map(id, stepped))
        if self._engine.is_closed or not self._current_plan.members.has_any_of(params):
            if self._current_plan.replaced:
                self._tell_of_replaced(optimizer, stepped)
            return None
        return params

    def _tell_of_replaced(self, optimizer: Optimizer, stepped: Sequence[Tensor]) -> None:
        """Warns once if `optimizer` has none of the model's parameters any more, but some that were
        replaced."""
        replaced = self._current_plan.replaced
        if self._engine.is_closed or self._has_replicas or self._current_plan.shards is not None:
            return  # nothing is synchronized any more, or an error follows
        # By identity: a new tensor may have the id of one that is gone.
        if any(id(param) in replaced and replaced[id(param)]() is param for param in stepped):
            replaced.clear()
            agreed_errors.warn_of_replaced(self._place(type(optimizer).__name__))

    def _require_stepper(self, optimizer: Optimizer) -> None:
        """Raises PhaseError if another optimizer is to step the model."""
        shards = self._current_plan.shards
        if shards is not None:
            shards.require_stepper(optimizer)
        elif not self._takes_any:
            kind = type(optimizer)
            name = kind.__name__
            if kind.__module__.startswith("torch.optim."):
                name = f"torch.optim.{name}"
            raise PhaseError(
                f"strategy={self._strategy!r} needs a sharded optimizer, and {kind.__name__} is "
                "not one.",
                where="the first step of the optimizer",
                remedy=f"Make it with undertow.ShardedOptimizer({name}, model, ...), or with "
                "undertow.shard_optimizer(optimizer, model).",
            )

    def _synchronize(self, optimizer: Optimizer, params: set[int]) -> None:
        """Runs the synchronizations that are owed before the gradients of these parameters, by id,
        are read."""
        engine, reader = self._engine, type(optimizer).__name__
        self.finish_before_step(params, reader=reader)
        progress = engine.progress
        is_sound = progress.gradients is Gradients.SOUND
        if is_sound and progress.accumulated is Accumulated.NOTHING:
            return  # the usual case
        self._average(optimizer, params)
        if progress.gradients is not Gradients.SOUND:
            self.require_sound_gradients(params, reader=reader)

    def _closure_ends(self, optimizer: Optimizer, params: set[int]) -> None:
        self._average(optimizer, params)
        self._engine.checks.require_alike()

    def _average(self, optimizer: Optimizer, params: set[int]) -> None:
        self.average_before_step(
            params,
            reader=type(optimizer).__name__,
            is_sharded=self._current_plan.shards is not None,
        )
