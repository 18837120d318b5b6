"""The rounds of one engine: how each begins, runs stage after stage, and ends.

Reasons: docs/design/backward.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import assert_never

from undertow.buckets.bucket import gradients_aside
from undertow.buckets.recorder import Recorder
from undertow.engine import agreed_errors
from undertow.engine.arrivals import OutermostEnd
from undertow.engine.checks import Checks
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.hooks import users_hooks
from undertow.engine.moves import Moves
from undertow.engine.progress import Gradients, Progress
from undertow.engine.rebuild import hear_of_change, rebuild, require_changed_alike, tell_of_change
from undertow.engine.round import Round, RoundKind, Stage, Terms
from undertow.errors import UndertowError
from undertow.plan.facts import Fact
from undertow.torch_private import private


class Rounds:
    """Rounds one after the other; `now` is the one under way.

        begin ──> post_backward: send ──> wait, bind ──> _judge
                  └─ if the plan changes: tell of it ──> hear of it, rebuild ──> send ──> ...

    `advance` runs the next `Stage`, and `finish` all that are left. `end` detects the end of the
    backward that a round belongs to.
    """

    def __init__(
        self,
        current_plan: CurrentPlan,
        moves: Moves,
        progress: Progress,
        checks: Checks,
        recorder: Recorder,
        end: OutermostEnd,
    ) -> None:
        self.now: Round | None = None
        self._current_plan, self._moves = current_plan, moves
        self._progress, self._checks = progress, checks
        self._recorder, self._end = recorder, end
        self._is_on_mesh = current_plan.group.is_on_mesh
        self._counts_after_places = self._is_on_mesh and current_plan.group.hardware.is_host
        # the last round was sound at all places of a mesh, and is not counted yet
        self._is_to_count = False

    def begin(self, kind: RoundKind, *, is_last: bool, op: str | None = None) -> None:
        """Begins a round, and starts it unless the plan is about to change.

        `is_last`: the step adds up no more gradients. `op` is set for a reduction by hand.
        """
        current_plan, progress = self._current_plan, self._progress
        # A hook that user code has registered since the forward may run after Undertow's, once, on
        # the first gradient.
        hooks = current_plan.hooks
        is_overtaken = hooks.num_hooks_ever != private.num_hooks_ever() and hooks.run_last()
        is_synchronized = kind is not RoundKind.ACCUMULATE
        begun = Round(
            kind=kind,
            is_last=is_last,
            op=op,
            holds_back=is_overtaken or not current_plan.compiled.reducer.config.overlap,
        )
        if is_synchronized:
            if not current_plan.group.is_open:
                current_plan.open_group()  # before the first round
            if current_plan.tuning is None or not current_plan.tuning.has_settled:
                self._moves.adopt_plan()  # most rounds have none
            progress.gradients = Gradients.INCOMPLETE
        hooks.arrivals.reset()
        self.now = begun
        self._recorder.backward_begins(generation=current_plan.compiled.recorded_as)
        if current_plan.change is None:
            begun.start(current_plan.compiled, current_plan.hooks, self._terms(begun))

    def _terms(self, begun: Round) -> Terms:
        """Returns the conditions of a round that starts now, or of the one before it that tells of
        a change of the plan."""
        current_plan, progress, checks = self._current_plan, self._progress, self._checks
        tuning, steps = current_plan.tuning, progress.steps
        is_stopping = checks.stop.is_heard_of and checks.stop.is_told
        # a device's host waits for trailers only if what follows depends on them
        is_read_at_once = not current_plan.group.hardware.is_host and (
            checks.loads.are_known
            or is_stopping
            or checks.must_be_read(progress.num_rounds)
            or (tuning is not None and tuning.communicates_next)
        )
        return Terms(
            number=progress.num_rounds,
            mode=None if begun.kind is RoundKind.SHADOW else steps.mode,
            settings=steps.settings,
            is_loaded=checks.loads.are_known,
            is_stopping=is_stopping,
            rescale=progress.rescale * (current_plan.group.num_ranks if begun.op == "sum" else 1),
            is_read_at_once=is_read_at_once,
        )

    def post_backward(self, ending: Round) -> None:
        """Called when its backward has ended: runs the first stage."""
        self._recorder.backward_ends()
        ending.stage = Stage.SEND if ending.has_started else Stage.START
        ending.has_ended = True
        self.advance(ending)

    def advance(self, ending: Round) -> None:
        """Runs the next stage, and concludes the round after the last one; an error ends it."""
        try:
            stage, ending.stage = ending.stage, None
            if stage is None:
                return  # a signal handler has run it
            following: Stage | None = None
            match stage:
                case Stage.START:
                    following = self._start_after_backward(ending)
                case Stage.REBUILD:
                    following = self._rebuild(ending)
                case Stage.SEND:
                    following = ending.send()
                case Stage.WAIT:
                    following = ending.wait()
                case Stage.ADD_LATE:
                    ending.add_late()
                case _:
                    assert_never(stage)
            # From here on a signal handler may run the other stages, and conclude the round.
            ending.stage = following
            if following is None:
                self._conclude(ending)
        except BaseException:
            if self.now is ending:
                self._close()
            raise

    def _start_after_backward(self, ending: Round) -> Stage | None:
        """Starts a round whose backward has ended, and sends it at once: other engines may wait for
        that.

        It has not started before because of a change, or of an error at its start. If the plan
        changes, the ranks rebuild first. Accumulated gradients stay where they are until then.
        """
        current_plan = self._current_plan
        if ending.kind is RoundKind.ACCUMULATE:
            return None
        if current_plan.change is not None:
            return self._tell_of_change(ending)
        ending.start(current_plan.compiled, current_plan.hooks, self._terms(ending))
        return ending.send()

    def _tell_of_change(self, ending: Round) -> Stage:
        """Sends the buckets of the plan in force."""
        plans, progress = self._current_plan, self._progress
        is_reduced = plans.compiled.strategy.reduces_micro_batches and progress.has_accumulated
        terms = self._terms(ending)
        ending.told = tell_of_change(plans, terms, op=ending.op, has_shards=is_reduced)
        return Stage.REBUILD

    def _rebuild(self, ending: Round) -> Stage | None:
        """Leaves the plan in force with all ranks, after the round that has told of the change.
        That is a synchronization like others, even if the ranks have changed differently: its
        findings are kept, and its errors are raised."""
        progress = self._progress
        told, ending.told = ending.told, None  # it holds the buckets of the plan in force
        assert told is not None  # else this is not the next stage
        try:
            hear_of_change(self._current_plan, told)
            self._checks.round_ends(told)
            self._require_sound(told)
            if self._counts_after_places:
                self._count_before_leaving()
            self._follow_change(told)
        except BaseException:
            progress.round_ends(has_failed=True, is_last=ending.is_last)
            raise
        progress.num_rounds += 1
        return self._start_after_backward(ending)

    def _follow_change(self, told: Round) -> None:
        """Puts the change in force. An error that only the ranks of this data axis raise fails the
        step at all places of a mesh: the next one may succeed."""
        try:
            rebuild(self._current_plan, told)
        except UndertowError:
            told.has_failed = True
            self._round_has_failed(told)
            raise

    def _conclude(self, ended: Round) -> None:
        """Called after the last stage."""
        if ended.kind is RoundKind.ACCUMULATE:
            hooks = self._current_plan.hooks
            hooks.arrived_before |= hooks.arrivals.arrived
            self._progress.has_accumulated = True
            self._current_plan.is_stale = True
        else:
            self._judge(ended)
        self._close()

    def _judge(self, ended: Round) -> None:
        """Ends a complete synchronization as all ranks do.

        Raises the error that they have agreed on.
        """
        current_plan, found = self._current_plan, ended.found
        self._recorder.round_ends(found.busy_ms)
        self._checks.round_ends(ended)  # first: all ranks are told, also of a failed round
        hooks, plan = current_plan.hooks, ended.compiled.plan
        unused = hooks.names_of(plan, found.unused) if any(found.unused.values()) else ()
        self._progress.round_ends(has_failed=ended.has_failed, is_last=ended.is_last)
        self._progress.unused.round_ends(unused, hooks.named_params, is_last=ended.is_last)
        if not ended.has_failed:
            hooks.arrived_before.clear()
            current_plan.is_stale = True
        if ended.compiled.has_formats:
            ended.compiled.reducer.lost.round_ends()
        if self._checks.numbers.is_on:
            self._judge_numbers(ended)
        if found.readings or found.taken:
            self._require_sound(ended)
        if ended.has_failed:
            return  # `_give_up` reports it
        self._progress.gradients = Gradients.SOUND
        if self._is_on_mesh:
            # After that: it may hear that the round before has failed. Then the other places leave
            # this step out.
            self._report_to_places(ended, is_sound=True)
        if self._checks.every is not None or found.readings:
            self._checks.round_was_sound(ended)
        if not self._counts_after_places:
            self._count()

    def _judge_numbers(self, ended: Round) -> None:
        """Keeps the synchronization's finding of gradients that are not finite."""
        self._checks.numbers.round_ends(ended, ended.compiled.plan)
        hook = ended.compiled.reducer.hook
        is_spoilt = ended.found.nonfinite or ended.found.spoils_hook
        if is_spoilt and hook is not None:
            hook.forget()  # or its memory would spoil all later gradients

    def _require_sound(self, ended: Round) -> None:
        """Raises the error that the ranks have agreed on, if there is one."""
        current_plan, found, taken = self._current_plan, ended.found, ""
        if found.taken:
            name, param = current_plan.hooks.named_params[min(found.taken)]
            taken = f"parameter {name!r} with the hook {', '.join(users_hooks(param))}"
        try:
            with agreed_errors.told_to_places(current_plan.group):
                if found.reported(Fact.FAILED):
                    # That rank may not have come to its change.
                    agreed_errors.require_sound(ended, current_plan.group, taken=taken)
                    require_changed_alike(current_plan, ended)
                else:
                    # A rank that has changed alone may be in another step because of that.
                    require_changed_alike(current_plan, ended)
                    agreed_errors.require_sound(ended, current_plan.group, taken=taken)
        except UndertowError:
            self._round_has_failed(ended)
            raise

    def _round_has_failed(self, ended: Round) -> None:
        """Called when a round has failed.

        On a device the other ranks read that a round later, and have counted this one.
        """
        if self._is_on_mesh:
            self._report_to_places(ended, is_sound=False)
        self._forget_window()  # which the round before may have ended

    def _forget_window(self) -> None:
        tuning = self._current_plan.tuning
        if tuning is not None:
            tuning.forget_window()

    def _report_to_places(self, ended: Round, *, is_sound: bool) -> None:
        """Starts to tell the other places of a mesh how the round has ended.

        The round before counts now. All places have told of it before this one began, so no rank
        waits for long.
        """
        then: Callable[..., object] | None = None
        if self._counts_after_places and not self._current_plan.group.is_broken:
            self._checks.hear()
            self.count_told()
            then = self._places_have_told
        self._checks.report_to_places(ended, is_sound=is_sound, then=then)

    def _places_have_told(self, *, is_sound: bool) -> None:
        """Called on the host of a mesh when it is known if the round was sound at all places, which
        choose plans together. One rank alone may hear it early, so `count_told` counts it.
        """
        if is_sound:
            self._is_to_count = True
        else:
            self._progress.gradients = Gradients.INCOMPLETE
            self._forget_window()

    def count_told(self) -> None:
        """Counts the last round if it was sound at all places of a mesh, between the same rounds on
        all ranks: it may start messages, and move the plan."""
        is_to_count, self._is_to_count = self._is_to_count, False
        if is_to_count:
            self._count()

    def _count_before_leaving(self) -> None:
        """Counts the round before for the parameters that are about to leave. Other places of a
        mesh may keep theirs: they count it now too, and send the same messages."""
        arrivals = self._current_plan.hooks.arrivals
        arrived = arrivals.arrived
        self._checks.hear()
        self.count_told()
        self._moves.end_vote()
        arrivals.note(arrived)  # which a move of the plan has forgotten

    def _count(self) -> None:
        """Counts a sound round for the choice of a plan, until that is over.

        A mesh counts it when the next one has ended. The time is taken then, so the number of
        forwards is of that one too.
        """
        tuning = self._current_plan.tuning
        if tuning is not None and not tuning.has_settled:
            self._moves.round_was_sound(self._progress.num_forwards_before)

    def finish(self) -> None:
        """Waits for launched buckets and binds the gradients.

        Raises the error that the ranks have agreed on.
        """
        ending = self.now
        if ending is None or not ending.has_ended:
            self.abandon()
            return
        # A signal handler may call this within a stage: then `stage` is None.
        while self.now is ending and ending.stage is not None:
            self.advance(ending)

    def is_between(self) -> bool:
        """Returns True if no round is under way.

        Called in a backward: it gives up a round whose own backward is gone.
        """
        if self.now is not None and not self._end.is_coming:
            if self.now.has_ended:
                raise agreed_errors.not_waited_for(self._progress.num_rounds)
            self._give_up(self.now)
        return self.now is None

    def _close(self) -> None:
        self.now = None
        self._end.forget()
        self._current_plan.hooks.arrivals.forget_backward()

    def abandon(self) -> None:
        """Ends a round that an exception in backward has left open, and waits for one that was
        launched by hand."""
        if self.now is None or private.graph_task_id() != -1:
            return
        if self.now.has_ended:
            self.finish()
        else:
            self._give_up(self.now)

    def _give_up(self, failed: Round) -> None:
        """Ends a round whose backward failed: the other ranks wait for this rank's buckets, and
        drop them.

        Afterwards every `.grad` is as it is now: the user may have cleared it, or another backward
        may have begun.
        """
        failed.has_failed = failed.kind is not RoundKind.ACCUMULATE
        self._progress.gradients = Gradients.INCOMPLETE
        params = self._current_plan.all_params()
        with gradients_aside(params) if failed.has_failed else contextlib.nullcontext():
            self.post_backward(failed)
            self.finish()
        if failed.has_failed:  # after gradients are back: a plan may be moved
            self._round_has_failed(failed)
