"""Rounds of an engine: how they open, launch, wait and end.

IDLE ──first gradient──> BACKWARD ──end of the outermost backward──> LAUNCHED ──every engine launched──> IDLE
                         hooks release ops                           the last bucket is sent             waits, binds
"""

import contextlib
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial

from torch import Tensor

from undertow.config import SyncConfig
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute import agreed_errors
from undertow.runtime.execute.hooks import OutermostEnd, is_watched, users_hooks
from undertow.runtime.execute.round import Round, RoundKind, RoundResult
from undertow.runtime.gradients.binding import gradients_aside
from undertow.runtime.model.module_params import ModuleParams
from undertow.runtime.replan.current_plan import CurrentPlan
from undertow.runtime.replan.meeting import Meeting, Stage
from undertow.runtime.replan.param_hooks import Listeners
from undertow.runtime.step.checks import Checks
from undertow.runtime.step.progress import Forward, Gradients, Progress
from undertow.runtime.step.siblings import SiblingEngines
from undertow.runtime.torch_private import private
from undertow.schedule import Releases


class Phase(IntEnum):
    """Where an engine is in a step."""

    IDLE = auto()  # no round is under way
    BACKWARD = auto()  # gradients arrive
    LAUNCHED = auto()  # the last bucket is sent, or may be
    CLOSED = auto()


@dataclass(slots=True)
class OpenRound:
    """The round under way, and how far it is."""

    kind: RoundKind
    is_synchronized: bool
    is_last: bool  # of the step, which adds up no more gradients
    op: str | None  # of a reduction by hand, if it is not the mean
    holds_back: bool = False  # nothing leaves before the end of backward, as before a meeting
    has_failed: bool = False
    has_started: bool = False  # under the plan in force, after a meeting if there is one: the next two exist
    result: RoundResult = field(init=False)
    releases: Releases = field(init=False)
    has_ended: bool = False  # the backward has ended
    stage: Stage | None = None  # the next one; None while backward runs, and while one runs


class RoundRunner:
    """Runs the rounds of one engine, one at a time.

    A round has stages: each ends before the next wait for other ranks, and returns the next one.

    _launch_rest ──> [Meeting ──>] _send ──> _bind ──> [_add_late_parts ──>] [_compare_loaded ──>] _conclude
    """

    def __init__(self, members: ModuleParams, group: OwnGroup, config: SyncConfig, recorder: Recorder) -> None:
        self.is_accumulating = False  # a backward that runs now only accumulates
        self.phase = Phase.IDLE
        self.recorder = recorder
        progress = self.progress = Progress()
        # Called by other threads, which must not keep the engine alive.
        group.here.steps = lambda: (progress.num_rounds, progress.has_begun)
        self._open: OpenRound | None = None
        # After a backward that has failed, the next gradient looks whether there is a round.
        self._end = OutermostEnd(self._launch_rest, lambda: self.current_plan.now.hooks.arrivals.forget_traversal())
        listeners = Listeners(self, self._fill, self._enter, self._arrives_outside)
        self.current_plan = CurrentPlan(members, group, config, recorder, listeners)
        self.siblings: SiblingEngines  # set by the owner
        self.checks = Checks(self.current_plan, config)

    def complete(self) -> None:
        """Waits for launched buckets and binds the gradients; raises the error that the ranks have agreed on."""
        this = self._open
        if this is None or not this.has_ended:
            self._abandon()
            return
        while self._open is this and this.stage is not None:  # None if a signal handler calls this in the middle of one
            self._advance(this)

    def _advance(self, this: OpenRound) -> None:
        """Runs the next stage; an error ends the round."""
        stage, this.stage = this.stage, None
        if stage is None:  # a signal handler has run it
            return
        try:
            this.stage = stage()
        except BaseException:
            if self._open is this:
                self._close_round()
            raise

    def _begin(self, kind: RoundKind, *, op: str | None = None) -> None:
        current_plan, progress = self.current_plan, self.progress
        if current_plan.is_stale or current_plan.change is not None:
            current_plan.look_again()
        # A hook that user code has registered since the forward may run after Undertow's, once, on the first gradient.
        is_overtaken = current_plan.now.hooks.arrival_hooks.run_last()
        is_synchronized = kind is not RoundKind.ACCUMULATE
        this = OpenRound(kind, is_synchronized, is_last=not self.is_accumulating, op=op)
        if this.is_synchronized:
            if progress.num_rounds == 0:
                current_plan.open()
            current_plan.adopt_plan()
            progress.gradients = Gradients.INCOMPLETE
        hooks = current_plan.now.hooks
        hooks.arrivals.reset()
        self._open = this
        if self.phase is Phase.IDLE:
            self.phase = Phase.BACKWARD
        self.recorder.backward_begins(generation=current_plan.now.compiled.generation)
        this.holds_back = current_plan.change is not None or is_overtaken
        if current_plan.change is None:
            self._start(this)

    def _start(self, this: OpenRound) -> None:
        """Starts the round under the plan in force."""
        current_plan, progress, kind = self.current_plan, self.progress, this.kind
        compiled, hooks = current_plan.now.compiled, current_plan.now.hooks
        is_telling = this.is_synchronized and kind is not RoundKind.SHADOW
        loaded = self.checks.loads.digest() if is_telling and self.checks.loads.before else 0
        this_round = Round(
            kind=kind,
            number=progress.num_rounds,
            generation=compiled.generation,
            mode=None if kind is RoundKind.SHADOW else progress.steps.mode,
            settings=progress.steps.settings,
            loaded=loaded,
            alike=(progress.steps.digest, loaded) if is_telling else (None, None),
            is_last=this.is_last,
            not_arrived=self._not_arrived,
            arrivals=hooks.arrivals,
            is_read_at_once=(hooks.tuning is not None and hooks.tuning.act is not None and hooks.tuning.is_about_to_communicate)
            or bool(loaded)
            or (self.checks.are_on and self.checks.must_be_read(progress.num_rounds)),
            rescale=progress.rescale * (current_plan.group.num_ranks if this.op == "sum" else 1),
            op=this.op,
            is_synchronized=this.is_synchronized,
            keeps_own=progress.steps_in_shards and this.op is None,
        )
        this.result = RoundResult(this_round, has_failed=this.has_failed)
        this.releases = compiled.accumulating
        if this.is_synchronized:
            # Under some strategies a micro-batch is reduced to shards, and nothing more.
            adds_up_shards = not this.is_last and compiled.strategy.reduces_micro_batches
            this.releases = compiled.adding_up_shards if adds_up_shards else compiled.synchronizing
        this.releases.reset()
        this.has_started = True
        compiled.executor.begin(this.result)

    def _is_between_rounds(self) -> bool:
        this = self._open
        if this is not None and not self._end.is_coming:  # a new backward has begun, and this round is not its own
            if this.has_ended:
                raise agreed_errors.not_waited_for(self.progress.num_rounds)
            self._give_up(this)
        return self._open is None

    @property
    def synchronizes(self) -> bool:
        """True if a backward that runs now communicates, as one that only accumulates does if it adds up shards.

        After a change of the plan there are no shards before the optimizer steps.
        """
        current_plan = self.current_plan
        adds_up_shards = current_plan.change is None and current_plan.now.compiled.strategy.reduces_micro_batches
        return not self.is_accumulating or adds_up_shards

    @private.untraced
    def _enter(self, task: int) -> None:
        """Called with the first gradient in backward `task`."""
        if self._open is None or self._is_between_rounds():
            outside = self.current_plan.now.hooks.outside_hooks
            if outside.watched and outside.has_thawed():
                self._follow_thawed()
            self._take_part_all(task)
        else:
            self._end.watch(task)

    @private.untraced
    def _arrives_outside(self, param: Tensor) -> None:
        """Called with a gradient of a parameter that the plan does not have; PhaseError if the next one will not have it."""
        current_plan = self.current_plan
        if self.phase >= Phase.CLOSED or param.grad is None or is_watched(param, but=self):
            return
        is_between = self._is_between_rounds()
        if is_between:
            current_plan.mark_stale()
            current_plan.look_again()
        if current_plan.change is not None and id(param) in current_plan.change.ids:
            current_plan.now.hooks.outside[id(param)] = param
            if is_between:
                self._follow_thawed()
                self._take_part_all(private.graph_task_id())
        elif not is_between and (name := current_plan.members.names.get(id(param))) is not None:
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
        is_open = self.current_plan.is_active and self.phase < Phase.CLOSED
        if is_open and (self._open is None or self._is_between_rounds()):
            private.require_eager_backward()
            self._end.watch(task)  # first: a round that is open without an end to come counts as a failed backward
            if self.current_plan.is_stale or self.current_plan.change is not None:
                self.current_plan.look_again()
            kind = RoundKind.REDUCE
            if not self.synchronizes:
                kind = RoundKind.ACCUMULATE
            elif not (self.follows_forward or self.siblings.follow_forward):
                # As in torch's class, a backward of the bare module does not concern the other ranks.
                kind = RoundKind.ACCUMULATE
                self.progress.gradients = max(self.progress.gradients, Gradients.LOCAL)
            self._begin(kind)

    @property
    def follows_forward(self) -> bool:
        """True if a forward that a backward may follow has run since all parameters were stepped."""
        trains = bool(self.current_plan.now.hooks.ids) or self.current_plan.change is not None
        return self.progress.forward is not Forward.NONE and trains

    @private.untraced
    def _fill(self, bucket: int) -> None:
        this = self._open
        if this is None or this.holds_back:
            return
        ops = this.releases.happen(this.releases.fills[bucket])
        if ops:
            self.current_plan.now.compiled.executor.run(ops)

    def _launch_rest(self) -> None:
        """Called at the end of backward: parameters without a gradient are unused here; launches the remaining buckets."""
        this = self._open
        if this is None or this.has_ended:
            return  # a nested backward has reached the outermost end as well
        self._end_backward(this)
        self._advance(this)
        if private.graph_task_id() != -1:
            private.call_after_backward(self._go_on)

    def _end_backward(self, this: OpenRound) -> None:
        current_plan = self.current_plan
        self.recorder.backward_ends()
        this.has_ended = True
        if self.phase is Phase.BACKWARD:
            self.phase = Phase.LAUNCHED
        if this.has_started:
            this.stage = partial(self._send, this)
        elif not this.is_synchronized:  # gradients stay where they are until the ranks have met
            this.stage = self._conclude_accumulation
        else:
            current_plan.look_again()
            start = partial(self._start_late, this)
            this.stage = start if current_plan.change is None else self._meeting(this, then=start).begin

    def _meeting(self, this: OpenRound, *, then: Stage) -> Meeting:
        hooks = self.current_plan.now.hooks
        number = self.progress.num_rounds
        self.progress.num_rounds += self.current_plan.changes_params  # also if the ranks do not agree: all of them have run it
        return Meeting(
            self.current_plan,
            number,
            mode=None if this.kind is RoundKind.SHADOW else self.progress.steps.mode,
            are_used=self.progress.has_begun or bool(hooks.arrivals.arrived or hooks.arrived_before or hooks.outside),
            then=then,
        )

    def _start_late(self, this: OpenRound) -> Stage:
        """Starts the round under the plan that the ranks have agreed on."""
        self._start(this)
        return self._send(this)

    @private.left_alone
    def _go_on(self) -> None:
        """Called after the callbacks of all other engines: with several models in one backward all launch, then all wait."""
        this = self._open
        if this is None or this.stage is None:
            return
        try:
            self._advance(this)
        except BaseException:
            self.siblings.complete()
            raise
        if this.stage is not None:
            private.call_after_backward(self._go_on)

    def _send(self, this: OpenRound) -> Stage:
        """Sends the remaining buckets."""
        executor, hooks = self.current_plan.now.compiled.executor, self.current_plan.now.hooks
        # Gradients that something other than autograd has written into `.grad` count as well.
        absent = hooks.arrivals.absent
        if absent and not this.has_failed:
            hooks.arrivals.note(executor.written(absent - hooks.arrived_before))
        ops = this.releases.happen(this.releases.end)
        if ops:
            executor.run(ops)
        return partial(self._bind, this)

    def _bind(self, this: OpenRound) -> Stage | None:
        """Waits for the buckets, and binds `.grad` to them."""
        executor = self.current_plan.now.compiled.executor
        ops = this.releases.happen(this.releases.join)
        if ops:
            executor.run(ops)
        if not this.result.readings and this.is_synchronized:  # the usual case
            self._close_round()
            self._round_ends(this.result)
            return None
        if this.result.late_buckets:
            executor.launch_late_parts(this.result.late_buckets)
            return partial(self._add_late_parts, this)
        return self._compare_loaded(this)

    def _add_late_parts(self, this: OpenRound) -> Stage | None:
        self.current_plan.now.compiled.executor.add_late_parts()
        self.current_plan.now.hooks.arrivals.learn_repeats()
        return self._compare_loaded(this)

    def _compare_loaded(self, this: OpenRound) -> Stage | None:
        """Compares parameters if `load_state_dict` has changed them on some ranks only, or to different values."""
        if "loaded" not in this.result.unlike:
            self._conclude(this)
            return None
        difference = self.checks.compare_loaded(this.result)

        def conclude() -> None:
            this.result.apart = difference()
            self._conclude(this)

        return conclude

    def _conclude(self, this: OpenRound) -> None:
        if this.is_synchronized:
            self._close_round()
            self._round_ends(this.result)
        else:
            self._conclude_accumulation()

    def _conclude_accumulation(self) -> None:
        hooks = self.current_plan.now.hooks
        self._close_round()
        hooks.arrived_before |= hooks.arrivals.arrived
        self.progress.has_accumulated = True
        self.current_plan.mark_stale()

    def _close_round(self) -> None:
        self._open = None
        if self.phase is Phase.LAUNCHED:
            self.phase = Phase.IDLE
        self._end.forget()
        self.current_plan.now.hooks.arrivals.forget_traversal()

    def _abandon(self) -> None:
        """Ends a round that an exception in backward has left open, and waits for one that was launched by hand."""
        if self._open is None or private.graph_task_id() != -1:
            return
        if self._open.has_ended:
            self.complete()
        else:
            self._give_up(self._open)

    def _give_up(self, this: OpenRound) -> None:
        """Ends a round whose backward failed: the other ranks wait for this rank's buckets, and drop them.

        Afterwards every `.grad` is as it is now: the user may have cleared it, or another backward may have begun.
        """
        this.has_failed = this.is_synchronized
        if this.has_started:
            this.result.has_failed = this.has_failed
        self.progress.gradients = Gradients.INCOMPLETE
        params = self.current_plan.all_params()
        with gradients_aside(params) if this.has_failed else contextlib.nullcontext():
            self._end_backward(this)
            self.complete()

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
            current_plan.is_stale = True
        if self.checks.numbers.is_on:
            self.checks.numbers.round_ends(result, plan)
        if result.readings or result.taken:
            named = hooks.named_params[min(result.taken)] if result.taken else None
            taken = "" if named is None else f"parameter {named[0]!r} with the hook {', '.join(users_hooks(named[1]))}"
            agreed_errors.require_sound(result, rank=current_plan.group.rank, places=current_plan.group.watch.ask, taken=taken)
        if result.readings:
            current_plan.require_changed_alike(result)
        if result.has_failed:
            return  # it has left the other ranks already
        self.progress.gradients = Gradients.SOUND
        current_plan.round_ended(result)
        if self.checks.every is not None or self.checks.loads.before:
            self.checks.round_was_sound(result)
