"""The phase of the step: when a round begins, what ends it, and what all ranks do then.

    idle ──first gradient──> filling ──outermost backward over──> launched ──every engine launched──> idle
                             hooks release ops                    the last bucket has left            waits, binds

A round synchronizes or only accumulates; which one is decided when backward runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from undertow.config import SyncConfig
from undertow.plan import Plan
from undertow.runtime.comm.comm_hook import CommHook, no_second_hook
from undertow.runtime.comm.group import GroupRef, OwnGroup
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute import agreed_errors
from undertow.runtime.execute.executor import Round
from undertow.runtime.execute.hooks import OutermostEnd, is_watched
from undertow.runtime.execute.round import OpenRound
from undertow.runtime.gradients.binding import gradients_aside
from undertow.runtime.model.module_params import ModuleParams
from undertow.runtime.replan.current_plan import CurrentPlan
from undertow.runtime.replan.param_hooks import Listeners, ParamHooks
from undertow.runtime.step.checks import Checks
from undertow.runtime.step.optimizers_in_backward import OptimizersInBackward
from undertow.runtime.step.progress import Progress
from undertow.runtime.step.siblings import SiblingEngines, all_of
from undertow.runtime.step.sums import Combination
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.dist_autograd import DistributedBackwards


class Engine:
    """Synchronizes the gradients of `members` over `group`, backward after backward.

    All ranks `open` it, at the latest when the first round begins.
    """

    def __init__(self, members: ModuleParams, group: OwnGroup, config: SyncConfig, recorder: Recorder) -> None:
        self.is_accumulating = self.is_closed = False
        self.rescale = 1.0  # of the mean over all ranks, where some of them have run out of data
        self.also_awaited: list[torch.futures.Future[Any]] = []  # by the end of the next round
        self.is_passed_on, self._recorder, self._members = False, recorder, members  # passed on to somebody who came later
        self._progress = Progress()
        group.here.num_steps, group.here.is_idle = self._progress.rounds, self._progress.is_idle
        self._open: OpenRound | None = None
        self._end = OutermostEnd(self._launch_rest)
        self._optimizers_in_backward = OptimizersInBackward()
        self.current_plan = CurrentPlan(members, group, config, recorder, Listeners(self._fill, self._enter, self._thawed))
        self.combination = Combination(self.current_plan, config.op, is_between=self._is_between_rounds)
        self.siblings = SiblingEngines([self])
        self.checks = Checks(self.current_plan, members, config)

    @property
    def plan(self) -> Plan:
        return self.current_plan.plan

    @property
    def generation(self) -> int:
        return self.current_plan.compiled.generation

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of parameters that got no gradient on this rank in the last synchronized step."""
        watch = self.current_plan.watch
        return self._progress.unused if watch.uses is None else watch.names_in_order(self.plan, watch.uses.unused)

    def accumulates(self, value: bool) -> None:
        """Whether a backward that runs from now on only accumulates."""
        self.is_accumulating = value
        if self.current_plan.watch.uses is not None:
            self.current_plan.watch.uses.accumulates(value)

    @property
    def is_busy(self) -> bool:
        """Whether a round is under way."""
        return self._open is not None

    def forward_begins(self, *, is_training: bool) -> None:
        """Called before every forward that may be followed by a backward."""
        self.current_plan.group.require_no_fault()
        self._abandon()
        self._await_others()
        self.checks.require_alike()
        current_plan = self.current_plan
        current_plan.look_again()
        current_plan.look()
        if current_plan.is_active:
            self._prepare(current_plan.watch)
        if not is_training:
            return
        current_plan.group.trains_here()
        if not current_plan.is_active and not self.is_accumulating:
            self._recorder.round_ends(())  # there are no rounds that would end a step
        self._recorder.forward_begins()
        if current_plan.watch.uses is not None:
            self._progress.has_accumulated &= not current_plan.watch.uses.is_over
        current_plan.watch.forward_begins()
        if current_plan.is_active and not self._progress.has_begun:
            current_plan.compiled.executor.look()
            self.combination.forward_begins()
        self._progress.forward_begins(is_accumulating=not self.synchronizes)

    def use_hook(self, hook: CommHook) -> None:
        """Reduces buckets by `hook` from the next round on. PhaseError in a round, or if there is a hook already."""
        earlier = self.current_plan.compiled.reducer.hook
        if self._open is not None or earlier is not None:
            raise no_second_hook(earlier)
        self.current_plan.use_hook(hook)

    def concerns(self, params: set[int]) -> bool:
        """Whether one of these parameters, by id, is ours."""
        return not self.is_closed and self.current_plan.concerns(params)

    def may_pass_on(self, params: frozenset[int], group: GroupRef) -> bool:
        """Whether somebody who synchronizes those parameters, by id, over `group` may take ours over."""
        if self.is_busy and private.graph_task_id() != -1:
            return False
        self.current_plan.settle()
        return params >= self.current_plan.watch.ids and group.ranks == self.current_plan.group.user.ranks

    def pass_on(self) -> set[int]:
        """Ends here; returns the parameters, by id, that have accumulated a gradient since the last synchronization."""
        self.combination.require_no_weights()
        self.complete()
        self.current_plan.wait_for_parameters()
        self.close()
        self.is_passed_on = True
        return self.current_plan.watch.accumulated_ids()

    def require_successor(self) -> None:
        """PhaseError where our parameters were passed on to somebody who is gone."""
        if self.is_passed_on:
            self.current_plan.require_watched()

    def inherit(self, accumulated: set[int]) -> None:
        """Takes over what another engine has passed on."""
        watch = self.current_plan.watch
        watch.arrived_before |= watch.indices(accumulated)
        self._progress.has_accumulated |= bool(accumulated)

    def finish_before_step(self, params: set[int], *, steps: bool) -> None:
        """Runs a round if one is owed before an optimizer updates these parameters, by id, or before their gradients are looked
        at, and it does not step. PhaseError in the middle of a backward.
        """
        if self._open is not None and private.graph_task_id() != -1:
            raise agreed_errors.step_within_backward(
                f"synchronization {self._open.round.number}, rank {self.current_plan.group.rank}"
            )
        self._abandon()
        progress, current_plan = self._progress, self.current_plan
        is_up_to_date = progress.has_brought(params) and not self._members.has_new_of(params)
        if not is_up_to_date:
            current_plan.settle()
            current_plan.look_again(if_active=True)  # the next backward may come without a forward that tells of a change
            progress.is_owed |= current_plan.retiring is not None  # parameters of which no forward has told
        if progress.is_owed and not (is_up_to_date and current_plan.has_result):
            self._run_outside_of_backward(steps=True)
        self.checks.require_alike()
        if steps:
            progress.steps(params)
            if current_plan.watch.uses is not None:
                current_plan.watch.uses.steps()

    @property
    def is_step_empty(self) -> bool:
        """Whether nothing has come yet of what a step begins with, neither a training forward nor a synchronization."""
        return not self._progress.is_owed and not (self._progress.is_step_due and self.current_plan.has_result)

    def finish(self) -> None:
        """Runs a round, unless one has run since the last training forward or step; for a rank without gradients."""
        num_rounds = self._progress.num_rounds
        self._abandon()
        was_abandoned = self._progress.num_rounds > num_rounds  # and its gradients may be gone
        begins = self.is_step_empty and not was_abandoned
        if begins:
            self._progress.forgets_unused()
        if self._progress.is_owed or begins:
            self._run_outside_of_backward()

    def shadow(self) -> None:
        """A round in which this rank, which has run out of data, only keeps the others company."""
        self._abandon()
        self.combination.runs_out()
        self.current_plan.settle()
        if self._meets:
            with gradients_aside(self.current_plan.watch.params):
                self._begin(is_synchronized=True, is_shadow=True)
                self._launch_rest()
                self.complete()

    def join_ends(self) -> None:
        """From here on all ranks count again, and those that had run out of data are where the others are."""
        self.rescale = 1.0
        self._progress.begins_anew()

    def complete(self) -> None:
        """Waits for what was launched and binds the gradients. Raises what the ranks have agreed on."""
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
        """Ends a round that an exception in backward has left open, before somebody reads what it has updated in part."""
        if self._open is not None and not self._open.is_launched and not self._end.is_coming:  # else one runs elsewhere
            self._abandon()

    def open(self) -> None:
        """Makes our process group and compares the ranks, once; a collective call the first time, PlanMismatch."""
        self.current_plan.open()

    def close(self) -> None:
        """Ends what is under way and takes the hooks off; gradients stay where they are."""
        self.is_closed = True
        self.combination.give_back()
        self.current_plan.close()
        self._optimizers_in_backward.close()

    @property
    def synchronizes(self) -> bool:
        """Whether a backward that runs now communicates: also one that only accumulates, where what rests are shards."""
        current_plan = self.current_plan
        return not self.is_accumulating or (current_plan.compiled.strategy.reduces_micro_batches and current_plan.is_active)

    def _prepare(self, watch: ParamHooks) -> None:
        """What can only be known when a forward begins."""
        watch.run_last()
        self._optimizers_in_backward.take_over(watch)
        if watch.distributed is None and private.is_rpc_running():
            watch.distributed = DistributedBackwards(watch.params, is_local=lambda: self.is_busy, on_end=self._reduce_elsewhere)
        if watch.distributed is not None:
            watch.distributed.forward_begins()

    def _reduce_elsewhere(self, gradients: dict[int, Tensor]) -> None:
        """A round for gradients that do not lie in `.grad`, at the end of their backward."""
        if self.is_accumulating:
            return
        watch = self.current_plan.watch
        params = watch.params
        with gradients_aside(params):
            self._begin(is_synchronized=True)
            for index, gradient in gradients.items():
                params[index].grad = gradient
                watch.arrivals.note(index)
            self._launch_rest()
            self.complete()
            for index, gradient in gradients.items():
                gradient.copy_(params[index].grad)  # type: ignore[arg-type]  # it is the mean

    @private.untraced
    def _enter(self, watch: ParamHooks, task: int, param: int) -> None:
        """The gradient of `param` of `watch` is the first to arrive there in backward `task`."""
        is_first = self._is_between_rounds()
        current_plan, gradient_of = self.current_plan, id(watch.params[param])
        before = current_plan.watch
        if is_first:
            current_plan.look_for_thawed()
            current_plan.settle()
            if gradient_of not in current_plan.watch.ids:
                return  # it was in the module for one forward only, or is no more
            self.siblings.take_part(task)
        self._end.watch(task)
        now = current_plan.watch
        if now is not before and now is not watch:  # since a moment ago, and this gradient counts there
            for index in now.indices({gradient_of}):
                now.arrivals.arrive(index)

    @private.untraced
    def _thawed(self, param: Tensor) -> None:
        """A gradient of a parameter has come that was frozen when the plan was made; PhaseError where no plan will have it."""
        current_plan = self.current_plan
        if self.is_closed or id(param) in current_plan.watch.ids or param.grad is None or is_watched(param, but=self):
            return  # counted elsewhere, or frozen again
        if self._is_between_rounds():
            task = private.graph_task_id()
            current_plan.look_again()
            current_plan.settle()
            if id(param) in current_plan.watch.ids:
                self.siblings.take_part(task)
                self._end.watch(task)
                return
        current_plan.require_left(param)

    def take_part(self, task: int) -> None:
        """Begins a round in backward `task`, unless one is under way, whether a gradient of ours will come or not."""
        if self.current_plan.watch.uses is not None:
            self.current_plan.watch.uses.backward_runs()
        if self.current_plan.is_active and not self.is_closed and self._is_between_rounds():
            self._end.watch(task)  # first: who finds a round open and no end coming takes its backward for failed
            self._begin(is_synchronized=self.synchronizes)

    def finish_owed(self) -> None:
        """Runs a round if one is owed: a companion has."""
        if self._progress.is_owed:
            self._run_outside_of_backward()

    def _run_outside_of_backward(self, *, steps: bool = False) -> None:
        own = (self._launch, self.complete) if self._meets and not self.is_closed else ()
        self._progress.is_owed = False
        if self.current_plan.watch.uses is not None:
            self.current_plan.watch.uses.backward_runs(steps=steps)
        all_of(*own, self.siblings.finish_owed)

    @property
    def is_backward_due(self) -> bool:
        """Whether a training forward has run whose backward is to synchronize, and no synchronization has followed."""
        return self._progress.is_owed and self._meets

    @property
    def _meets(self) -> bool:
        """Whether the other ranks are needed: where nothing is trained they are for what companions train."""
        return self.current_plan.trains or (self.current_plan.is_active and len(self.siblings) > 1)

    def _launch(self, *, op: str | None = None) -> None:
        if self._open is not None:
            raise agreed_errors.synchronized_already(self._progress.num_rounds)
        self._begin(is_synchronized=True, op=op)
        self._launch_rest()

    def _begin(self, *, is_synchronized: bool, is_shadow: bool = False, op: str | None = None) -> None:
        current_plan = self.current_plan
        current_plan.settle()
        self._optimizers_in_backward.take_over(current_plan.watch)
        if is_synchronized:
            current_plan.open()
            current_plan.adopt_plan()
        is_last = not self.is_accumulating
        weighing = self.combination.begins(is_synchronized=is_synchronized, is_shadow=is_shadow, is_last=is_last)
        compiled, arrivals = current_plan.compiled, current_plan.watch.arrivals
        arrivals.reset()
        this_round = Round(
            number=self._progress.num_rounds,
            generation=compiled.generation,
            mode=None if is_shadow else self._progress.mode,
            is_shadow=is_shadow,
            is_synchronized=is_synchronized,
            is_last=is_last,
            not_arrived=self._not_arrived,
            has_repeats=lambda: arrivals.has_repeats,
            has_other_buffers=is_synchronized and current_plan.has_other_buffers,
            is_read_at_once=current_plan.must_read_at_once or self.checks.must_be_read(self._progress.num_rounds),
            rescale=self.rescale * compiled.reducer.factor(op),
            op=op,
            weighing=weighing,
        )
        # A hook that the user has put on since the forward may run after ours, once, on the first gradient.
        holds_back = current_plan.retiring is not None or current_plan.watch.run_last()
        self._open = OpenRound(this_round, compiled.releases(this_round), holds_back=holds_back)
        compiled.executor.begin(this_round)
        self._recorder.backward_begins(generation=compiled.generation)

    def _is_between_rounds(self) -> bool:
        this = self._open
        if this is not None and not self._end.is_coming:  # a new backward has begun, and this round is not its own
            if this.is_launched:
                raise agreed_errors.not_waited_for(this.round)
            self._give_up(this)
        return self._open is None

    @private.untraced
    def _fill(self, bucket: int) -> None:
        if self._open is not None and not self._open.holds_back:
            self.current_plan.compiled.executor.run(self._open.releases.fill(bucket))

    def _launch_rest(self) -> None:
        """Backward is over: what is missing is unused here, and everything that is still here leaves."""
        this = self._open
        if this is None or this.is_launched:
            return  # a nested backward has reached the outermost end as well
        self._recorder.backward_ends()
        self._note_written()
        this.ending = self._end_round(this)
        next(this.ending)
        if private.graph_task_id() != -1:
            private.call_after_backward(self._go_on)

    @private.untraced
    def _go_on(self) -> None:
        """Behind the callbacks of all other engines: with several models in one backward all launch, then all wait."""
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

    def _note_written(self) -> None:
        """Gradients that something else than autograd has written into `.grad` count as well."""
        watch = self.current_plan.watch
        for param in self.current_plan.compiled.executor.written(watch.arrivals.absent - watch.arrived_before):
            watch.arrivals.note(param)

    def _end_round(self, this: OpenRound) -> Iterator[None]:
        """What follows backward, in parts: it yields wherever it is about to wait for other ranks."""
        current_plan = self.current_plan
        if current_plan.retiring is not None and this.round.is_synchronized:
            self._progress.num_rounds += current_plan.is_counted_apart  # also where the ranks do not agree: all have been there
            this.round.number += current_plan.is_counted_apart
            yield from current_plan.retire(this.round)
        executor, watch = current_plan.compiled.executor, current_plan.watch
        executor.run(this.releases.end_backward())
        yield
        executor.run(this.releases.join())
        self._await_others()
        late = agreed_errors.late_buckets(this.round)
        if late:
            executor.launch_late_parts(late)
            yield
            executor.add_late_parts()
            watch.arrivals.learn_repeats()
        if agreed_errors.all_have_other_buffers(this.round, num_ranks=current_plan.group.num_ranks):
            yield from current_plan.compare_buffers()
        self.combination.round_is_bound(this.round)
        self._close_round()
        if this.round.is_synchronized:
            self._settle(this.round)
        else:
            watch.arrived_before |= watch.arrivals.arrived
            self._progress.has_accumulated = True
            current_plan.look_again()

    def _await_others(self) -> None:
        awaited, self.also_awaited = self.also_awaited, []
        for future in awaited:
            future.wait()

    def _close_round(self) -> None:
        self._open = None
        self.current_plan.watch.arrivals.forget_traversal()
        self._end.forget()

    def _abandon(self) -> None:
        """Ends a round that an exception in backward has left open, and waits for one that was launched by hand."""
        if self._open is None or private.graph_task_id() != -1:
            return
        if self._open.is_launched:
            self.complete()
        else:
            self._give_up(self._open)

    def _give_up(self, this: OpenRound) -> None:
        """Ends a round whose backward failed: the other ranks are waiting for our buckets, and drop what they get.

        Every `.grad` is afterwards what it is now: the user may have cleared it, or another backward have begun.
        """
        this.round.has_failed = this.round.is_synchronized
        try:
            with gradients_aside(self.current_plan.watch.params) if this.round.is_synchronized else contextlib.nullcontext():
                self._recorder.backward_ends()
                this.ending = self._end_round(this)
                self.complete()
        finally:
            self.combination.give_back()

    def _not_arrived(self, bucket: int) -> list[int]:
        """Positions in `bucket` of parameters without a gradient since the last synchronization."""
        watch = self.current_plan.watch
        return watch.not_arrived(self.plan.buckets[bucket].params, watch.arrivals.missing(bucket))

    def _settle(self, this_round: Round) -> None:
        """Does what every rank does alike after a complete synchronization."""
        self._recorder.round_ends(this_round.busy_ms)
        self._progress.round_ends(has_failed=this_round.has_failed, is_last=this_round.is_last)
        current_plan, watch = self.current_plan, self.current_plan.watch
        if not this_round.has_failed:
            watch.arrived_before.clear()
            current_plan.look_again()
        names = watch.names_of(self.plan, this_round.unused)
        self._progress.notes_unused(names, is_last=this_round.is_last, is_gone=watch.has_no_gradient)
        self.combination.round_ends(this_round)
        self.checks.round_ends(this_round)
        agreed_errors.require_sound(this_round, rank=current_plan.group.rank, places=current_plan.group.places)
        self.combination.require_sound(this_round)
        current_plan.require_changed_alike(this_round)
        if this_round.has_failed:
            return  # it has left the other ranks already
        current_plan.round_ended(this_round)
        self.checks.round_was_sound(this_round)
        self._optimizers_in_backward.step()
