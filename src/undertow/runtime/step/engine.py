"""The phase of a step: when a round begins, when it ends, and the actions of all ranks after it.

    IDLE ──first gradient──> BACKWARD ──end of the outermost backward──> LAUNCHED ──every engine launched──> IDLE
                             hooks release ops                           the last bucket is sent             waits, binds

A round synchronizes gradients or only accumulates them, as decided when backward runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor

from undertow.config import SyncConfig
from undertow.runtime.comm.comm_hook import CommHook, no_second_hook
from undertow.runtime.comm.group import GroupRef, OwnGroup
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute import agreed_errors
from undertow.runtime.execute.hooks import OutermostEnd, is_watched
from undertow.runtime.execute.round import OpenRound, Round, RoundKind, RoundResult
from undertow.runtime.gradients.binding import gradients_aside
from undertow.runtime.model.module_params import ModuleParams
from undertow.runtime.replan.current_plan import CurrentPlan
from undertow.runtime.replan.param_hooks import Listeners, ParamHooks
from undertow.runtime.step.checks import Checks
from undertow.runtime.step.earlier_gradients import EarlierGradients
from undertow.runtime.step.optimizers_in_backward import OptimizersInBackward
from undertow.runtime.step.progress import Progress
from undertow.runtime.step.siblings import SiblingEngines, all_of
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.dist_autograd import DistributedBackwards


class Phase(IntEnum):
    """Where an engine is in a step; from CLOSED on it is closed."""

    IDLE = auto()  # no round is under way
    BACKWARD = auto()  # gradients arrive
    LAUNCHED = auto()  # the last bucket is sent, or may be
    CLOSED = auto()
    HANDED_OVER = auto()  # another engine has its parameters


_NEXT: dict[Phase, set[Phase]] = {
    Phase.IDLE: {Phase.BACKWARD, Phase.CLOSED},
    Phase.BACKWARD: {Phase.LAUNCHED, Phase.CLOSED},
    Phase.LAUNCHED: {Phase.IDLE, Phase.CLOSED},
    Phase.CLOSED: {Phase.HANDED_OVER},
    Phase.HANDED_OVER: set(),
}


class Engine:
    """Synchronizes the gradients of `members` over `group`, backward after backward.

    All ranks `open` it, at the latest when the first round begins.
    """

    def __init__(self, members: ModuleParams, group: OwnGroup, config: SyncConfig, recorder: Recorder) -> None:
        self.is_accumulating = False
        self.also_awaited: list[torch.futures.Future[Any]] = []  # by the end of the next round
        self.phase = Phase.IDLE
        self._recorder = recorder
        self.progress = Progress()
        group.num_steps, group.is_idle = self.progress.rounds, self.progress.is_idle
        self._open: OpenRound | None = None
        self._end = OutermostEnd(self._launch_rest)
        self._optimizers = OptimizersInBackward()
        self.current_plan = CurrentPlan(members, group, config, recorder, Listeners(self._fill, self._enter, self._thawed))
        self.earlier: EarlierGradients | None = None  # the mean needs none: the mean of a mean and of new gradients is their mean
        if config.op == "weighted" or self.current_plan.now.compiled.reducer.divisor != group.num_ranks:
            is_weighted = config.op == "weighted"
            self.earlier = EarlierGradients(self.current_plan, is_weighted=is_weighted, is_between=self._is_between_rounds)
        self.siblings = SiblingEngines([self])
        self.checks = Checks(self.current_plan, config)

    @property
    def is_busy(self) -> bool:
        """True if a round is under way."""
        return self._open is not None

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters without a gradient on this rank in the last synchronized step."""
        hooks = self.current_plan.now.hooks
        if hooks.alone is None:
            return self.progress.unused
        order = [param for bucket in self.current_plan.plan.buckets for param in bucket.params]
        return tuple(hooks.named_params[param][0] for param in dict.fromkeys(order) if param in hooks.alone.unused)

    def accumulates(self, value: bool) -> None:
        """Sets whether the following backwards only accumulate."""
        self.is_accumulating = value
        alone = self.current_plan.now.hooks.alone
        if alone is not None:
            alone.accumulates(value)

    def forward_begins(self, *, is_training: bool) -> None:
        """Called before every forward that a backward may follow."""
        current_plan = self.current_plan
        current_plan.group.require_no_fault()
        if self._open is not None:
            self._abandon()
        if self.also_awaited:
            self._await_others()
        if self.checks.replicas is not None:
            self.checks.require_alike()
        current_plan.look()
        if current_plan.is_active:
            self._prepare(current_plan.now.hooks)
        if is_training:
            self._training_forward_begins()

    def _training_forward_begins(self) -> None:
        current_plan, progress = self.current_plan, self.progress
        now, is_active = current_plan.now, current_plan.is_active
        current_plan.group.trains_here()
        if not is_active and not self.is_accumulating:
            self._recorder.round_ends(())  # there are no rounds that would end a step
        self._recorder.forward_begins()
        if now.hooks.probe is not None:
            now.hooks.probe.forward_begins()
        if now.hooks.alone is not None:
            progress.has_accumulated &= not now.hooks.alone.is_complete
            now.hooks.alone.forward_begins()
        if is_active and not progress.has_begun:
            now.compiled.executor.look()
            if self.earlier is not None:
                self.earlier.forward_begins()
        progress.forward_begins(is_accumulating=self.is_accumulating and not self.synchronizes)

    def use_hook(self, hook: CommHook) -> None:
        """Reduces buckets by `hook` from the next round on; PhaseError in a round, or if there is a hook already."""
        earlier = self.current_plan.now.compiled.reducer.hook
        if self._open is not None or earlier is not None:
            raise no_second_hook(earlier)
        self.current_plan.use_hook(hook)

    def may_hand_over(self, params: frozenset[int], group: GroupRef) -> bool:
        """Returns True if another engine that has these parameters, by id, over `group` may take this one's over."""
        if self.is_busy and private.graph_task_id() != -1:
            return False
        self.current_plan.apply_changes()
        return params >= self.current_plan.now.hooks.ids and group.ranks == self.current_plan.group.user.ranks

    def hand_over(self) -> set[int]:
        """Closes; returns the parameters, by id, that have accumulated a gradient since the last synchronization."""
        if self.earlier is not None:
            self.earlier.weights.require_none()
        self.complete()
        self.current_plan.wait_for_parameters()
        self.close()
        self._enter_phase(Phase.HANDED_OVER)
        return self.current_plan.now.hooks.accumulated_ids()

    def take_from(self, accumulated: set[int]) -> None:
        """Takes over the gradients that another engine has handed over."""
        hooks = self.current_plan.now.hooks
        hooks.arrived_before |= hooks.indices(accumulated)
        self.progress.has_accumulated |= bool(accumulated)

    def finish_before_step(self, params: set[int], *, steps: bool) -> None:
        """Runs a round if one is owed before an optimizer `steps` on these parameters, by id, or their gradients are read.

        Raises PhaseError inside a backward.
        """
        current_plan, progress = self.current_plan, self.progress
        if self._open is not None and private.graph_task_id() != -1:
            raise agreed_errors.step_within_backward(f"synchronization {self._open.round.number}, rank {current_plan.group.rank}")
        if self._open is not None:
            self._abandon()
        is_up_to_date = progress.has_result_for(params) and not current_plan.members.has_new_of(params)
        if not is_up_to_date:
            current_plan.apply_changes()
            current_plan.mark_stale()  # the next backward may run without a forward that finds a change
            progress.is_owed |= current_plan.now.retiring is not None  # parameters that no forward has found
        if progress.is_owed and not (is_up_to_date and current_plan.has_result):
            self._run_outside_of_backward(steps=True)
        if self.checks.replicas is not None:
            self.checks.require_alike()
        if steps:
            progress.steps(params)
            if current_plan.now.hooks.alone is not None:
                current_plan.now.hooks.alone.steps()

    @property
    def is_step_empty(self) -> bool:
        """True if neither a training forward nor a synchronization has begun the step."""
        return not self.progress.is_owed and not (self.progress.is_step_due and self.current_plan.has_result)

    def finish(self) -> None:
        """Runs a round, unless one has run since the last training forward or step; for a rank without gradients."""
        num_rounds = self.progress.num_rounds
        self._abandon()
        was_abandoned = self.progress.num_rounds > num_rounds  # and its gradients may be gone
        begins = self.is_step_empty and not was_abandoned
        if begins:
            self.progress.forgets_unused()
        if self.progress.is_owed or begins:
            self._run_outside_of_backward()

    def shadow(self) -> None:
        """Takes part in a round of the other ranks, without data; gradients that were not synchronized drop out."""
        self._abandon()
        self.current_plan.now.hooks.arrived_before.clear()
        if self.earlier is not None:
            self.earlier.weights.forget_accumulated()
        self.current_plan.apply_changes()
        if self._meets:
            with gradients_aside(self.current_plan.now.hooks.params):
                self._begin(RoundKind.SHADOW)
                self._launch_rest()
                self.complete()

    def complete(self) -> None:
        """Waits for launched buckets and binds the gradients; raises the error that the ranks have agreed on."""
        this = self._open
        if this is None or this.ending is None:
            self._abandon()
            return
        try:
            for _ in this.ending:
                pass
        finally:
            if self._open is this:  # an error has ended it
                self._close_round()

    def end_failed_backward(self) -> None:
        """Ends a round that an exception in backward has left open, before partly updated parameters are read."""
        if self.phase is Phase.BACKWARD and not self._end.is_coming:  # else one runs in another thread
            self._abandon()

    def close(self) -> None:
        """Ends the round under way and removes the hooks; gradients stay in place."""
        if self.phase < Phase.CLOSED:
            self._enter_phase(Phase.CLOSED)
        if self.earlier is not None:
            self.earlier.give_back()
        self.current_plan.close()
        self._optimizers.close()

    @property
    def synchronizes(self) -> bool:
        """True if a backward that runs now communicates, as one that only accumulates does if it adds up shards."""
        current_plan = self.current_plan
        return not self.is_accumulating or (current_plan.is_active and current_plan.now.compiled.strategy.reduces_micro_batches)

    @property
    def is_backward_due(self) -> bool:
        """True if a training forward has run whose backward is to synchronize, and no synchronization has followed."""
        return self.progress.is_owed and self._meets

    def _enter_phase(self, phase: Phase) -> None:
        assert phase in _NEXT[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def _prepare(self, hooks: ParamHooks) -> None:
        """Does the preparations that only a forward makes possible."""
        hooks.arrival_hooks.run_last()
        if hooks is not self._optimizers.seen:
            self._optimizers.take_over(hooks)
        if hooks.distributed is None and private.is_rpc_running():
            hooks.distributed = DistributedBackwards(hooks.params, is_local=lambda: self.is_busy, on_end=self._reduce_elsewhere)
        if hooks.distributed is not None:
            hooks.distributed.forward_begins()

    def _reduce_elsewhere(self, gradients: dict[int, Tensor]) -> None:
        """Runs a round for gradients that are not in `.grad`, at the end of their backward."""
        if self.is_accumulating:
            return
        hooks = self.current_plan.now.hooks
        params = hooks.params
        with gradients_aside(params):
            self._begin(RoundKind.REDUCE)
            for index, gradient in gradients.items():
                params[index].grad = gradient
                hooks.arrivals.note(index)
            self._launch_rest()
            self.complete()
            for index, gradient in gradients.items():
                gradient.copy_(params[index].grad)  # type: ignore[arg-type]  # it is the mean

    @private.untraced
    def _enter(self, hooks: ParamHooks, task: int, param: int) -> None:
        """Called with the first gradient in backward `task`, of `param` of `hooks`."""
        current_plan, gradient_of = self.current_plan, id(hooks.named_params[param][1])
        before = current_plan.now.hooks
        if self._is_between_rounds():
            if before.has_thawed():
                current_plan.mark_stale()
            current_plan.apply_changes()
            if gradient_of not in current_plan.now.hooks.ids:
                return  # it was in the module for one forward only, or no longer is
            self._take_part_all(task)
        self._end.watch(task)
        now = current_plan.now.hooks
        if now is not before and now is not hooks:  # since a moment ago, and this gradient counts there
            for index in now.indices({gradient_of}):
                now.arrivals.arrive(index)

    @private.untraced
    def _thawed(self, param: Tensor) -> None:
        """Called with a gradient of a parameter that was frozen when the plan was made; PhaseError if no plan will have it."""
        current_plan = self.current_plan
        if (
            self.phase >= Phase.CLOSED
            or id(param) in current_plan.now.hooks.ids
            or param.grad is None
            or is_watched(param, but=self)
        ):
            return  # counted elsewhere, or frozen again
        if self._is_between_rounds():
            task = private.graph_task_id()
            current_plan.mark_stale()
            current_plan.apply_changes()
            if id(param) in current_plan.now.hooks.ids:
                self._take_part_all(task)
                self._end.watch(task)
                return
        current_plan.require_not_the_modules(param)

    def _take_part_all(self, task: int) -> None:
        if self.siblings.are_several:
            self.siblings.take_part(task)
        else:
            self.take_part(task)

    def take_part(self, task: int) -> None:
        """Begins a round in backward `task`, unless one is under way, with or without gradients for this engine."""
        if self.current_plan.now.hooks.alone is not None:
            self.current_plan.now.hooks.alone.backward_runs()
        if self.current_plan.is_active and self.phase < Phase.CLOSED and self._is_between_rounds():
            self._end.watch(task)  # first: a round that is open without an end to come counts as a failed backward
            accumulates = self.is_accumulating and not self.synchronizes
            self._begin(RoundKind.ACCUMULATE if accumulates else RoundKind.REDUCE)

    def finish_owed(self) -> None:
        """Runs a round if one is owed: a sibling has."""
        if self.progress.is_owed:
            self._run_outside_of_backward()

    def _run_outside_of_backward(self, *, steps: bool = False) -> None:
        own = (self.launch_accumulated, self.complete) if self._meets and self.phase < Phase.CLOSED else ()
        self.progress.is_owed = False
        if self.current_plan.now.hooks.alone is not None:
            self.current_plan.now.hooks.alone.backward_runs(steps=steps)
        all_of(*own, self.siblings.finish_owed)

    @property
    def _meets(self) -> bool:
        """True if the other ranks are needed: a rank that trains nothing is needed for what its siblings train."""
        return self.current_plan.trains or (self.current_plan.is_active and self.siblings.are_several)

    def launch_accumulated(self, *, op: str | None = None) -> None:
        """Sends accumulated gradients, outside of a backward; `complete` waits for them."""
        if self._open is not None:
            raise agreed_errors.synchronized_already(self.progress.num_rounds)
        self._begin(RoundKind.REDUCE, op=op)
        self._launch_rest()

    def refuse(self, misuse: agreed_errors.Misuse) -> None:
        """Tells all ranks, in a round, that a reduction by hand is wrong here; `.grad` stays as it is. Raises its PhaseError."""
        number = self.progress.num_rounds
        self._begin(RoundKind.REDUCE)
        assert self._open is not None
        self._open.result.misuse = misuse
        self._give_up(self._open)
        # On a device, where the others read it later.
        raise agreed_errors.misused(misuse, [self.current_plan.group.rank], number=number)

    def abandon_launched(self) -> bool | None:
        """Ends the round under way; returns True if its buckets were launched, and None if there was none."""
        if self._open is None:
            return None
        was_launched = self.phase is Phase.LAUNCHED
        self._abandon()
        return was_launched

    def _begin(self, kind: RoundKind, *, op: str | None = None) -> None:
        current_plan, progress = self.current_plan, self.progress
        current_plan.apply_changes()
        if current_plan.now.hooks is not self._optimizers.seen:
            self._optimizers.take_over(current_plan.now.hooks)
        is_synchronized = kind is not RoundKind.ACCUMULATE
        if is_synchronized:
            if progress.num_rounds == 0:
                current_plan.open()
            current_plan.adopt_plan()
        now, is_last = current_plan.now, not self.is_accumulating
        arrivals, compiled = now.hooks.arrivals, now.compiled
        weights = None if self.earlier is None else self.earlier.round_begins(kind, is_last=is_last)
        arrivals.reset()
        this_round = Round(
            kind=kind,
            number=progress.num_rounds + (is_synchronized and now.retiring is not None and current_plan.is_counted_apart),
            generation=compiled.generation,
            mode=None if kind is RoundKind.SHADOW else progress.mode,
            is_last=is_last,
            not_arrived=self._not_arrived,
            arrivals=arrivals,
            has_other_buffers=is_synchronized and current_plan.has_other_buffers,
            is_read_at_once=current_plan.must_read_at_once or self.checks.must_be_read(progress.num_rounds),
            rescale=progress.rescale * (1.0 if op is None else compiled.reducer.factor(op)),
            op=op,
            weights=weights,
        )
        # A hook that user code has registered since the forward may run after Undertow's, once, on the first gradient.
        holds_back = now.retiring is not None or now.hooks.arrival_hooks.run_last()
        result = RoundResult(this_round)
        self._open = OpenRound(this_round, result, compiled.releases(this_round), holds_back=holds_back)
        if self.phase is Phase.IDLE:
            self._enter_phase(Phase.BACKWARD)
        compiled.executor.begin(result)
        self._recorder.backward_begins(generation=compiled.generation)

    def _is_between_rounds(self) -> bool:
        this = self._open
        if this is not None and not self._end.is_coming:  # a new backward has begun, and this round is not its own
            if this.ending is not None:
                raise agreed_errors.not_waited_for(this.round.number)
            self._give_up(this)
        return self._open is None

    @private.untraced
    def _fill(self, bucket: int) -> None:
        if self._open is not None and not self._open.holds_back:
            self.current_plan.now.compiled.executor.run(self._open.releases.fill(bucket))

    def _launch_rest(self) -> None:
        """Called at the end of backward: parameters without a gradient are unused here; launches the remaining buckets."""
        this = self._open
        if this is None or this.ending is not None:
            return  # a nested backward has reached the outermost end as well
        self._recorder.backward_ends()
        hooks = self.current_plan.now.hooks
        # Gradients that something other than autograd has written into `.grad` count as well.
        absent = hooks.arrivals.absent
        if absent:
            for param in self.current_plan.now.compiled.executor.written(absent - hooks.arrived_before):
                hooks.arrivals.note(param)
        self._end_backward(this)
        next(this.ending)  # type: ignore[call-overload]
        if private.graph_task_id() != -1:
            private.call_after_backward(self._go_on)

    @private.untraced
    def _go_on(self) -> None:
        """Called after the callbacks of all other engines: with several models in one backward all launch, then all wait."""
        this = self._open
        if this is None or this.ending is None:
            return
        try:
            next(this.ending)
        except StopIteration:
            return
        except BaseException:
            self._close_round()
            self.siblings.complete()
            raise
        private.call_after_backward(self._go_on)

    def _end_backward(self, this: OpenRound) -> None:
        this.ending = self._end_round(this)
        if self.phase is Phase.BACKWARD:
            self._enter_phase(Phase.LAUNCHED)

    def _end_round(self, this: OpenRound) -> Iterator[None]:
        """Runs the rest of a round after backward, in parts: yields before each wait for other ranks."""
        current_plan, result = self.current_plan, this.result
        if current_plan.now.retiring is not None and this.round.is_synchronized:
            # Also if the ranks do not agree: all of them have run it.
            self.progress.num_rounds += current_plan.is_counted_apart
            yield from current_plan.retire(this.round)
        executor, hooks = current_plan.now.compiled.executor, current_plan.now.hooks
        executor.run(this.releases.end_backward())
        yield
        executor.run(this.releases.join())
        if self.also_awaited:
            self._await_others()
        if result.readings and result.late_buckets:
            executor.launch_late_parts(result.late_buckets)
            yield
            executor.add_late_parts()
            hooks.arrivals.learn_repeats()
        if this.round.has_other_buffers:
            others = result.reported("other_buffers_ranks", overdue=False)
            if len(others) == current_plan.group.num_ranks:
                yield from current_plan.compare_buffers()
        if self.earlier is not None:
            self.earlier.round_is_bound(result)
        self._close_round()
        if this.round.is_synchronized:
            self._round_ends(result)
        else:
            hooks.arrived_before |= hooks.arrivals.arrived
            self.progress.has_accumulated = True
            current_plan.mark_stale()

    def _await_others(self) -> None:
        awaited, self.also_awaited = self.also_awaited, []
        for future in awaited:
            future.wait()

    def _close_round(self) -> None:
        self._open = None
        if self.phase is Phase.LAUNCHED:
            self._enter_phase(Phase.IDLE)
        self.current_plan.now.hooks.arrivals.forget_traversal()
        self._end.forget()

    def _abandon(self) -> None:
        """Ends a round that an exception in backward has left open, and waits for one that was launched by hand."""
        if self._open is None or private.graph_task_id() != -1:
            return
        if self._open.ending is not None:
            self.complete()
        else:
            self._give_up(self._open)

    def _give_up(self, this: OpenRound) -> None:
        """Ends a round whose backward failed: the other ranks wait for this rank's buckets, and drop them.

        Afterwards every `.grad` is as it is now: the user may have cleared it, or another backward may have begun.
        """
        this.result.has_failed = this.round.is_synchronized
        try:
            with gradients_aside(self.current_plan.now.hooks.params) if this.result.has_failed else contextlib.nullcontext():
                self._recorder.backward_ends()
                self._end_backward(this)
                self.complete()
        finally:
            if self.earlier is not None:
                self.earlier.give_back()

    def _not_arrived(self, bucket: int) -> list[int]:
        """Returns the positions in `bucket` of parameters without a gradient since the last synchronization."""
        now = self.current_plan.now
        missing = now.hooks.arrivals.missing(bucket)
        return now.hooks.not_arrived(now.compiled.plan.buckets[bucket].params, missing) if missing else []

    def _round_ends(self, result: RoundResult) -> None:
        """Runs the actions of every rank after a complete synchronization; raises the error that the ranks have agreed on."""
        this_round, current_plan, progress = result.round, self.current_plan, self.progress
        self._recorder.round_ends(result.busy_ms)
        progress.round_ends(has_failed=result.has_failed, is_last=this_round.is_last)
        hooks, plan = current_plan.now.hooks, current_plan.now.compiled.plan
        if not result.has_failed:
            hooks.arrived_before.clear()
            current_plan.mark_stale()
        names = hooks.names_of(plan, result.unused) if any(result.unused.values()) else ()
        progress.notes_unused(names, is_last=this_round.is_last, params=hooks.named_params)
        if self.earlier is not None and this_round.weights is not None:
            self.earlier.weights.ends(this_round.weights)
        if self.checks.numbers.is_on:
            self.checks.numbers.round_ends(result, plan)
        if result.readings:
            agreed_errors.require_sound(result, rank=current_plan.group.rank, places=current_plan.group.places)
        if self.earlier is not None and not result.has_failed:  # a backward that has failed has another error to raise
            self.earlier.require_sound(this_round)
        if result.readings:
            current_plan.require_changed_alike(result)
        if result.has_failed:
            return  # it has left the other ranks already
        current_plan.round_ended(result)
        if self.checks.replicas is not None:
            self.checks.round_was_sound(result)
        if self._optimizers.rearm:
            self._optimizers.step()
