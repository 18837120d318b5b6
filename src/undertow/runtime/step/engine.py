"""The phase of the step: when a round begins, what ends it, and what all ranks do then.

    idle ──first gradient──> filling ──outermost backward over──> launched ──every engine launched──> idle
                             hooks release ops                    the last bucket has left            waits, binds

A round synchronises or only accumulates; which one is decided when backward runs.
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
from undertow.runtime.model.module_params import Members
from undertow.runtime.replan.current_plan import Formation
from undertow.runtime.replan.param_hooks import Listeners, Watch
from undertow.runtime.step.checks import Checks
from undertow.runtime.step.in_backward import InBackward
from undertow.runtime.step.progress import Progress
from undertow.runtime.step.siblings import Companions, all_of
from undertow.runtime.step.sums import Combination
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.dist_autograd import DistributedBackwards


class Engine:
    """Synchronises the gradients of `members` over `group`, backward after backward.

    All ranks `open` it, at the latest when the first round begins.
    """

    def __init__(self, members: Members, group: OwnGroup, config: SyncConfig, recorder: Recorder) -> None:
        self.is_accumulating = self.is_closed = False
        self.rescale = 1.0  # of the mean over all ranks, where some of them have run out of data
        self.also_awaited: list[torch.futures.Future[Any]] = []  # by the end of the next round
        self.is_passed_on, self._recorder, self._members = False, recorder, members  # passed on to somebody who came later
        self._progress = Progress()
        group.num_steps, group.is_idle = self._progress.rounds, self._progress.is_idle
        self._open: OpenRound | None = None
        self._end = OutermostEnd(self._launch_rest)
        self._in_backward = InBackward()
        self.formation = Formation(members, group, config, recorder, Listeners(self._fill, self._enter, self._thawed))
        self.combination = Combination(self.formation, config.op, is_between=self._is_between_rounds)
        self.companions = Companions([self])
        self.checks = Checks(self.formation, members, config)

    @property
    def plan(self) -> Plan:
        return self.formation.plan

    @property
    def generation(self) -> int:
        return self.formation.assembly.generation

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of parameters that got no gradient on this rank in the last synchronised step."""
        watch = self.formation.watch
        return self._progress.unused if watch.uses is None else watch.names_in_order(self.plan, watch.uses.unused)

    def accumulates(self, value: bool) -> None:
        """Whether a backward that runs from now on only accumulates."""
        self.is_accumulating = value
        if self.formation.watch.uses is not None:
            self.formation.watch.uses.accumulates(value)

    @property
    def is_busy(self) -> bool:
        """Whether a round is under way."""
        return self._open is not None

    def forward_begins(self, *, is_training: bool) -> None:
        """Called before every forward that may be followed by a backward."""
        self.formation.group.require_no_fault()
        self._abandon()
        self._await_others()
        self.checks.require_alike()
        formation = self.formation
        formation.look_again()
        formation.look()
        if formation.is_active:
            self._prepare(formation.watch)
        if not is_training:
            return
        formation.group.trains_here()
        if not formation.is_active and not self.is_accumulating:
            self._recorder.round_ends(())  # there are no rounds that would end a step
        self._recorder.forward_begins()
        if formation.watch.uses is not None:
            self._progress.has_accumulated &= not formation.watch.uses.is_over
        formation.watch.forward_begins()
        if formation.is_active and not self._progress.has_begun:
            formation.assembly.executor.look()
            self.combination.forward_begins()
        self._progress.forward_begins(is_accumulating=not self.synchronises)

    def use_hook(self, hook: CommHook) -> None:
        """Reduces buckets by `hook` from the next round on. PhaseError in a round, or if there is a hook already."""
        earlier = self.formation.assembly.reducer.hook
        if self._open is not None or earlier is not None:
            raise no_second_hook(earlier)
        self.formation.use_hook(hook)

    def concerns(self, params: set[int]) -> bool:
        """Whether one of these parameters, by id, is ours."""
        return not self.is_closed and self.formation.concerns(params)

    def may_pass_on(self, params: frozenset[int], group: GroupRef) -> bool:
        """Whether somebody who synchronises those parameters, by id, over `group` may take ours over."""
        if self.is_busy and private.graph_task_id() != -1:
            return False
        self.formation.settle()
        return params >= self.formation.watch.ids and group.ranks == self.formation.group.user.ranks

    def pass_on(self) -> set[int]:
        """Ends here; returns the parameters, by id, that have accumulated a gradient since the last synchronisation."""
        self.combination.require_no_weights()
        self.complete()
        self.formation.wait_for_parameters()
        self.close()
        self.is_passed_on = True
        return self.formation.watch.accumulated_ids()

    def require_successor(self) -> None:
        """PhaseError where our parameters were passed on to somebody who is gone."""
        if self.is_passed_on:
            self.formation.require_watched()

    def inherit(self, accumulated: set[int]) -> None:
        """Takes over what another engine has passed on."""
        watch = self.formation.watch
        watch.arrived_before |= watch.indices(accumulated)
        self._progress.has_accumulated |= bool(accumulated)

    def finish_before_step(self, params: set[int], *, steps: bool) -> None:
        """Runs a round if one is owed before an optimizer updates these parameters, by id, or before their gradients are looked
        at, and it does not step. PhaseError in the middle of a backward.
        """
        if self._open is not None and private.graph_task_id() != -1:
            raise agreed_errors.step_within_backward(
                f"synchronisation {self._open.round.number}, rank {self.formation.group.rank}"
            )
        self._abandon()
        progress, formation = self._progress, self.formation
        is_up_to_date = progress.has_brought(params) and not self._members.has_new_of(params)
        if not is_up_to_date:
            formation.settle()
            formation.look_again(if_active=True)  # the next backward may come without a forward that tells of a change
            progress.is_owed |= formation.retiring is not None  # parameters of which no forward has told
        if progress.is_owed and not (is_up_to_date and formation.has_result):
            self._run_outside_of_backward(steps=True)
        self.checks.require_alike()
        if steps:
            progress.steps(params)
            if formation.watch.uses is not None:
                formation.watch.uses.steps()

    @property
    def is_step_empty(self) -> bool:
        """Whether nothing has come yet of what a step begins with, neither a training forward nor a synchronisation."""
        return not self._progress.is_owed and not (self._progress.is_step_due and self.formation.has_result)

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
        self.formation.settle()
        if self._meets:
            with gradients_aside(self.formation.watch.params):
                self._begin(is_synchronised=True, is_shadow=True)
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
        self.formation.open()

    def close(self) -> None:
        """Ends what is under way and takes the hooks off; gradients stay where they are."""
        self.is_closed = True
        self.combination.give_back()
        self.formation.close()
        self._in_backward.close()

    @property
    def synchronises(self) -> bool:
        """Whether a backward that runs now communicates: also one that only accumulates, where what rests are shards."""
        formation = self.formation
        return not self.is_accumulating or (formation.assembly.strategy.reduces_micro_batches and formation.is_active)

    def _prepare(self, watch: Watch) -> None:
        """What can only be known when a forward begins."""
        watch.run_last()
        self._in_backward.take_over(watch)
        if watch.distributed is None and private.is_rpc_running():
            watch.distributed = DistributedBackwards(watch.params, is_local=lambda: self.is_busy, on_end=self._reduce_elsewhere)
        if watch.distributed is not None:
            watch.distributed.forward_begins()

    def _reduce_elsewhere(self, gradients: dict[int, Tensor]) -> None:
        """A round for gradients that do not lie in `.grad`, at the end of their backward."""
        if self.is_accumulating:
            return
        watch = self.formation.watch
        params = watch.params
        with gradients_aside(params):
            self._begin(is_synchronised=True)
            for index, gradient in gradients.items():
                params[index].grad = gradient
                watch.arrivals.note(index)
            self._launch_rest()
            self.complete()
            for index, gradient in gradients.items():
                gradient.copy_(params[index].grad)  # type: ignore[arg-type]  # it is the mean

    @private.untraced
    def _enter(self, watch: Watch, task: int, param: int) -> None:
        """The gradient of `param` of `watch` is the first to arrive there in backward `task`."""
        is_first = self._is_between_rounds()
        formation, gradient_of = self.formation, id(watch.params[param])
        before = formation.watch
        if is_first:
            formation.look_for_thawed()
            formation.settle()
            if gradient_of not in formation.watch.ids:
                return  # it was in the module for one forward only, or is no more
            self.companions.take_part(task)
        self._end.watch(task)
        now = formation.watch
        if now is not before and now is not watch:  # since a moment ago, and this gradient counts there
            for index in now.indices({gradient_of}):
                now.arrivals.arrive(index)

    @private.untraced
    def _thawed(self, param: Tensor) -> None:
        """A gradient of a parameter has come that was frozen when the plan was made; PhaseError where no plan will have it."""
        formation = self.formation
        if self.is_closed or id(param) in formation.watch.ids or param.grad is None or is_watched(param, but=self):
            return  # counted elsewhere, or frozen again
        if self._is_between_rounds():
            task = private.graph_task_id()
            formation.look_again()
            formation.settle()
            if id(param) in formation.watch.ids:
                self.companions.take_part(task)
                self._end.watch(task)
                return
        formation.require_left(param)

    def take_part(self, task: int) -> None:
        """Begins a round in backward `task`, unless one is under way, whether a gradient of ours will come or not."""
        if self.formation.watch.uses is not None:
            self.formation.watch.uses.backward_runs()
        if self.formation.is_active and not self.is_closed and self._is_between_rounds():
            self._end.watch(task)  # first: who finds a round open and no end coming takes its backward for failed
            self._begin(is_synchronised=self.synchronises)

    def finish_owed(self) -> None:
        """Runs a round if one is owed: a companion has."""
        if self._progress.is_owed:
            self._run_outside_of_backward()

    def _run_outside_of_backward(self, *, steps: bool = False) -> None:
        own = (self._launch, self.complete) if self._meets and not self.is_closed else ()
        self._progress.is_owed = False
        if self.formation.watch.uses is not None:
            self.formation.watch.uses.backward_runs(steps=steps)
        all_of(*own, self.companions.finish_owed)

    @property
    def is_backward_due(self) -> bool:
        """Whether a training forward has run whose backward is to synchronise, and no synchronisation has followed."""
        return self._progress.is_owed and self._meets

    @property
    def _meets(self) -> bool:
        """Whether the other ranks are needed: where nothing is trained they are for what companions train."""
        return self.formation.trains or (self.formation.is_active and len(self.companions) > 1)

    def _launch(self, *, op: str | None = None) -> None:
        if self._open is not None:
            raise agreed_errors.synchronised_already(self._progress.num_rounds)
        self._begin(is_synchronised=True, op=op)
        self._launch_rest()

    def _begin(self, *, is_synchronised: bool, is_shadow: bool = False, op: str | None = None) -> None:
        formation = self.formation
        formation.settle()
        self._in_backward.take_over(formation.watch)
        if is_synchronised:
            formation.open()
            formation.adopt_plan()
        is_last = not self.is_accumulating
        weighing = self.combination.begins(is_synchronised=is_synchronised, is_shadow=is_shadow, is_last=is_last)
        assembly, arrivals = formation.assembly, formation.watch.arrivals
        arrivals.reset()
        this_round = Round(
            number=self._progress.num_rounds,
            generation=assembly.generation,
            mode=None if is_shadow else self._progress.mode,
            is_shadow=is_shadow,
            is_synchronised=is_synchronised,
            is_last=is_last,
            not_arrived=self._not_arrived,
            has_repeats=lambda: arrivals.has_repeats,
            has_other_buffers=is_synchronised and formation.has_other_buffers,
            is_read_at_once=formation.must_read_at_once or self.checks.must_be_read(self._progress.num_rounds),
            rescale=self.rescale * assembly.reducer.factor(op),
            op=op,
            weighing=weighing,
        )
        # A hook that the user has put on since the forward may run after ours, once, on the first gradient.
        holds_back = formation.retiring is not None or formation.watch.run_last()
        self._open = OpenRound(this_round, assembly.releases(this_round), holds_back=holds_back)
        assembly.executor.begin(this_round)
        self._recorder.backward_begins(generation=assembly.generation)

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
            self.formation.assembly.executor.run(self._open.releases.fill(bucket))

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
            self.companions.complete()
            raise
        private.call_after_backward(self._go_on)

    def _note_written(self) -> None:
        """Gradients that something else than autograd has written into `.grad` count as well."""
        watch = self.formation.watch
        for param in self.formation.assembly.executor.written(watch.arrivals.absent - watch.arrived_before):
            watch.arrivals.note(param)

    def _end_round(self, this: OpenRound) -> Iterator[None]:
        """What follows backward, in parts: it yields wherever it is about to wait for other ranks."""
        formation = self.formation
        if formation.retiring is not None and this.round.is_synchronised:
            self._progress.num_rounds += formation.is_counted_apart  # also where the ranks do not agree: all have been there
            this.round.number += formation.is_counted_apart
            yield from formation.retire(this.round)
        executor, watch = formation.assembly.executor, formation.watch
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
        if agreed_errors.all_have_other_buffers(this.round, num_ranks=formation.group.num_ranks):
            yield from formation.compare_buffers()
        self.combination.round_is_bound(this.round)
        self._close_round()
        if this.round.is_synchronised:
            self._settle(this.round)
        else:
            watch.arrived_before |= watch.arrivals.arrived
            self._progress.has_accumulated = True
            formation.look_again()

    def _await_others(self) -> None:
        awaited, self.also_awaited = self.also_awaited, []
        for future in awaited:
            future.wait()

    def _close_round(self) -> None:
        self._open = None
        self.formation.watch.arrivals.forget_traversal()
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
        this.round.has_failed = this.round.is_synchronised
        try:
            with gradients_aside(self.formation.watch.params) if this.round.is_synchronised else contextlib.nullcontext():
                self._recorder.backward_ends()
                this.ending = self._end_round(this)
                self.complete()
        finally:
            self.combination.give_back()

    def _not_arrived(self, bucket: int) -> list[int]:
        """Positions in `bucket` of parameters without a gradient since the last synchronisation."""
        watch = self.formation.watch
        return watch.not_arrived(self.plan.buckets[bucket].params, watch.arrivals.missing(bucket))

    def _settle(self, this_round: Round) -> None:
        """What every rank does alike when a synchronisation is complete."""
        self._recorder.round_ends(this_round.busy_ms)
        self._progress.round_ends(has_failed=this_round.has_failed, is_last=this_round.is_last)
        formation, watch = self.formation, self.formation.watch
        if not this_round.has_failed:
            watch.arrived_before.clear()
            formation.look_again()
        names = watch.names_of(self.plan, this_round.unused)
        self._progress.notes_unused(names, is_last=this_round.is_last, is_gone=watch.has_no_gradient)
        self.combination.round_ends(this_round)
        self.checks.round_ends(this_round)
        agreed_errors.require_sound(this_round, rank=formation.group.rank, places=formation.group.places)
        self.combination.require_sound(this_round)
        formation.require_changed_alike(this_round)
        if this_round.has_failed:
            return  # it has left the other ranks already
        formation.round_ended(this_round)
        self.checks.round_was_sound(this_round)
        self._in_backward.step()
