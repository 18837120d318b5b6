"""Rounds of an engine: how they open, launch, wait and end.

IDLE ──first gradient──> BACKWARD ──end of the outermost backward──> LAUNCHED ──every engine launched──> IDLE
                         hooks release ops                           the last bucket is sent             waits, binds
"""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

from torch import Tensor

from undertow.config import SyncConfig
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute import agreed_errors
from undertow.runtime.execute.hooks import OutermostEnd, is_watched, users_hooks
from undertow.runtime.execute.round import Round, RoundKind, RoundResult, Settings
from undertow.runtime.gradients.binding import gradients_aside
from undertow.runtime.model.module_params import ModuleParams
from undertow.runtime.replan.current_plan import CurrentPlan
from undertow.runtime.replan.meeting import Meeting, Stage
from undertow.runtime.replan.param_hooks import Listeners
from undertow.runtime.step.checks import Checks
from undertow.runtime.step.siblings import SiblingEngines
from undertow.runtime.torch_private import private
from undertow.schedule import Releases


class Phase(IntEnum):
    """Where an engine is in a step."""

    IDLE = auto()  # no round is under way
    BACKWARD = auto()  # gradients arrive
    LAUNCHED = auto()  # the last bucket is sent, or may be
    CLOSED = auto()


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


@dataclass(slots=True)
class OpenRound:
    """The round under way, and how far it is."""

    kind: RoundKind
    is_last: bool  # of the step, which adds up no more gradients
    op: str | None  # of a reduction by hand, if it differs from the settings'
    holds_back: bool = False  # nothing leaves before the end of backward, as before a meeting
    has_failed: bool = False
    result: RoundResult | None = None  # of the plan in force; made after a meeting, if there is one
    releases: Releases | None = None
    has_ended: bool = False  # the backward has ended
    stage: Stage | None = None  # the next one; None while backward runs, and while one runs

    @property
    def is_synchronized(self) -> bool:
        return self.kind is not RoundKind.ACCUMULATE


class RoundRunner:
    """Runs the rounds of one engine, one at a time.

    A round has stages: each ends before the next wait for other ranks, and returns the next one.

    _launch_rest ──> [meeting ──>] _send ──> _bind ──> [_add_late_parts ──>] [_compare_loaded ──>] _conclude
    """

    def __init__(self, members: ModuleParams, group: OwnGroup, config: SyncConfig, recorder: Recorder) -> None:
        self.is_accumulating = False  # a backward that runs now only accumulates
        self.phase = Phase.IDLE
        self.recorder = recorder
        self.progress = Progress()
        group.here.progress = self.progress  # read by other threads, which must not keep the engine alive
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

    def _enter_phase(self, phase: Phase) -> None:
        assert phase in _NEXT[self.phase], f"{self.phase!r} -> {phase!r}"
        self.phase = phase

    def _begin(self, kind: RoundKind, *, op: str | None = None) -> None:
        current_plan, progress = self.current_plan, self.progress
        current_plan.look_again()
        # A hook that user code has registered since the forward may run after Undertow's, once, on the first gradient.
        is_overtaken = current_plan.now.hooks.arrival_hooks.run_last()
        this = OpenRound(kind, is_last=not self.is_accumulating, op=op)
        if this.is_synchronized:
            if progress.num_rounds == 0:
                current_plan.open()
            current_plan.adopt_plan()
            progress.gradients = Gradients.INCOMPLETE
        hooks = current_plan.now.hooks
        hooks.arrivals.reset()
        self._open = this
        if self.phase is Phase.IDLE:
            self._enter_phase(Phase.BACKWARD)
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
            mode=self._mode(kind),
            settings=progress.steps.settings,
            loaded=loaded,
            alike=(progress.steps.digest, loaded) if is_telling else (None, None),
            is_last=this.is_last,
            not_arrived=self._not_arrived,
            arrivals=hooks.arrivals,
            is_read_at_once=(hooks.tuning is not None and hooks.tuning.is_about_to_communicate)
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
        compiled.executor.begin(this.result)

    def _mode(self, kind: RoundKind) -> int | None:
        return None if kind is RoundKind.SHADOW else self.progress.steps.mode

    def _is_between_rounds(self) -> bool:
        this = self._open
        if this is not None and not self._end.is_coming:  # a new backward has begun, and this round is not its own
            if this.has_ended:
                raise agreed_errors.not_waited_for(self.progress.num_rounds)
            self._give_up(this)
        return self._open is None

    @property
    def synchronizes(self) -> bool:
        """True if a backward that runs now communicates, as one that only accumulates does if it adds up shards."""
        current_plan = self.current_plan
        return not self.is_accumulating or current_plan.now.compiled.strategy.reduces_micro_batches

    @private.untraced
    def _enter(self, task: int) -> None:
        """Called with the first gradient in backward `task`."""
        if self._open is None or self._is_between_rounds():
            if self.current_plan.now.hooks.has_thawed():
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
        if this is None or this.holds_back or this.releases is None:
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
            self._enter_phase(Phase.LAUNCHED)
        if this.result is not None:
            this.stage = self._send
        elif not this.is_synchronized:  # gradients stay where they are until the ranks have met
            this.stage = self._conclude_accumulation
        else:
            current_plan.look_again()
            this.stage = self._start_late if current_plan.change is None else self._meeting(this).begin

    def _meeting(self, this: OpenRound) -> Meeting:
        hooks = self.current_plan.now.hooks
        number = self.progress.num_rounds
        self.progress.num_rounds += 1  # also if the ranks do not agree: all of them have run it
        return Meeting(
            self.current_plan,
            number,
            mode=self._mode(this.kind),
            are_used=self.progress.has_begun or bool(hooks.arrivals.arrived or hooks.arrived_before or hooks.outside),
            then=self._start_late,
        )

    def _start_late(self) -> Stage:
        """Starts the round under the plan that the ranks have agreed on."""
        assert self._open is not None
        self._start(self._open)
        return self._send()

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

    def _under_way(self) -> tuple[RoundResult, Releases]:
        this = self._open
        assert this is not None
        assert this.result is not None
        assert this.releases is not None
        return this.result, this.releases

    def _send(self) -> Stage:
        """Sends the remaining buckets."""
        result, releases = self._under_way()
        executor, hooks = self.current_plan.now.compiled.executor, self.current_plan.now.hooks
        # Gradients that something other than autograd has written into `.grad` count as well.
        absent = hooks.arrivals.absent
        if absent and not result.has_failed:
            hooks.arrivals.note(executor.written(absent - hooks.arrived_before))
        ops = releases.happen(releases.end)
        if ops:
            executor.run(ops)
        return self._bind

    def _bind(self) -> Stage | None:
        """Waits for the buckets, and binds `.grad` to them."""
        result, releases = self._under_way()
        executor = self.current_plan.now.compiled.executor
        ops = releases.happen(releases.join)
        if ops:
            executor.run(ops)
        if result.readings and result.late_buckets:
            executor.launch_late_parts(result.late_buckets)
            return self._add_late_parts
        return self._compare_loaded()

    def _add_late_parts(self) -> Stage | None:
        self.current_plan.now.compiled.executor.add_late_parts()
        self.current_plan.now.hooks.arrivals.learn_repeats()
        return self._compare_loaded()

    def _compare_loaded(self) -> Stage | None:
        """Compares parameters if `load_state_dict` has changed them on some ranks only, or to different values."""
        result, _ = self._under_way()
        if not result.readings or "loaded" not in result.unlike:
            self._conclude()
            return None
        difference = self.checks.compare_loaded(result)

        def conclude() -> None:
            result.apart = difference()
            self._conclude()

        return conclude

    def _conclude(self) -> None:
        result, _ = self._under_way()
        if result.round.is_synchronized:
            self._close_round()
            self._round_ends(result)
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
            self._enter_phase(Phase.IDLE)
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
        if this.result is not None:
            this.result.has_failed = this.has_failed
        self.progress.gradients = Gradients.INCOMPLETE
        params = dict.fromkeys(self.current_plan.now.hooks.params)
        if self.current_plan.change is not None:
            params.update(dict.fromkeys(param for _, param in self.current_plan.change.named_params))
        with gradients_aside(list(params)) if this.has_failed else contextlib.nullcontext():
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
            current_plan.mark_stale()
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
