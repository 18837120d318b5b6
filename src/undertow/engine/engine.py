"""The events of a step, and the rounds that they begin and end.

Reasons: docs/design/backward.md.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from undertow.buckets.bucket import gradients_aside
from undertow.buckets.recorder import Recorder
from undertow.config import SyncConfig
from undertow.engine import agreed_errors
from undertow.engine.arrivals import BackwardListener, OutermostEnd, WaitTurn
from undertow.engine.checks import Checks
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.hooks import is_watched
from undertow.engine.moves import Moves
from undertow.engine.params import ModuleParams
from undertow.engine.progress import Accumulated, Forward, Gradients, Progress
from undertow.engine.round import RoundKind
from undertow.engine.rounds import Rounds
from undertow.errors import UndertowError, all_of
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import private


class Engine(BackwardListener):
    """Synchronizes the gradients of `members` over `group`, backward after backward.

    A round synchronizes gradients or only accumulates them, as decided when backward runs. One is
    under way at a time.

        first gradient ──> begin_round ──> full buckets leave ──> the outermost backward ends:
        post_backward sends ──> _finalize_backward waits, and binds `.grad`

    `Rounds` has the work of a round. With several engines in one backward, every engine sends
    before any of them waits.
    """

    def __init__(
        self, members: ModuleParams, group: OwnGroup, config: SyncConfig, recorder: Recorder
    ) -> None:
        self.is_accumulating = False  # a backward that runs now only accumulates
        self.is_closed = False
        self.save_waited_s = 0.0  # that calls waited for a save in the background
        self.recorder = recorder
        progress = self.progress = Progress()
        # Called by other threads, which must not keep the engine alive.
        group.here.steps = lambda: (progress.num_rounds, progress.has_begun)
        self._end, self.turn = OutermostEnd(self), WaitTurn()
        self.current_plan = CurrentPlan(members, group, config, recorder, self)
        self.siblings: SiblingEngines  # from `take_part_with` on
        self.checks = Checks(self.current_plan, config)
        self.moves = Moves(self.current_plan)
        self.rounds = Rounds(
            self.current_plan, self.moves, progress, self.checks, recorder, self._end
        )
        self.current_plan.register_hooks()  # from now on gradients call this engine

    @property
    def is_busy(self) -> bool:
        """True if a round is under way."""
        return self.rounds.now is not None

    @property
    def is_ending(self) -> bool:
        """True if a round is under way whose backward has ended, or that was launched by hand."""
        return self.rounds.now is not None and self.rounds.now.has_ended

    @property
    def has_arrived(self) -> bool:
        """True if every bucket that has left in the round under way is reduced."""
        return self.rounds.now is None or self.current_plan.compiled.is_completed()

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
        """True if a backward that runs now communicates; one that only accumulates does so if it
        adds up shards."""
        strategy = self.current_plan.compiled.strategy
        return not self.is_accumulating or strategy.reduces_micro_batches

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
        return self.progress.is_owed and self.current_plan.trains

    @property
    def needs_others(self) -> bool:
        """True if a step or a look waits for the other ranks.

        If all have agreed that nothing is trained, one of them may look alone, and a rank without
        data waits for no step. A rank that trains nothing is needed for parameters of siblings.
        """
        current_plan = self.current_plan
        return current_plan.trains or (current_plan.is_active and self.siblings.are_several)

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

    # A forward.

    def forward_begins(self, *, is_training: bool, is_compiled: bool = False) -> None:
        """Called before every forward that a backward may follow."""
        current_plan, progress = self.current_plan, self.progress
        current_plan.group.watch.check()
        if self.rounds.now is not None:
            self.rounds.abandon()
        if self.checks.sent and is_training:  # one rank alone may evaluate
            self.checks.require_alike()
        current_plan.find_change_at_forward()
        hooks = current_plan.hooks
        if hooks.num_hooks_ever != private.num_hooks_ever():
            hooks.run_last()
        if is_training and progress.num_forwards == 0:
            for bucket in current_plan.compiled.buckets:
                bucket.gradients.note_known()
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
        is_last = not self.is_accumulating
        progress.forward_begins(synchronizes=is_last or self.synchronizes, is_last=is_last)

    def forward_ends(self) -> None:
        """Called after such a forward, which may have made a layer."""
        self.recorder.forward_ends()
        if self.current_plan.is_stale:
            self.current_plan.find_change()
        self.progress.forward = min(self.progress.forward, Forward.ENDED)

    # A backward.

    @private.untraced
    def first_gradient_arrives(self, task: int) -> None:
        """Begins a round, unless one is under way."""
        if self.rounds.now is None or self.rounds.is_between():
            hooks = self.current_plan.hooks
            if hooks.watched and hooks.has_thawed():
                self._follow_thawed()
            self._begin_rounds(task)
        else:
            self._end.watch(task)

    @private.untraced
    def bucket_is_full(self, index: int) -> None:
        """Sends the full buckets that are next; the last one waits for the end of backward."""
        now = self.rounds.now
        if now is not None and now.has_started:
            now.bucket_is_full(index)

    @private.untraced
    def arrives_outside(self, param: Tensor) -> None:
        """Notes the parameter if a change of the plan has it.

        Raises PhaseError if it is unfrozen in mid-round.
        """
        current_plan = self.current_plan
        if self.is_closed or param.grad is None or is_watched(param, other_than=self):
            return
        is_between = self.rounds.is_between()
        if is_between:
            current_plan.is_stale = True
            current_plan.find_change()
        if current_plan.change is not None and id(param) in current_plan.change.ids:
            current_plan.hooks.note_outside(param)
            if is_between:
                self._follow_thawed()
                self._begin_rounds(private.graph_task_id())
        elif not is_between and (name := current_plan.members.names.get(id(param))) is not None:
            raise agreed_errors.unfrozen_in_backward(name, rank=current_plan.group.name)

    def _follow_thawed(self) -> None:
        """Called when a part of a module is trained again, because parts take turns.

        Its backward needs no forward of the whole module before it.
        """
        self.current_plan.is_stale = True
        self.progress.forward = max(self.progress.forward, Forward.ENDED)

    def _begin_rounds(self, task: int) -> None:
        (self.siblings if self.siblings.are_several else self).begin_round(task)
        if self.rounds.now is None:
            self._end.watch(task)

    def begin_round(self, task: int) -> None:
        """Begins a round in backward `task`, unless one is under way, with or without gradients for
        this engine."""
        is_open = self.current_plan.is_active and not self.is_closed
        if is_open and (self.rounds.now is None or self.rounds.is_between()):
            private.require_eager_backward()
            # first: a round that is open without an end to come counts as a failed backward
            self._end.watch(task)
            current_plan, is_last = self.current_plan, not self.is_accumulating
            if current_plan.is_stale or current_plan.change is not None:
                current_plan.find_change()
            kind = RoundKind.REDUCE
            if not is_last and not self.synchronizes:
                kind = RoundKind.ACCUMULATE
                self.progress.accumulates(Accumulated.GRADIENTS)
            elif not (self.follows_forward or self.siblings.follow_forward):
                # As in torch's class, a backward of the bare module does not concern the other
                # ranks.
                kind = RoundKind.ACCUMULATE
                self.progress.gradients = max(self.progress.gradients, Gradients.LOCAL)
            self.rounds.begin(kind, is_last=is_last)

    def backward_is_gone(self) -> None:
        """Makes the next gradient look whether there is a round: this backward may have failed."""
        self.current_plan.hooks.arrivals.forget_backward()

    def post_backward(self) -> None:
        """Sends the remaining buckets: parameters without a gradient are unused here."""
        ending = self.rounds.now
        if ending is None or ending.has_ended:
            return  # a nested backward has reached the outermost end too
        self.rounds.post_backward(ending)
        if private.graph_task_id() != -1:
            self.turn.begins()
            private.call_after_backward(self._finalize_backward)

    @private.left_alone
    def _finalize_backward(self) -> None:
        """Waits, and binds `.grad`. Called after the callbacks of all other engines.

        With several models in one backward all launch, then all wait, each until its turn.
        """
        ending = self.rounds.now
        if ending is not None and ending.stage is not None and self.turn.has_come:
            try:
                self.rounds.advance(ending)
            except BaseException:
                self.siblings.finish_rounds()
                raise
        if ending is None or ending.stage is None:
            self.turn.ends()
        else:
            private.call_after_backward(self._finalize_backward)

    # Calls of users, and of the object that they hold.

    def take_part_with(self, siblings: SiblingEngines) -> None:
        """Makes a backward that reaches one of these engines, this one among them, a round of
        all."""
        self.siblings = siblings

    def reduce_accumulated(self, op: str | None) -> None:
        """Sends accumulated gradients; `complete` waits for them.

        Raises PhaseError if nothing is left to send.
        """
        if not self.current_plan.is_active:
            return
        number, rank = self.progress.num_rounds, self.current_plan.group.name
        if self.rounds.now is not None and self.rounds.now.has_ended:
            raise agreed_errors.synchronized_already(number)
        self.rounds.abandon()
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
        self.rounds.abandon()
        if not self.synchronizes:
            return  # no other rank communicates
        was_abandoned = self.progress.num_rounds > num_rounds  # and its gradients may be gone
        begins = self.is_step_empty and not was_abandoned
        if begins:
            self.progress.unused.so_far = None
            # instead of in the forward that others ran
            self.checks.require_alike()
            self.current_plan.find_change_at_forward()
        if self.progress.is_owed or begins:
            self.run_outside_of_backward()

    def owe_average(self) -> None:
        """Called when a sibling is about to average accumulated gradients, outside of backward."""
        progress = self.progress
        is_local = progress.gradients in (Gradients.LOCAL, Gradients.REPORTED)
        if progress.accumulated is not Accumulated.NOTHING or (
            is_local and not progress.steps.are_due_for(self.current_plan.hooks.ids)
        ):
            progress.is_owed = True

    def finish_owed(self) -> None:
        """Runs a round if one is owed: a sibling has."""
        if self.progress.is_owed:
            self.run_outside_of_backward()

    def shadow(self) -> None:
        """Takes part in a round of the other ranks, without data.

        Gradients that were not synchronized drop out.
        """
        self.rounds.abandon()
        self.current_plan.hooks.arrived_before.clear()
        self.progress.is_averaged()
        self.current_plan.find_change()
        if self.current_plan.is_active:
            with gradients_aside(self.current_plan.all_params()):
                self.rounds.begin(RoundKind.SHADOW, is_last=not self.is_accumulating)
                self.post_backward()
                self.rounds.finish()

    def close(self) -> None:
        """Removes the hooks and begins no more rounds; the caller has ended the one under way."""
        self.is_closed = True
        self.current_plan.close()

    def run_outside_of_backward(self) -> None:
        """Sends accumulated gradients and waits for them; then all siblings do that owe a round."""
        own: tuple[Callable[[], object], ...] = ()
        if self.current_plan.is_active and not self.is_closed:
            own = (self._launch_accumulated, self.rounds.finish)
        self.progress.is_owed = False
        all_of(*own, self.siblings.finish_owed)

    def _launch_accumulated(self, *, op: str | None = None) -> None:
        """Sends accumulated gradients, outside of a backward; `complete` waits for them."""
        if self.rounds.now is not None:
            raise agreed_errors.synchronized_already(self.progress.num_rounds)
        self.current_plan.find_change()
        self.rounds.begin(RoundKind.REDUCE, is_last=not self.is_accumulating, op=op)
        self.post_backward()


class SiblingEngines:
    """Engines whose rounds belong to the same backwards: a backward that reaches one of them is a
    round of all.

    If none of a rank's tokens reach its experts, the other ranks that hold them still wait for it
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

        The others run their rounds, because other ranks wait for them too.
        """
        all_of(*(engine.finish_owed for engine in self._present()))

    def finish_rounds(self) -> None:
        """Called after one engine has failed.

        Ends the launched rounds of the others, and drops their errors.
        """
        for engine in self._present():
            with contextlib.suppress(UndertowError):
                engine.rounds.finish()

    def wait_for_reductions(self) -> None:
        """Waits for reductions of all engines that were launched by hand; drops errors."""
        for engine in self._present():
            with contextlib.suppress(RuntimeError):
                if engine.current_plan.group.is_alive and engine.is_ending:
                    engine.rounds.finish()

    def wait_for_parameters(self) -> None:
        """Waits for the parameters of all engines; drops errors."""
        for engine in self._present():
            with contextlib.suppress(RuntimeError):
                if engine.current_plan.group.is_alive:
                    engine.current_plan.wait_for_parameters()

    def _present(self) -> Iterator[Engine]:
        return (engine for ref in self._engines if (engine := ref()) is not None)
