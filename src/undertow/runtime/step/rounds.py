"""Rounds of an engine: how they open, launch, wait and end.

IDLE ──first gradient──> BACKWARD ──end of the outermost backward──> LAUNCHED ──every engine launched──> IDLE
                         hooks release ops                           the last bucket is sent             waits, binds
"""

import contextlib
from collections.abc import Collection, Generator, Sequence
from enum import IntEnum, auto
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any

import torch
from torch import Tensor

from undertow.config import SyncConfig
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute import agreed_errors
from undertow.runtime.execute.hooks import OutermostEnd, is_watched, users_hooks
from undertow.runtime.execute.round import OpenRound, Round, RoundKind, RoundResult, Settings
from undertow.runtime.gradients.binding import gradients_aside
from undertow.runtime.model.module_params import ModuleParams
from undertow.runtime.replan.current_plan import CurrentPlan
from undertow.runtime.replan.param_hooks import Listeners, ParamHooks
from undertow.runtime.step.checks import Checks
from undertow.runtime.step.earlier_gradients import EarlierGradients
from undertow.runtime.step.optimizers_in_backward import OptimizersInBackward
from undertow.runtime.step.siblings import SiblingEngines
from undertow.runtime.torch_private import private


class Phase(IntEnum):
    """Where an engine is in a step; from CLOSED on it is closed."""

    IDLE = auto()  # no round is under way
    BACKWARD = auto()  # gradients arrive
    LAUNCHED = auto()  # the last bucket is sent, or may be
    CLOSED = auto()
    HANDED_OVER = auto()  # another engine has its parameters


class Forward(IntEnum):
    """The last forward that a backward may follow, if it ran since all parameters were stepped."""

    NONE = auto()
    ENDED = auto()
    RUNNING = auto()  # a training loop inside of it may step


class Gradients(IntEnum):
    """The state of the gradients since the last synchronization that succeeded; a worse one replaces a better one."""

    SOUND = auto()
    LOCAL = auto()  # a backward that followed no forward has added to this rank's
    REPORTED = auto()  # the same, and a warning says so
    INCOMPLETE = auto()  # a backward or a synchronization has failed, or is under way


_NEXT: dict[Phase, set[Phase]] = {
    Phase.IDLE: {Phase.BACKWARD, Phase.CLOSED},
    Phase.BACKWARD: {Phase.LAUNCHED, Phase.CLOSED},
    Phase.LAUNCHED: {Phase.IDLE, Phase.CLOSED},
    Phase.CLOSED: {Phase.HANDED_OVER},
    Phase.HANDED_OVER: {Phase.HANDED_OVER},  # again, after a move to another group has failed
}


class Unused:
    """Names of the parameters without a gradient on this rank, over the synchronizations of a step."""

    def __init__(self) -> None:
        self.last: tuple[str, ...] = ()  # in the last step
        self.so_far: tuple[str, ...] | None = None  # in the synchronizations of this one
        self._is_last_run = True  # of the step, which adds up no more gradients

    def forward_begins(self) -> None:
        """Called before a training forward."""
        self.last = ()
        if self._is_last_run:
            self.so_far = None

    def round_ends(self, unused: tuple[str, ...], params: Sequence[tuple[str, Tensor]], *, is_last: bool) -> None:
        """Called after a round that found parameters with these names, of `params`, unused."""
        before = self.so_far
        if before is not None and unused:
            cleared = {name for name, param in params if param.grad is None}  # so an earlier gradient counts no more
            unused = tuple(name for name in unused if name in before or name in cleared)
        self.so_far, self._is_last_run = unused, is_last
        if is_last:
            self.last = unused


class Steps:
    """The steps of optimizers since the last round."""

    def __init__(self) -> None:
        self.settings: Settings = ()
        self._params: set[int] | None = None  # by id, those that were updated; None before the first round
        self._have_ever_been = False

    @property
    def are_due(self) -> bool:
        """True if no optimizer has stepped since the last round."""
        return self._params is not None and not self._params

    @property
    def mode(self) -> int | None:
        """Part of the signature: ranks differ if one has stepped since the last round and another has not.

        None, which accepts the others' mode, on a rank that leaves steps to another one, or steps without torch's optimizers.
        """
        return int(self.are_due) if self._have_ever_been else None

    @property
    def digest(self) -> int | None:
        """The same on ranks that have stepped with the same settings. None, which accepts the others', on a rank that has not."""
        return agreed_errors.digest_of(self.settings) if self.settings else None

    def are_due_for(self, params: Collection[int]) -> bool:
        """Returns True if these parameters, by id, have not stepped on the last round's result yet."""
        return self._params is not None and self._params.isdisjoint(params)

    def add(self, params: set[int], settings: Settings) -> set[int]:
        """Adds a step of these parameters, by id, with these settings; returns all that have stepped since the last round."""
        if not self._params or self._params.isdisjoint(params):  # else an optimizer within one that has told, or another step
            self.settings += settings
        stepped = self._params | params if self._params else params
        if self._params is not None:
            self._params = stepped
        self._have_ever_been = True
        return stepped

    def round_ends(self) -> None:
        self._params, self.settings = set(), ()

    def join_ends(self) -> None:
        self._params, self.settings = None, ()


class Progress:
    """The state of an engine that outlives a round.

    A rank owes a round when a training forward ran and no round has followed: the other ranks may be waiting in theirs.
    An optimizer whose parameters have not stepped since the last round steps on what that round has brought; a forward in
    between was for something else. A backward that follows no forward since all parameters were stepped is this rank's own.
    """

    def __init__(self) -> None:
        self.num_rounds = 0  # synchronized ones
        self.rescale = 1.0  # factor for the mean over all ranks, if some of them have run out of data
        self.is_owed = False
        self.num_forwards = 0  # training forwards since the last synchronization
        self.num_forwards_before = 1  # training forwards between the last one and the one before
        self.forward = Forward.NONE
        self.gradients = Gradients.SOUND
        self.has_accumulated = False  # since the last synchronization
        self.steps_in_shards = False  # a sharded optimizer steps, or is going to
        self.are_buffers_due = True  # before the next training forward, unless it continues a step
        self.unused = Unused()
        self.steps = Steps()

    @property
    def has_begun(self) -> bool:
        """True if a training forward has run since the last synchronization."""
        return self.num_forwards > 0

    def forward_begins(self, *, synchronizes: bool, is_last: bool) -> None:
        """Called before a training forward."""
        self.unused.forward_begins()
        self.is_owed = synchronizes
        self.num_forwards += 1
        self.has_accumulated |= not synchronizes
        self.are_buffers_due = is_last

    def round_ends(self, *, has_failed: bool, is_last: bool) -> None:
        """Called after a round; gradients stay accumulated if it was not the last one of the step: they are reduced already."""
        self.num_rounds += 1
        self.is_owed = False
        self.num_forwards_before, self.num_forwards = self.num_forwards, 0
        self.are_buffers_due = is_last
        self.has_accumulated = (self.has_accumulated and has_failed) or not is_last
        self.steps.round_ends()

    def optimizer_steps(self, params: set[int], settings: Settings, *, of: frozenset[int], has_closure: bool) -> None:
        """Called before an optimizer updates these parameters, by id, with these settings; `of` are all that are trained."""
        stepped = self.steps.add(params, settings)
        if self.forward is Forward.ENDED and stepped >= of and not has_closure:  # whose backward is still to come
            self.forward = Forward.NONE
        self.unused.so_far = None

    def join_ends(self) -> None:
        """Called when all ranks contribute again, and are at the same place as before the first round."""
        self.rescale = 1.0
        self.are_buffers_due = True
        self.steps.join_ends()


class RoundRunner:
    """Runs the rounds of one engine, one at a time."""

    def __init__(self, members: ModuleParams, group: OwnGroup, config: SyncConfig, recorder: Recorder) -> None:
        self.is_accumulating = False  # a backward that runs now only accumulates
        self.also_awaited: list[torch.futures.Future[Any]] = []  # by the end of the next round
        self.phase = Phase.IDLE
        self.recorder = recorder
        self.progress = Progress()
        group.here.progress = self.progress  # read by other threads, which must not keep the engine alive
        self._open: OpenRound | None = None
        # After a backward that has failed, the next gradient looks whether there is a round.
        self._end = OutermostEnd(self._launch_rest, lambda: self.current_plan.now.hooks.arrivals.forget_traversal())
        self._optimizers = OptimizersInBackward()
        self.current_plan = CurrentPlan(members, group, config, recorder, Listeners(self, self._fill, self._enter, self._thawed))
        self.earlier: EarlierGradients | None = None  # for the mean, nothing is kept apart
        if config.op == "weighted" or self.current_plan.now.compiled.reducer.divisor != group.num_ranks:
            is_weighted = config.op == "weighted"
            self.earlier = EarlierGradients(self.current_plan, is_weighted=is_weighted, is_between=self._is_between_rounds)
        self.siblings = SiblingEngines([self])
        self.checks = Checks(self.current_plan, config)

    def complete(self) -> None:
        """Waits for launched buckets and binds the gradients; raises the error that the ranks have agreed on."""
        this = self._open
        if this is None or this.ending is None:
            self._abandon()
            return
        if getgeneratorstate(this.ending) == GEN_RUNNING:  # a signal handler calls this in the middle of it
            return
        try:
            for _ in this.ending:
                pass
        finally:
            if self._open is this:  # an error has ended it
                self._close_round()

    def _enter_phase(self, phase: Phase) -> None:
        assert phase in _NEXT[self.phase], f"{self.phase!r} -> {phase!r}"
        self.phase = phase

    def _begin(self, kind: RoundKind, *, op: str | None = None) -> None:
        current_plan, progress = self.current_plan, self.progress
        if current_plan.is_stale:
            current_plan.apply_changes()
        if current_plan.now.hooks is not self._optimizers.seen:
            self._optimizers.take_over(current_plan.now.hooks)
        # A hook that user code has registered since the forward may run after Undertow's, once, on the first gradient.
        is_overtaken = current_plan.now.hooks.arrival_hooks.run_last()
        is_synchronized = kind is not RoundKind.ACCUMULATE
        if is_synchronized:
            if progress.num_rounds == 0:
                current_plan.open()
            current_plan.adopt_plan()
        now, is_last = current_plan.now, not self.is_accumulating
        arrivals, tuning, compiled = now.hooks.arrivals, now.hooks.tuning, now.compiled
        weights = None if self.earlier is None else self.earlier.round_begins(kind, is_last=is_last)
        arrivals.reset()
        is_telling = is_synchronized and kind is not RoundKind.SHADOW
        loaded = self.checks.loads.digest() if is_telling and self.checks.loads.before else 0
        this_round = Round(
            kind=kind,
            number=progress.num_rounds + (is_synchronized and now.retiring is not None and current_plan.is_counted_apart),
            generation=compiled.generation,
            mode=None if kind is RoundKind.SHADOW else progress.steps.mode,
            settings=progress.steps.settings,
            loaded=loaded,
            alike=(progress.steps.digest, loaded) if is_telling else (None, None),
            is_last=is_last,
            not_arrived=self._not_arrived,
            arrivals=arrivals,
            is_read_at_once=(tuning is not None and tuning.is_about_to_communicate)
            or bool(loaded)
            or (self.checks.are_on and self.checks.must_be_read(progress.num_rounds)),
            rescale=progress.rescale * (1.0 if op is None else compiled.reducer.factor(op)),
            op=op,
            weights=weights,
            is_synchronized=is_synchronized,
            keeps_own=progress.steps_in_shards and weights is None and op is None,
        )
        holds_back = now.retiring is not None or is_overtaken
        result = RoundResult(this_round)
        # Under some strategies a micro-batch is reduced to shards, and nothing more.
        adds_up_shards = not is_last and compiled.strategy.reduces_micro_batches
        releases = compiled.accumulating
        if is_synchronized:
            releases = compiled.adding_up_shards if adds_up_shards else compiled.synchronizing
            progress.gradients = Gradients.INCOMPLETE
        releases.reset()
        self._open = OpenRound(this_round, result, releases, holds_back=holds_back)
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

    @property
    def synchronizes(self) -> bool:
        """True if a backward that runs now communicates, as one that only accumulates does if it adds up shards."""
        current_plan = self.current_plan
        return not self.is_accumulating or (current_plan.is_active and current_plan.now.compiled.strategy.reduces_micro_batches)

    @private.untraced
    def _enter(self, hooks: ParamHooks, task: int, param: int) -> None:
        """Called with the first gradient in backward `task`, of `param` of `hooks`."""
        current_plan, gradient_of = self.current_plan, id(hooks.named_params[param][1])
        before = current_plan.now.hooks
        if self._open is None or self._is_between_rounds():
            if before.frozen and before.has_thawed():
                self._follow_thawed()
            if current_plan.is_stale:
                current_plan.apply_changes()
            if gradient_of not in current_plan.now.hooks.ids:
                return  # it was in the module for one forward only, or no longer is
            self._take_part_all(task)
        else:
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
            self._follow_thawed()
            current_plan.apply_changes()
            if id(param) in current_plan.now.hooks.ids:
                self._take_part_all(task)
                return
        if (name := current_plan.members.names.get(id(param))) is not None:  # in no plan, and still one of the module's
            raise agreed_errors.unfrozen_in_backward(name, rank=current_plan.group.rank)

    def _follow_thawed(self) -> None:
        """Called when parts of a module take turns: the backward of a part that is unfrozen needs no forward of the whole."""
        self.current_plan.mark_stale()
        self.progress.forward = max(self.progress.forward, Forward.ENDED)

    def _take_part_all(self, task: int) -> None:
        (self.siblings if self.siblings.are_several else self).take_part(task)
        if self._open is None:
            self._end.watch(task)

    def take_part(self, task: int) -> None:
        """Begins a round in backward `task`, unless one is under way, with or without gradients for this engine."""
        if self.current_plan.now.hooks.alone is not None:
            self.current_plan.now.hooks.alone.backward_runs()
        is_open = self.current_plan.is_active and self.phase < Phase.CLOSED
        if is_open and (self._open is None or self._is_between_rounds()):
            private.require_eager_backward()
            self._end.watch(task)  # first: a round that is open without an end to come counts as a failed backward
            kind = RoundKind.REDUCE
            if not self.synchronizes:
                kind = RoundKind.ACCUMULATE
            elif not (self.follows_forward or self.siblings.follow_forward or self._steps_in_backward()):
                # As in torch's class, a backward of the bare module does not concern the other ranks.
                kind = RoundKind.ACCUMULATE
                self.progress.gradients = max(self.progress.gradients, Gradients.LOCAL)
            self._begin(kind)

    @property
    def follows_forward(self) -> bool:
        """True if a forward that a backward may follow has run since all parameters were stepped."""
        return self.progress.forward is not Forward.NONE and bool(self.current_plan.now.hooks.ids)

    def _steps_in_backward(self) -> bool:
        """Returns True if optimizers wait for every backward, whose gradients nobody else would use or clear."""
        if self.current_plan.now.hooks is not self._optimizers.seen:
            self._optimizers.take_over(self.current_plan.now.hooks)
        return bool(self._optimizers.rearm)

    @private.untraced
    def _fill(self, bucket: int) -> None:
        this = self._open
        if this is not None and not this.holds_back and (ops := this.releases.happen(this.releases.fills[bucket])):
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
            hooks.arrivals.note(self.current_plan.now.compiled.executor.written(absent - hooks.arrived_before))
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

    def _end_round(self, this: OpenRound) -> Generator[None, None, None]:
        """Runs the rest of a round after backward, in parts: yields before each wait for other ranks."""
        current_plan, result = self.current_plan, this.result
        if current_plan.now.retiring is not None and this.round.is_synchronized:
            arrived = current_plan.now.hooks.arrivals.arrived | current_plan.now.hooks.arrived_before
            # Also if the ranks do not agree: all of them have run it.
            self.progress.num_rounds += current_plan.is_counted_apart
            yield from current_plan.retire(
                this.round.number - current_plan.is_counted_apart,
                mode=this.round.mode,
                weights=this.round.weights,
                are_used=self.progress.has_begun or bool(arrived),
            )
        executor, hooks = current_plan.now.compiled.executor, current_plan.now.hooks
        if ops := this.releases.happen(this.releases.end):
            executor.run(ops)
        yield
        if ops := this.releases.happen(this.releases.join):
            executor.run(ops)
        while self.also_awaited:
            self.also_awaited.pop().wait()
        if result.readings and result.late_buckets:
            executor.launch_late_parts(result.late_buckets)
            yield
            executor.add_late_parts()
            hooks.arrivals.learn_repeats()
        if result.readings and "loaded" in result.unlike:
            result.apart = yield from self.checks.compare_loaded(result)
        if self.earlier is not None:
            self.earlier.round_is_bound(result)
        self._close_round()
        if this.round.is_synchronized:
            self._round_ends(result)
        else:
            hooks.arrived_before |= hooks.arrivals.arrived
            self.progress.has_accumulated = True
            current_plan.mark_stale()

    def _close_round(self) -> None:
        self._open = None
        if self.phase is Phase.LAUNCHED:
            self._enter_phase(Phase.IDLE)
        self._end.forget()
        self.current_plan.now.hooks.arrivals.forget_traversal()

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
        self.progress.gradients = Gradients.INCOMPLETE
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
        this_round, current_plan = result.round, self.current_plan
        self.recorder.round_ends(result.busy_ms)
        hooks, plan = current_plan.now.hooks, current_plan.now.compiled.plan
        unused = hooks.names_of(plan, result.unused) if any(result.unused.values()) else ()
        self.progress.round_ends(has_failed=result.has_failed, is_last=this_round.is_last)
        self.progress.unused.round_ends(unused, hooks.named_params, is_last=this_round.is_last)
        if not result.has_failed:
            hooks.arrived_before.clear()
            current_plan.is_stale |= current_plan.is_active
        if self.earlier is not None and this_round.weights is not None:
            self.earlier.weights.ends(this_round.weights)
        if self.checks.numbers.is_on:
            self.checks.numbers.round_ends(result, plan)
        if result.readings or result.taken:
            named = hooks.named_params[min(result.taken)] if result.taken else None
            taken = "" if named is None else f"parameter {named[0]!r} with the hook {', '.join(users_hooks(named[1]))}"
            agreed_errors.require_sound(result, rank=current_plan.group.rank, places=current_plan.group.places, taken=taken)
        if this_round.weights is not None and not result.has_failed:  # a backward that has failed has another error to raise
            this_round.weights.require_sound(f"synchronization {this_round.number}, rank {current_plan.group.rank}")
        if result.readings:
            current_plan.require_changed_alike(result)
        if result.has_failed:
            return  # it has left the other ranks already
        self.progress.gradients = Gradients.SOUND
        current_plan.round_ended(result)
        if self.checks.every is not None or self.checks.loads.before:
            self.checks.round_was_sound(result)
        if self._optimizers.rearm:
            self._optimizers.step()
