"""Rounds of an engine: how they open, launch, wait and end.

IDLE ──first gradient──> BACKWARD ──end of the outermost backward──> LAUNCHED ──every engine launched──> IDLE
                         hooks release ops                           the last bucket is sent             waits, binds
"""

import contextlib
from collections.abc import Iterator
from enum import IntEnum, auto
from typing import Any

import torch

from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute import agreed_errors
from undertow.runtime.execute.hooks import OutermostEnd
from undertow.runtime.execute.round import OpenRound, Round, RoundKind, RoundResult
from undertow.runtime.gradients.binding import gradients_aside
from undertow.runtime.replan.current_plan import CurrentPlan
from undertow.runtime.step.checks import Checks
from undertow.runtime.step.earlier_gradients import EarlierGradients
from undertow.runtime.step.optimizers_in_backward import OptimizersInBackward
from undertow.runtime.step.progress import Progress
from undertow.runtime.step.siblings import SiblingEngines
from undertow.runtime.torch_private import private


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
    Phase.HANDED_OVER: {Phase.HANDED_OVER},  # again, after a move to another group has failed
}


class RoundRunner:
    """Runs the rounds of one engine, one at a time."""

    is_accumulating: bool  # a backward that runs now only accumulates
    also_awaited: list[torch.futures.Future[Any]]  # by the end of the next round
    phase: Phase
    progress: Progress
    current_plan: CurrentPlan
    earlier: EarlierGradients | None  # None for the mean, for which nothing is kept apart
    siblings: SiblingEngines
    checks: Checks
    _open: OpenRound | None
    _end: OutermostEnd
    _optimizers: OptimizersInBackward
    recorder: Recorder

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

    def _enter_phase(self, phase: Phase) -> None:
        assert phase in _NEXT[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def _begin(self, kind: RoundKind, *, op: str | None = None) -> None:
        current_plan, progress = self.current_plan, self.progress
        if current_plan.is_stale:
            current_plan.apply_changes()
        if current_plan.now.hooks is not self._optimizers.seen:
            self._optimizers.take_over(current_plan.now.hooks)
        is_synchronized = kind is not RoundKind.ACCUMULATE
        if is_synchronized:
            if progress.num_rounds == 0:
                current_plan.open()
            current_plan.adopt_plan()
        now, is_last = current_plan.now, not self.is_accumulating
        arrivals, tuning, compiled = now.hooks.arrivals, now.hooks.tuning, now.compiled
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
            is_read_at_once=(tuning is not None and tuning.is_about_to_communicate)
            or (self.checks.are_on and self.checks.must_be_read(progress.num_rounds)),
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
        self.recorder.backward_begins(generation=compiled.generation)
        compiled.executor.begin(result)

    def _is_between_rounds(self) -> bool:
        this = self._open
        if this is not None and not self._end.is_coming:  # a new backward has begun, and this round is not its own
            if this.ending is not None:
                raise agreed_errors.not_waited_for(this.round.number)
            self._give_up(this)
        return self._open is None

    @private.untraced
    def _fill(self, bucket: int) -> None:
        if self._open is not None and not self._open.holds_back and (ops := self._open.releases.fill(bucket)):
            self.current_plan.now.compiled.executor.run(ops)

    def _launch_rest(self) -> None:
        """Called at the end of backward: parameters without a gradient are unused here; launches the remaining buckets."""
        this = self._open
        if this is None or this.ending is not None:
            return  # a nested backward has reached the outermost end as well
        self.recorder.backward_ends()
        hooks = self.current_plan.now.hooks
        # Gradients that something other than autograd has written into `.grad` count as well.
        absent = hooks.arrivals.absent
        if absent:
            for param in self.current_plan.now.compiled.executor.written(absent - hooks.arrived_before):
                hooks.arrivals.note(param)
        this.ending = self._end_round(this)
        if self.phase is Phase.BACKWARD:
            self._enter_phase(Phase.LAUNCHED)
        next(this.ending)
        if private.graph_task_id() != -1:
            private.call_after_backward(self._go_on)

    @private.left_alone
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

    def _end_round(self, this: OpenRound) -> Iterator[None]:
        """Runs the rest of a round after backward, in parts: yields before each wait for other ranks."""
        current_plan, result = self.current_plan, this.result
        if current_plan.now.retiring is not None and this.round.is_synchronized:
            # Also if the ranks do not agree: all of them have run it.
            self.progress.num_rounds += current_plan.is_counted_apart
            yield from current_plan.retire(this.round)
        executor, hooks = current_plan.now.compiled.executor, current_plan.now.hooks
        if ops := this.releases.end_backward():
            executor.run(ops)
        yield
        if ops := this.releases.join():
            executor.run(ops)
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
                self.recorder.backward_ends()
                this.ending = self._end_round(this)
                if self.phase is Phase.BACKWARD:
                    self._enter_phase(Phase.LAUNCHED)
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
        self.recorder.round_ends(result.busy_ms)
        hooks, plan = current_plan.now.hooks, current_plan.now.compiled.plan
        unused = hooks.names_of(plan, result.unused) if any(result.unused.values()) else ()
        progress.round_ends(unused, has_failed=result.has_failed, is_last=this_round.is_last, params=hooks.named_params)
        if not result.has_failed:
            hooks.arrived_before.clear()
            current_plan.is_stale |= current_plan.is_active
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
