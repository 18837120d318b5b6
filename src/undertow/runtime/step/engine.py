"""The events of a step, and the rounds that they begin and end."""

import threading

from undertow.errors import PhaseError, require
from undertow.runtime.comm.comm_hook import CommHook
from undertow.runtime.execute.agreed_errors import (
    nothing_to_reduce,
    shards_held,
    step_after_failure,
    step_within_backward,
    synchronized_already,
    warn_of_local_gradients,
)
from undertow.runtime.execute.round import RoundKind, Settings
from undertow.runtime.gradients.binding import gradients_aside
from undertow.runtime.replan.meeting import Meeting, Stage
from undertow.runtime.replan.param_hooks import ParamHooks
from undertow.runtime.step.progress import Forward, Gradients
from undertow.runtime.step.rounds import Phase, RoundRunner
from undertow.runtime.step.siblings import all_of
from undertow.runtime.torch_private import private


class Engine(RoundRunner):
    """Synchronizes the gradients of `members` over `group`, backward after backward.

    A round synchronizes gradients or only accumulates them, as decided when backward runs.
    """

    @property
    def is_busy(self) -> bool:
        """True if a round is under way."""
        return self._open is not None

    @property
    def has_arrived(self) -> bool:
        """True if every bucket that has left in the round under way is reduced."""
        return self._open is None or self.current_plan.now.compiled.executor.is_completed()

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters without a gradient on this rank in the last synchronized step."""
        if self.current_plan.is_active:
            return self.progress.unused.last
        return tuple(name for name, param in self.current_plan.members.trained_now() if param.grad is None)

    def forward_begins(self, *, is_training: bool, is_compiled: bool = False) -> None:
        """Called before every forward that a backward may follow; `meet_before_forward` comes after the buffers."""
        current_plan, progress = self.current_plan, self.progress
        current_plan.group.watch.check()
        if self._open is not None:
            self._abandon()
        if self.checks.sent:
            self.checks.require_alike()
        current_plan.look_at_forward()
        self._prepare(current_plan.now.hooks, begins_step=is_training and not progress.has_begun)
        progress.forward = Forward.ENDED if is_compiled else Forward.RUNNING  # nothing tells the end of a compiled one
        if progress.gradients is not Gradients.SOUND and not current_plan.has_result:
            progress.gradients = Gradients.SOUND  # they are cleared
        if not is_training:
            return
        # Other ranks are told of an exception that ends this thread, and shown its stack if it is late.
        current_plan.group.here.thread = threading.get_ident()
        self.recorder.forward_begins()
        progress.forward_begins(synchronizes=self.synchronizes, is_last=not self.is_accumulating)

    def meet_before_forward(self, *, has_buffers: bool) -> None:
        """Meets the other ranks in the first training forward after parameters were added; a collective call there.

        Otherwise the first gradients would be means over models that differ. A rank that has not changed must come to this
        engine's round next, and not to its siblings', nor, if forwards synchronize buffers (`has_buffers`), to another forward.
        """
        current_plan, progress = self.current_plan, self.progress
        if not current_plan.meets_before_forward or self.siblings.are_several:
            return
        if has_buffers and (self.is_accumulating or progress.num_forwards_before > 1):
            return
        if progress.num_rounds == 0:
            current_plan.open()
        current_plan.wait_for_parameters()
        current_plan.look_again()
        current_plan.adopt_plan()
        hooks = current_plan.now.hooks
        hooks.arrivals.reset()  # they are those of the round before
        are_used = bool(hooks.outside)  # in a backward that only accumulated
        meeting = Meeting(current_plan, progress.num_rounds, mode=progress.steps.mode, are_used=are_used)
        progress.num_rounds += current_plan.changes_params
        stage: Stage | None = meeting.begin
        while stage is not None:
            stage = stage()

    def forward_ends(self) -> None:
        """Called after such a forward, which may have made a layer."""
        self.recorder.forward_ends()
        if self.current_plan.is_stale:
            self.current_plan.look_again()
        self.progress.forward = min(self.progress.forward, Forward.ENDED)

    def use_hook(self, hook: CommHook) -> None:
        """Reduces buckets by `hook` from the next round on; PhaseError in a round, or if there is a hook already."""
        earlier = self.current_plan.comm_hook
        require(
            self._open is None and earlier is None,
            "register_comm_hook can only be called once, and not within a backward.",
            where="gradients are being synchronized" if earlier is None else f"{earlier.name} is registered",
            remedy="Write one hook that calls the others, and register it before training.",
            error=PhaseError,
        )
        self.current_plan.use_hook(hook)

    def finish_before_step(self, params: set[int]) -> None:
        """Runs a round if one is owed before an optimizer steps on these parameters, by id, or their gradients are read.

        Raises PhaseError inside a backward.
        """
        current_plan, progress = self.current_plan, self.progress
        if (self._open is not None or progress.is_owed) and private.graph_task_id() != -1:
            raise step_within_backward(f"synchronization {progress.num_rounds}, rank {current_plan.group.rank}")
        if self._open is not None:
            self._abandon()
        is_up_to_date = progress.steps.are_due_for(params) and not current_plan.members.has_new_of(params)
        if not is_up_to_date:
            current_plan.mark_stale()  # the next backward may run without a forward that finds a change
            current_plan.look_again()
            current_plan.mark_stale()
            progress.is_owed |= current_plan.change is not None  # parameters that no forward has found
        if progress.is_owed and not (is_up_to_date and current_plan.has_result):
            self._run_outside_of_backward()
        if self.checks.sent:
            self.checks.require_alike()

    def optimizer_steps(self, params: set[int], settings: Settings, *, has_closure: bool) -> None:
        """Called before an optimizer updates these parameters, by id, with these settings, once nothing speaks against it."""
        self.progress.optimizer_steps(params, settings, of=self.current_plan.now.hooks.ids, has_closure=has_closure)

    def require_sound_gradients(self, params: set[int], *, reader: str) -> None:
        """Called when `reader` is about to use the gradients of these parameters, by id.

        Raises PhaseError if they are incomplete, and warns if they are this rank's own because no forward preceded the backward.
        """
        progress, hooks = self.progress, self.current_plan.now.hooks
        if progress.gradients is Gradients.SOUND:
            return
        where = f"{reader}, rank {self.current_plan.group.rank}"
        if progress.gradients is Gradients.INCOMPLETE:
            # Whatever `.grad` holds: on the rank whose backward failed it is None, cleared or not, if its bucket had left.
            raise step_after_failure(where)
        if progress.gradients is Gradients.LOCAL and self.current_plan.has_result:
            local = hooks.arrived_before & hooks.indices(params)
            if local:
                progress.gradients = Gradients.REPORTED
                warn_of_local_gradients(hooks.named_params[min(local)][0], where)

    @property
    def is_step_empty(self) -> bool:
        """True if neither a training forward nor a synchronization has begun the step."""
        return not self.progress.is_owed and not (self.progress.steps.are_due and self.current_plan.has_result)

    def finish(self) -> None:
        """Runs a round, unless one has run since the last training forward or step; for a rank without gradients."""
        num_rounds = self.progress.num_rounds
        self._abandon()
        was_abandoned = self.progress.num_rounds > num_rounds  # and its gradients may be gone
        begins = self.is_step_empty and not was_abandoned
        if begins:
            self.progress.unused.so_far = None
        if self.progress.is_owed or begins:
            self._run_outside_of_backward()

    def shadow(self) -> None:
        """Takes part in a round of the other ranks, without data; gradients that were not synchronized drop out."""
        self._abandon()
        self.current_plan.now.hooks.arrived_before.clear()
        self.current_plan.look_again()
        if self._meets:
            with gradients_aside(self.current_plan.all_params()):
                self._begin(RoundKind.SHADOW)
                self._launch_rest()
                self.complete()

    def close(self) -> None:
        """Ends the round under way and removes the hooks; gradients stay in place."""
        if self.phase < Phase.CLOSED:
            self.phase = Phase.CLOSED
        self.current_plan.close()

    @property
    def is_backward_due(self) -> bool:
        """True if a training forward has run whose backward is to synchronize, and no synchronization has followed."""
        return self.progress.is_owed and self._meets

    def _prepare(self, hooks: ParamHooks, *, begins_step: bool) -> None:
        """Does the preparations that only a forward makes possible."""
        hooks.arrival_hooks.run_last()
        if begins_step:
            self.current_plan.now.compiled.executor.look()

    def finish_owed(self) -> None:
        """Runs a round if one is owed: a sibling has."""
        if self.progress.is_owed:
            self._run_outside_of_backward()

    def _run_outside_of_backward(self) -> None:
        own = (self._launch_accumulated, self.complete) if self._meets and self.phase < Phase.CLOSED else ()
        self.progress.is_owed = False
        all_of(*own, self.siblings.finish_owed)

    @property
    def _meets(self) -> bool:
        """True if the other ranks are needed: a rank that trains nothing is needed for what its siblings train."""
        return self.current_plan.trains or (self.current_plan.is_active and self.siblings.are_several)

    def _launch_accumulated(self, *, op: str | None = None) -> None:
        """Sends accumulated gradients, outside of a backward; `complete` waits for them."""
        if self._open is not None:
            raise synchronized_already(self.progress.num_rounds)
        self._begin(RoundKind.REDUCE, op=op)
        self._launch_rest()

    def reduce_accumulated(self, op: str | None) -> None:
        """Sends accumulated gradients; `complete` waits for them. Raises PhaseError if there are none to send."""
        if not self.current_plan.is_active:
            return
        number, rank = self.progress.num_rounds, self.current_plan.group.rank
        if self._open is not None and self._open.has_ended:
            raise synchronized_already(number)
        self._abandon()
        if not self.progress.has_accumulated:
            raise nothing_to_reduce(number, rank=rank)
        sharding = self.current_plan.now.compiled.sharding
        if op is not None and sharding is not None and sharding.holds_gradients:
            raise shards_held(number, rank=rank)
        self._launch_accumulated(op=op)
