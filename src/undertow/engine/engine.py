"""The events of a step, and the rounds that they begin and end.

Reasons: docs/design/backward.md.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from undertow.buckets.bucket import gradients_aside
from undertow.buckets.recorder import Recorder
from undertow.config import SyncConfig
from undertow.engine import agreed_errors
from undertow.engine.checks import Checks
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.hooks import Listeners, OutermostEnd, is_watched, no_round, users_hooks
from undertow.engine.params import ModuleParams
from undertow.engine.progress import Accumulated, Forward, Gradients, Progress
from undertow.engine.rebuild import rebuild, require_changed_alike, tell_of_change
from undertow.engine.round import Round, RoundKind, Stage, Terms
from undertow.errors import UndertowError, all_of
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import private


class Engine:
    """Synchronizes the gradients of `members` over `group`, backward after backward.

    A round synchronizes gradients or only accumulates them, as decided when backward runs. One is
    under way at a time.

        first gradient ──> begin_round ──> hooks fill buckets ──> the outermost backward ends:
                                                                                   │
        _backward_ends sends ──> [rebuild ──>] _wait_after_others waits, binds ──> _judge

    `Round` explains stages. With several engines in one backward, every engine sends before any of
    them waits.
    """

    def __init__(
        self, members: ModuleParams, group: OwnGroup, config: SyncConfig, recorder: Recorder
    ) -> None:
        self.is_accumulating = False  # a backward that runs now only accumulates
        self.is_closed = False
        self.recorder = recorder
        progress = self.progress = Progress()
        # Called by other threads, which must not keep the engine alive.
        group.here.steps = lambda: (progress.num_rounds, progress.has_begun)
        self._round: Round | None = None  # the one under way
        # After a backward that has failed, the next gradient looks whether there is a round.
        self._end = OutermostEnd(
            self._backward_ends, lambda: self.current_plan.hooks.arrivals.forget_backward()
        )
        listeners = Listeners(self, self._first_gradient_arrives, self._arrives_outside)
        self.current_plan = CurrentPlan(members, group, config, recorder, listeners)
        self.siblings: SiblingEngines  # set by the owner
        self.checks = Checks(self.current_plan, config)

    @property
    def is_busy(self) -> bool:
        """True if a round is under way."""
        return self._round is not None

    @property
    def is_ending(self) -> bool:
        """True if a round is under way whose backward has ended, or that was launched by hand."""
        return self._round is not None and self._round.has_ended

    @property
    def has_arrived(self) -> bool:
        """True if every bucket that has left in the round under way is reduced."""
        return self._round is None or self.current_plan.compiled.is_completed()

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters without a gradient on this rank in the last synchronized step."""
        if self.current_plan.is_active:
            return self.progress.unused.last
        return tuple(
            name for name, param in self.current_plan.members.trained_now() if param.grad is None
        )

    @property
    def synchronizes(self) -> bool:
        """True if a backward that runs now communicates, as one that only accumulates does if it
        adds up shards."""
        adds_up_shards = self.current_plan.compiled.strategy.reduces_micro_batches
        return not self.is_accumulating or adds_up_shards

    @property
    def follows_forward(self) -> bool:
        """True if a forward that a backward may follow has run since all parameters were
        stepped."""
        trains = bool(self.current_plan.hooks.ids) or self.current_plan.change is not None
        return self.progress.forward is not Forward.NONE and trains

    @property
    def is_backward_due(self) -> bool:
        """True if a training forward has run whose backward is to synchronize, and no
        synchronization has followed."""
        return self.progress.is_owed and self._meets

    @property
    def is_closure_idle(self) -> bool:
        """True if the optimizer that steps now had gradients before its closure, and the closure
        has begun nothing: Lightning passes such closures after a backward by hand."""
        progress = self.progress
        is_same = progress.round_to_step_on == progress.num_rounds
        return is_same and not progress.is_owed and self.current_plan.has_result

    @property
    def is_step_empty(self) -> bool:
        """True if neither a training forward nor a synchronization has begun the step."""
        return not self.progress.is_owed and not (
            self.progress.steps.are_due and self.current_plan.has_result
        )

    @property
    def _meets(self) -> bool:
        """True if the other ranks are needed.

        A rank that trains nothing is needed for what its siblings train.
        """
        return self.current_plan.trains or (
            self.current_plan.is_active and self.siblings.are_several
        )

    # A forward.

    def forward_begins(self, *, is_training: bool, is_compiled: bool = False) -> None:
        """Called before every forward that a backward may follow."""
        current_plan, progress = self.current_plan, self.progress
        current_plan.group.watch.check()
        if self._round is not None:
            self._abandon()
        if self.checks.sent:
            self.checks.require_alike()
        current_plan.find_change_at_forward()
        current_plan.hooks.run_last()
        if is_training and progress.num_forwards == 0:
            current_plan.compiled.note_known()
        # nothing tells the end of a compiled one
        progress.forward = Forward.ENDED if is_compiled else Forward.RUNNING
        if progress.gradients is not Gradients.SOUND and not current_plan.has_result:
            progress.gradients = Gradients.SOUND  # they are cleared
        if not is_training:
            return
        # Other ranks are told of an exception that ends this thread, and shown its stack if it is
        # late.
        current_plan.group.here.thread = threading.get_ident()
        self.recorder.forward_begins()
        progress.forward_begins(synchronizes=self.synchronizes, is_last=not self.is_accumulating)

    def forward_ends(self) -> None:
        """Called after such a forward, which may have made a layer."""
        self.recorder.forward_ends()
        if self.current_plan.is_stale:
            self.current_plan.find_change()
        self.progress.forward = min(self.progress.forward, Forward.ENDED)

    # A backward.

    @private.untraced
    def _first_gradient_arrives(self, task: int) -> None:
        """Called with the first gradient in backward `task`."""
        if self._round is None or self._is_between_rounds():
            hooks = self.current_plan.hooks
            if hooks.watched and hooks.has_thawed():
                self._follow_thawed()
            self._begin_rounds(task)
        else:
            self._end.watch(task)

    @private.untraced
    def _arrives_outside(self, param: Tensor) -> None:
        """Called with a gradient of a parameter that the plan does not have.

        A change of the plan may have it. Raises PhaseError if it is unfrozen in mid-round.
        """
        current_plan = self.current_plan
        if self.is_closed or param.grad is None or is_watched(param, other_than=self):
            return
        is_between = self._is_between_rounds()
        if is_between:
            current_plan.is_stale = True
            current_plan.find_change()
        if current_plan.change is not None and id(param) in current_plan.change.ids:
            current_plan.hooks.outside[id(param)] = param
            if is_between:
                self._follow_thawed()
                self._begin_rounds(private.graph_task_id())
        elif not is_between and (name := current_plan.members.names.get(id(param))) is not None:
            raise agreed_errors.unfrozen_in_backward(name, rank=current_plan.group.name)

    def _is_between_rounds(self) -> bool:
        # a new backward has begun, and this round is not its own
        if self._round is not None and not self._end.is_coming:
            if self._round.has_ended:
                raise agreed_errors.not_waited_for(self.progress.num_rounds)
            self._give_up(self._round)
        return self._round is None

    def _follow_thawed(self) -> None:
        """Called when a part of a module is trained again, because parts take turns.

        Its backward needs no forward of the whole module before it.
        """
        self.current_plan.is_stale = True
        self.progress.forward = max(self.progress.forward, Forward.ENDED)

    def _begin_rounds(self, task: int) -> None:
        (self.siblings if self.siblings.are_several else self).begin_round(task)
        if self._round is None:
            self._end.watch(task)

    def begin_round(self, task: int) -> None:
        """Begins a round in backward `task`, unless one is under way, with or without gradients for
        this engine."""
        is_open = self.current_plan.is_active and not self.is_closed
        if is_open and (self._round is None or self._is_between_rounds()):
            private.require_eager_backward()
            # first: a round that is open without an end to come counts as a failed backward
            self._end.watch(task)
            self.current_plan.find_change()  # does nothing unless something may have changed
            kind = RoundKind.REDUCE
            if not self.synchronizes:
                kind = RoundKind.ACCUMULATE
                self.progress.accumulates(Accumulated.GRADIENTS)
            elif not (self.follows_forward or self.siblings.follow_forward):
                # As in torch's class, a backward of the bare module does not concern the other
                # ranks.
                kind = RoundKind.ACCUMULATE
                self.progress.gradients = max(self.progress.gradients, Gradients.LOCAL)
            self._begin(kind)

    def _backward_ends(self) -> None:
        """Called at the end of backward: parameters without a gradient are unused here.

        Launches the remaining buckets.
        """
        ending = self._round
        if ending is None or ending.has_ended:
            return  # a nested backward has reached the outermost end as well
        self._end_backward(ending)
        self._advance(ending)
        if private.graph_task_id() != -1:
            private.call_after_backward(self._wait_after_others)

    @private.left_alone
    def _wait_after_others(self) -> None:
        """Called after the callbacks of all other engines.

        With several models in one backward all launch, then all wait.
        """
        ending = self._round
        if ending is None or ending.stage is None:
            return
        current_plan = self.current_plan
        if current_plan.vote is None and (
            current_plan.is_other_voting or current_plan.is_earlier_leaving
        ):
            private.call_after_backward(self._wait_after_others)  # all send before one waits
            return
        try:
            self._advance(ending)
        except BaseException:
            self.siblings.finish_rounds()
            raise
        if ending.stage is not None:
            private.call_after_backward(self._wait_after_others)

    # A round, from its begin to its end.

    def _begin(self, kind: RoundKind, *, op: str | None = None) -> None:
        current_plan, progress = self.current_plan, self.progress
        # A hook that user code has registered since the forward may run after Undertow's, once, on
        # the first gradient.
        is_overtaken = current_plan.hooks.run_last()
        is_synchronized = kind is not RoundKind.ACCUMULATE
        conclude = self._judge if is_synchronized else self._conclude_accumulation
        begun = Round(
            kind=kind,
            is_last=not self.is_accumulating,
            op=op,
            holds_back=is_overtaken or not current_plan.compiled.reducer.config.overlap,
            conclude=conclude,
        )
        if is_synchronized:
            current_plan.adopt_plan()  # most rounds have none
            progress.gradients = Gradients.INCOMPLETE
        current_plan.hooks.arrivals.reset()
        self._round = begun
        self.recorder.backward_begins(generation=current_plan.compiled.generation)
        if current_plan.change is None and current_plan.vote is None:
            self._start(begun)

    def _start(self, begun: Round) -> None:
        """Starts the round under the plan in force."""
        current_plan, progress, checks = self.current_plan, self.progress, self.checks
        hooks, steps = current_plan.hooks, progress.steps
        is_telling = begun.kind is RoundKind.REDUCE
        # a device's host waits for trailers only if what follows depends on them
        is_read_at_once = not current_plan.group.hardware.is_host and (
            checks.loads.are_known
            or checks.must_be_read(progress.num_rounds)
            or (hooks.tuning is not None and hooks.tuning.is_about_to_communicate)
        )
        terms = Terms(
            number=progress.num_rounds,
            mode=None if begun.kind is RoundKind.SHADOW else steps.mode,
            settings=steps.settings,
            is_loaded=checks.loads.are_known,
            digests={"settings": steps.digest} if is_telling else {},
            rescale=progress.rescale * (current_plan.group.num_ranks if begun.op == "sum" else 1),
            is_read_at_once=is_read_at_once,
        )
        begun.start(current_plan.compiled, hooks, terms)

    def _end_backward(self, ending: Round) -> None:
        self.recorder.backward_ends()
        current_plan = self.current_plan
        if ending.has_started:
            first: Stage = ending.send
        elif ending.kind is RoundKind.ACCUMULATE:
            # Gradients stay where they are until the ranks rebuild.
            first = partial(self._conclude_accumulation, ending)
        elif current_plan.vote is not None:
            first = partial(self._others_send, ending)
        else:
            first = self._first_stage(ending)
        ending.end(first)  # last: an error before leaves a backward that has failed

    def _others_send(self, ending: Round) -> Stage:
        """Waits for nothing: with several models in one backward, another rank may need what the
        other engines send here, before it comes to this one's vote."""
        return partial(self._end_vote, ending)

    def _end_vote(self, ending: Round) -> Stage | None:
        self.current_plan.end_vote()
        return self._first_stage(ending)()  # sends at once: the other engines wait for that

    def _first_stage(self, ending: Round) -> Stage:
        """Returns the first stage of a round that has not started, because of a change or of an
        error at its start."""
        if self.current_plan.change is None:
            return partial(self._start_late, ending)
        return partial(self._tell_of_change, ending)

    def _tell_of_change(self, ending: Round) -> Stage:
        """Sends the buckets of the plan in force."""
        mode = None if ending.kind is RoundKind.SHADOW else self.progress.steps.mode
        terms = Terms(number=self.progress.num_rounds, mode=mode)
        told = tell_of_change(self.current_plan, terms)
        return partial(self._rebuild, ending, told)

    def _rebuild(self, ending: Round, told: Round) -> Stage:
        """Leaves the plan in force with all ranks. This counts as a synchronization, also if the
        ranks have not changed alike: one that has not changed at all has run one."""
        progress = self.progress
        try:
            rebuild(self.current_plan, told)
        except BaseException:
            progress.round_ends(has_failed=True, is_last=ending.is_last)
            raise
        finally:
            self.current_plan.has_left()
        progress.num_rounds += 1
        return self._start_late(ending)

    def _start_late(self, ending: Round) -> Stage:
        """Starts the round under the plan in force and sends it at once: other engines may wait for
        that."""
        self._start(ending)
        return ending.send()

    def _conclude_accumulation(self, _ended: Round) -> None:
        hooks = self.current_plan.hooks
        self._close_round()
        hooks.arrived_before |= hooks.arrivals.arrived
        self.progress.has_accumulated = True
        self.current_plan.is_stale = True

    def _judge(self, ended: Round) -> None:
        """Ends a complete synchronization as all ranks do.

        Raises the error that they have agreed on.
        """
        self._close_round()
        current_plan, found = self.current_plan, ended.found
        self.recorder.round_ends(found.busy_ms)
        hooks, plan = current_plan.hooks, ended.compiled.plan
        unused = hooks.names_of(plan, found.unused) if any(found.unused.values()) else ()
        self.progress.round_ends(has_failed=ended.has_failed, is_last=ended.is_last)
        self.progress.unused.round_ends(unused, hooks.named_params, is_last=ended.is_last)
        if not ended.has_failed:
            hooks.arrived_before.clear()
            self.progress.is_averaged()
            current_plan.is_stale = True
        ended.compiled.reducer.lost.round_ends()
        if self.checks.numbers.is_on:
            self.checks.numbers.round_ends(ended, plan)
        if found.readings or found.taken:
            taken = ""
            if found.taken:
                name, param = hooks.named_params[min(found.taken)]
                taken = f"parameter {name!r} with the hook {', '.join(users_hooks(param))}"
            try:
                agreed_errors.require_sound(ended, current_plan.group, taken=taken)
                if found.readings:
                    require_changed_alike(current_plan, ended)
            except UndertowError:
                self._forget_window()
                raise
        if ended.has_failed:
            self._forget_window()
            return  # it has left the other ranks already
        self.progress.gradients = Gradients.SOUND
        if hooks.tuning is not None and not hooks.tuning.is_over:
            hooks.tuning.round_ends(
                ended.compiled.present, num_forwards=self.progress.num_forwards_before
            )
        if self.checks.every is not None or found.readings:
            self.checks.round_was_sound(ended)

    def _forget_window(self) -> None:
        """Called when a round has failed.

        On a device the other ranks read that a round later, and have counted this one.
        """
        tuning = self.current_plan.hooks.tuning
        if tuning is not None:
            tuning.forget_window()

    def _advance(self, ending: Round) -> None:
        """Runs the next stage; an error ends the round."""
        try:
            stage, ending.stage = ending.stage, None
            if stage is not None:  # else a signal handler has run it
                ending.stage = stage()
        except BaseException:
            if self._round is ending:
                self._close_round()
            raise

    def finish_round(self) -> None:
        """Waits for launched buckets and binds the gradients.

        Raises the error that the ranks have agreed on.
        """
        ending = self._round
        if ending is None or not ending.has_ended:
            self._abandon()
            return
        # A signal handler may call this within a stage: then `stage` is None.
        while self._round is ending and ending.stage is not None:
            self._advance(ending)

    def _close_round(self) -> None:
        self._round = None
        self._end.forget()
        arrivals = self.current_plan.hooks.arrivals
        arrivals.on_full = no_round
        arrivals.forget_backward()

    def _abandon(self) -> None:
        """Ends a round that an exception in backward has left open, and waits for one that was
        launched by hand."""
        if self._round is None or private.graph_task_id() != -1:
            return
        if self._round.has_ended:
            self.finish_round()
        else:
            self._give_up(self._round)

    def _give_up(self, failed: Round) -> None:
        """Ends a round whose backward failed: the other ranks wait for this rank's buckets, and
        drop them.

        Afterwards every `.grad` is as it is now: the user may have cleared it, or another backward
        may have begun.
        """
        failed.has_failed = failed.kind is not RoundKind.ACCUMULATE
        self.progress.gradients = Gradients.INCOMPLETE
        params = self.current_plan.all_params()
        with gradients_aside(params) if failed.has_failed else contextlib.nullcontext():
            self._end_backward(failed)
            self.finish_round()

    # An optimizer's step.

    def finish_before_step(self, params: set[int], *, reader: str | None = None) -> None:
        """Runs a round if one is owed before the optimizer `reader` steps on these parameters, by
        id, or their gradients are read.

        Not inside `accumulate()`, where no other rank communicates. Raises PhaseError inside a
        backward.
        """
        current_plan, progress = self.current_plan, self.progress
        where = f"synchronization {progress.num_rounds}, rank {current_plan.group.name}"
        if reader is not None:
            where = f"{reader}, {where}"
        if (self._round is not None or progress.is_owed) and private.graph_task_id() != -1:
            raise agreed_errors.step_within_backward(where)
        if self._round is not None:
            self._abandon()
        is_up_to_date = progress.steps.are_due_for(params) and not current_plan.members.has_new_of(
            params
        )
        if not is_up_to_date:
            # the next backward may run without a forward that finds a change
            current_plan.is_stale = True
            current_plan.find_change()
            current_plan.is_stale = True
            # parameters that no forward has found
            progress.is_owed |= current_plan.change is not None
        is_needed = not (is_up_to_date and current_plan.has_result)
        if progress.is_owed and is_needed and self.synchronizes:
            is_late = reader is not None and progress.accumulated is Accumulated.GRADIENTS
            self._run_outside_of_backward()
            if is_late:
                self._tell_of_late_average(where, follows_forward=True)
        if self.checks.sent:
            self.checks.require_alike()

    def average_before_step(self, params: set[int], *, reader: str, is_sharded: bool) -> None:
        """Averages gradients that were only accumulated, if the optimizer `reader` is about to use
        the gradients of these parameters, by id.

        Inside `accumulate()` a plain optimizer steps on this rank's own gradients; a sharded one
        cannot. Raises PhaseError there, inside a backward, and inside `join()`.
        """
        current_plan, progress = self.current_plan, self.progress
        if not self._meets or not self._has_own_gradients(params):
            return
        where = f"{reader}, synchronization {progress.num_rounds}, rank {current_plan.group.name}"
        if self.is_accumulating:
            if is_sharded:
                raise agreed_errors.step_in_accumulation(where)
            return
        if private.graph_task_id() != -1:
            raise agreed_errors.step_within_backward(where)
        if "join" in current_plan.group.borrowers:
            raise agreed_errors.step_in_join(where)
        follows_forward = progress.accumulated is not Accumulated.NOTHING
        self.siblings.owe_averages()
        self._run_outside_of_backward()
        self._tell_of_late_average(where, follows_forward=follows_forward)

    def _tell_of_late_average(self, where: str, *, follows_forward: bool) -> None:
        """Warns once of a synchronization before a step, which nothing hides.

        Called after it: a warning may be an error, and other ranks would wait.
        """
        if not self.progress.has_told_of_average:
            self.progress.has_told_of_average = True
            agreed_errors.warn_of_late_average(where, follows_forward=follows_forward)

    def _has_own_gradients(self, params: set[int]) -> bool:
        """Returns True if other ranks, too, may wait to average gradients of these parameters.

        Not if they have stepped on them inside `accumulate()`. A backward of the bare module counts
        only if no synchronization has followed the last step: beside one it is this rank's own.
        """
        progress, current_plan = self.progress, self.current_plan
        if progress.gradients is Gradients.INCOMPLETE:
            return False
        if progress.accumulated is Accumulated.GRADIENTS:
            return not params <= progress.stepped_alone
        has_mean = progress.steps.are_due_for(params) and current_plan.has_result
        if progress.accumulated is Accumulated.FORWARD:  # or for a look at the loss
            return not has_mean and not params <= progress.stepped_alone
        if progress.gradients is Gradients.SOUND or progress.steps.are_due_for(params):
            return False
        hooks = current_plan.hooks
        return current_plan.has_result and not hooks.arrived_before.isdisjoint(
            hooks.indices(params)
        )

    def owe_average(self) -> None:
        """Called when a sibling is about to average accumulated gradients, outside of backward."""
        progress = self.progress
        is_local = progress.gradients in (Gradients.LOCAL, Gradients.REPORTED)
        if progress.accumulated is not Accumulated.NOTHING or (
            is_local and not progress.steps.are_due_for(self.current_plan.hooks.ids)
        ):
            progress.is_owed = True

    def require_sound_gradients(self, params: set[int], *, reader: str) -> None:
        """Called when `reader` is about to use the gradients of these parameters, by id.

        Raises PhaseError if they are incomplete, and warns if they are this rank's own because no
        forward preceded the backward.
        """
        progress, hooks = self.progress, self.current_plan.hooks
        where = f"{reader}, rank {self.current_plan.group.name}"
        if progress.gradients is Gradients.INCOMPLETE:
            # Whatever `.grad` holds: on the rank whose backward failed it is None, cleared or not,
            # if its bucket had left.
            raise agreed_errors.step_after_failure(where)
        if progress.gradients is Gradients.LOCAL and self.current_plan.has_result:
            local = hooks.arrived_before & hooks.indices(params)
            if local:
                progress.gradients = Gradients.REPORTED
                agreed_errors.warn_of_local_gradients(hooks.named_params[min(local)][0], where)

    # Calls of users.

    def reduce_accumulated(self, op: str | None) -> None:
        """Sends accumulated gradients; `complete` waits for them.

        Raises PhaseError if nothing is left to send.
        """
        if not self.current_plan.is_active:
            return
        number, rank = self.progress.num_rounds, self.current_plan.group.name
        if self._round is not None and self._round.has_ended:
            raise agreed_errors.synchronized_already(number)
        self._abandon()
        if not self.progress.has_accumulated:
            raise agreed_errors.nothing_to_reduce(number, rank=rank)
        if op is not None and self.current_plan.compiled.layout.holds_shards:
            raise agreed_errors.shards_held(number, rank=rank)
        self._launch_accumulated(op=op)

    def finish(self) -> None:
        """Runs a round, unless one has run since the last training forward or step, or backwards
        only accumulate.

        For a rank without gradients.
        """
        num_rounds = self.progress.num_rounds
        self._abandon()
        if not self.synchronizes:
            return  # no other rank communicates
        was_abandoned = self.progress.num_rounds > num_rounds  # and its gradients may be gone
        begins = self.is_step_empty and not was_abandoned
        if begins:
            self.progress.unused.so_far = None
            self.current_plan.find_change_at_forward()  # instead of in the forward that others ran
        if self.progress.is_owed or begins:
            self._run_outside_of_backward()

    def finish_owed(self) -> None:
        """Runs a round if one is owed: a sibling has."""
        if self.progress.is_owed:
            self._run_outside_of_backward()

    def shadow(self) -> None:
        """Takes part in a round of the other ranks, without data.

        Gradients that were not synchronized drop out.
        """
        self._abandon()
        self.current_plan.hooks.arrived_before.clear()
        self.progress.is_averaged()
        self.current_plan.find_change()
        if self._meets:
            with gradients_aside(self.current_plan.all_params()):
                self._begin(RoundKind.SHADOW)
                self._backward_ends()
                self.finish_round()

    def close(self) -> None:
        """Removes the hooks and begins no more rounds; the caller has ended the one under way."""
        self.is_closed = True
        self.current_plan.close()

    def _run_outside_of_backward(self) -> None:
        own: tuple[Callable[[], object], ...] = ()
        if self._meets and not self.is_closed:
            own = (self._launch_accumulated, self.finish_round)
        self.progress.is_owed = False
        all_of(*own, self.siblings.finish_owed)

    def _launch_accumulated(self, *, op: str | None = None) -> None:
        """Sends accumulated gradients, outside of a backward; `complete` waits for them."""
        if self._round is not None:
            raise agreed_errors.synchronized_already(self.progress.num_rounds)
        self.current_plan.find_change()
        self._begin(RoundKind.REDUCE, op=op)
        self._backward_ends()


class SiblingEngines:
    """Engines whose rounds belong to the same backwards: a backward that reaches one of them is a
    round of all.

    No token of a rank may reach its experts. Even then the ranks with the same experts wait for it
    in that backward. The order is the same on every rank, so that engines also wait for each
    other in one order.
    """

    def __init__(
        self, engines: Sequence[Engine], *, close: weakref.WeakMethod[Callable[[], None]]
    ) -> None:
        self._engines = [weakref.ref(engine) for engine in engines]  # which hold this object
        self._close = close  # of the object that users hold
        self.are_several = len(engines) > 1

    @property
    def watched_ids(self) -> set[int]:
        """The parameters, by id, whose gradients the engines wait for."""
        return {key for engine in self._present() for key in engine.current_plan.hooks.ids}

    def close_model(self) -> None:
        """Closes the model: a newer wrapper averages its gradients."""
        close = self._close()
        if close is not None:
            close()

    def begin_round(self, task: int) -> None:
        """Begins a round of every engine in backward `task`, unless it is in one."""
        for engine in self._present():
            engine.begin_round(task)

    @property
    def follow_forward(self) -> bool:
        """True if a forward has run since all parameters of every engine were stepped."""
        return any(engine.follows_forward for engine in self._present())

    def owe_averages(self) -> None:
        """Called before one engine averages accumulated gradients: others average theirs then."""
        for engine in self._present():
            engine.owe_average()

    def finish_owed(self) -> None:
        """Called after one engine has run a round outside of backward.

        The others run theirs, for which other ranks wait too.
        """
        all_of(*(engine.finish_owed for engine in self._present()))

    def finish_rounds(self) -> None:
        """Called after one engine has failed.

        Ends the launched rounds of the others, and drops their errors.
        """
        for engine in self._present():
            with contextlib.suppress(UndertowError):
                engine.finish_round()

    def wait_for_reductions(self) -> None:
        """Waits for reductions of all engines that were launched by hand; drops errors."""
        for engine in self._present():
            with contextlib.suppress(RuntimeError):
                if engine.current_plan.group.is_alive and engine.is_ending:
                    engine.finish_round()

    def wait_for_parameters(self) -> None:
        """Waits for the parameters of all engines; drops errors."""
        for engine in self._present():
            with contextlib.suppress(RuntimeError):
                if engine.current_plan.group.is_alive:
                    engine.current_plan.wait_for_parameters()

    def _present(self) -> Iterator[Engine]:
        return (engine for ref in self._engines if (engine := ref()) is not None)
