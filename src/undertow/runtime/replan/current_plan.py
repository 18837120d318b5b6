"""The parameters and the plan in force: how they are made, and how all ranks change them together."""

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from undertow.config import SyncConfig
from undertow.errors import PhaseError
from undertow.plan import Groups, Plan, first_plan
from undertow.runtime.comm.agreement import Agreement, surroundings
from undertow.runtime.comm.comm_hook import CommHook
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.agreed_errors import (
    changed_unlike,
    part_of_another,
)
from undertow.runtime.execute.compiled_plan import CompiledPlan
from undertow.runtime.execute.hooks import GradientFactor, call_at_registration, earlier_watchers
from undertow.runtime.execute.round import RoundKind, RoundResult
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.model.module_params import ModuleParams, first_change
from undertow.runtime.replan.param_hooks import Listeners, ObservedOrder, ParamHooks
from undertow.runtime.replan.planning import follows_observed_order, measure, planned, sharded_plan
from undertow.runtime.sharded.binding import make_gradients_whole
from undertow.runtime.sharded.layout import ShardGroups, Sharding
from undertow.schedule import Strategy


@dataclass(frozen=True, slots=True)
class InForce:
    """A plan, ready to run, and the hooks on its parameters."""

    compiled: CompiledPlan
    hooks: ParamHooks
    groups: Groups | None = None  # of the plan to which a sharded optimizer moves


@dataclass(frozen=True, slots=True)
class Change:
    """The parameters, and the reducer, of the next plan. All ranks first meet under the plan in force, and agree on it."""

    named_params: Sequence[tuple[str, Tensor]]
    plan: Plan
    reducer: Reducer
    has_more: bool = False  # modules or parameters, as a forward has found: the change is meant to last

    @property
    def ids(self) -> set[int]:
        return {id(param) for _, param in self.named_params}


class CurrentPlan:
    """Owns the plan in force, `now`, and a `change` of it that all ranks have not agreed on yet; `is_active` if there are rounds.

    A look at the module finds a change. It is a value: nothing follows it before the ranks have met (see `Meeting`), and the next
    look may find another one or none, as when torch.func.functional_call puts other parameters into the module for one call.
    Until then hooks tell which parameters outside of the plan get a gradient. `listeners` are called by the hooks.
    """

    def __init__(
        self,
        members: ModuleParams,
        group: OwnGroup,
        config: SyncConfig,
        recorder: Recorder,
        listeners: Listeners,
    ) -> None:
        self.members, self.group = members, group
        self._config, self._recorder, self._listeners = config, recorder, listeners
        self.change: Change | None = None
        self.is_stale = False  # the module is to be looked at when the next round begins
        self._left: frozenset[int] = frozenset()  # parameters of the plan, by id, that the last forward has found frozen or gone
        named_params, reducer = members.trained(), Reducer.of(group, config)
        self.is_active = reducer.is_active
        self.now = self._ready(self._planned(named_params, reducer), generation=0)
        # The settings of a group of experts list only that group, other settings none.
        divisor = config.experts[0].divisor if config.experts else None
        self._factor = GradientFactor(1 if divisor is None else group.num_ranks / divisor)
        self._apply_factor()
        # A layer may be made in the middle of a forward, and be trained in the backward that follows.
        plans = weakref.ref(self)  # torch keeps such hooks for the life of the process
        self._end_registrations = call_at_registration(lambda *_: _mark_stale(plans()))

    @property
    def trains(self) -> bool:
        """True if a round has anything to do: all ranks may have agreed that nothing is trained."""
        is_settled = self.change is None and self.group.is_open
        return self.is_active and not (is_settled and not self.now.hooks.named_params)

    @property
    def has_result(self) -> bool:
        """True if anything is left of the result of the last round; otherwise the user has cleared it, step or no step."""
        return self.now.compiled.executor.has_result()

    def open(self) -> None:
        """Creates Undertow's process group and compares the ranks; a collective call the first time. Raises PlanMismatch."""
        if self.group.num_ranks > 1 and not self.group.is_open:
            self.group.open()
            compiled = self.now.compiled
            self.compare(compiled.plan, compiled.params, compiled.reducer).require()
            self.members.ranks_agree()

    def owns_any(self, params: set[int]) -> bool:
        """Returns True if one of these parameters, by id, is the module's, trained or not."""
        # Called by every optimizer's step; there may be an optimizer for each parameter.
        return not self.members.ids.isdisjoint(params) or self.members.has_new_of(params)

    def mark_stale(self) -> None:
        """Makes the next `look_again` compare the module's parameters."""
        self.is_stale = True

    def look_at_forward(self) -> None:
        """Called by a forward: looks for a change of the module's parameters, also of those that are frozen now."""
        self.is_stale = False
        if not self.members.has_changed():
            return
        self._left = self.now.hooks.ids
        self._find_change(begins_forward=True, has_more=self.members.has_more())
        if not self.is_active and self.change is not None:  # one rank agrees with nobody
            self.follow()

    def look_again(self) -> None:
        """Called when a forward ends, a round begins, or a gradient arrives outside of the plan: the change may be another one.

        A parameter that is only frozen stays in the plan: if parts of a module take turns between two forwards, the parameters
        of the other parts are unused.
        """
        if self.is_stale or self.change is not None:
            if self.members.has_changed() or (self.change is not None and not self.members.are_lent()):
                self._find_change()
            self.is_stale = False
            if not self.is_active and self.change is not None:  # one rank agrees with nobody
                self.follow()

    def _find_change(self, *, begins_forward: bool = False, has_more: bool = False) -> None:
        hooks, now = self.now.hooks, self.now.compiled
        reducer = now.reducer if self.change is None else self.change.reducer
        accumulated = hooks.accumulated_ids()
        # A parameter that is trained again has not left. A frozen one with an accumulated gradient stays for one more round.
        self._left = self._left.difference(
            id(param) for _, param in self.members.named_params() if param.requires_grad or id(param) in accumulated
        )
        try:
            named_params = self.members.trained(also=(hooks.ids - self._left).union(hooks.outside))
            gone = hooks.ids.difference(id(param) for _, param in named_params)
            # A parameter that is only gone, maybe lent for a call, stays in the plan until a forward finds that it has left.
            is_other = reducer.hook is not now.reducer.hook or bool(gone & self._left) or not self._has_all(named_params, of=now)
            has_more |= self.change is not None and self.change.has_more
            change = self._planned(named_params, reducer)
            self.change = dataclasses.replace(change, has_more=has_more) if is_other else None
        except BaseException:  # a change that cannot be followed is refused again, and not forgotten
            self.is_stale = True
            self.members.is_unseen = True
            raise
        # A parameter that stays in the plan for its turn leaves it when a forward finds it frozen, or gone, still.
        self.members.is_unseen = bool(gone - self._left) or not all(param.requires_grad for _, param in named_params)
        if self.is_active:
            hooks.watch([param for _, param in self.members.named_params()], may_have_arrived=not begins_forward)
        self._apply_factor()

    @property
    def meets_before_forward(self) -> bool:
        """True if a training forward is the first to use new parameters, which are to have rank 0's values before.

        Not while a sharded optimizer's gradients are there, which the user may clear until then: ranks meet after the backward,
        and compare the values.
        """
        if self.change is None or not self.change.has_more or self.group.num_ranks == 1:
            return False
        is_new = not self.change.ids <= self.now.hooks.ids
        return is_new and not (self.now.compiled.sharding is not None and self.has_result)

    @property
    def comm_hook(self) -> CommHook | None:
        """The communication hook that reduces buckets, from the next round on at the latest."""
        reducer = self.now.compiled.reducer if self.change is None else self.change.reducer
        return reducer.hook

    @property
    def changes_params(self) -> bool:
        """True if parameters change. Then the meeting counts as a synchronization; not if only a hook is new."""
        return self.change is not None and self.change.reducer.hook is self.now.compiled.reducer.hook

    def all_params(self) -> list[Tensor]:
        """Returns the parameters of the plan in force, and of the change."""
        params = dict.fromkeys(self.now.hooks.params)
        if self.change is not None:
            params.update(dict.fromkeys(param for _, param in self.change.named_params))
        return list(params)

    def require_own(self) -> None:
        """Raises ConfigError if another engine watches a parameter of the change: gradients must be averaged once."""
        assert self.change is not None
        for name in earlier_watchers(self.change.named_params, but=self._listeners.owner):
            raise part_of_another(name)

    def follow(self) -> None:
        """Puts the change in force."""
        change, before = self.change, self.now
        assert change is not None  # else nobody calls this
        arrived = before.hooks.accumulated_ids() | before.hooks.arrived_ids() | set(before.hooks.outside)
        before.hooks.close()
        self.now = self._ready(change, generation=before.compiled.generation + 1, before=before)
        self.now.hooks.arrived_before |= self.now.hooks.indices(arrived)
        self.change, self._left = None, frozenset()
        self._apply_factor()

    def forget_buckets(self) -> None:
        """Discards the records of buckets that were empty."""
        self._recorder.forgets_buckets()

    def _apply_factor(self) -> None:
        """Called when there are other parameters; new ones may train before the change is in force."""
        self._factor.follow((*self.now.hooks.params, *(param for _, param in self.members.named_params())))

    def note_written(self) -> None:
        """Counts gradients that something other than autograd has written into `.grad`, which another plan cannot tell."""
        compiled = self.now.compiled
        self.now.hooks.arrived_before |= compiled.executor.written(range(len(compiled.params)))

    def close(self) -> None:
        """Removes all hooks."""
        self._end_registrations()
        self.now.compiled.reducer.close()
        self.now.hooks.close()
        self._factor.follow(())

    def use_hook(self, hook: CommHook) -> None:
        """Reduces buckets by `hook` from the next round on; before it the ranks meet without it and compare their hooks."""
        self.look_again()
        self.group.borrowers.add("hooks")
        before = self.now.compiled
        reducer = dataclasses.replace(before.reducer, hook=hook)
        named_params = self.now.hooks.named_params if self.change is None else self.change.named_params
        self.is_active = True
        self.change = self._planned(named_params, reducer)
        if not self.group.is_open or self.group.num_ranks == 1:
            self.note_written()
            self.follow()

    def adopt_plan(self) -> None:
        """Called when a round begins: moves to the plan that rank 0 has sent, if it differs.

        With a sharded optimizer, the plan moves as it does when parameters change: from a round without shards of gradients on,
        gradients are whole until its next step lays parameters out anew.
        """
        now = self.now
        compiled = now.compiled
        order, tuning = now.hooks.order, now.hooks.tuning
        is_sent = (order is not None and order.sent is not None) or (tuning is not None and tuning.sent is not None)
        plan = planned(compiled, now.hooks, self._config) if is_sent else None
        if compiled.sharding is not None:
            groups = now.groups if plan is None else plan.groups
            self.now = dataclasses.replace(now, groups=groups)
            if groups is not None and not compiled.sharding.holds_gradients:
                self.wait_for_parameters()
                make_gradients_whole(now.hooks.named_params, rank=self.group.rank)
                self._move(self._planned(now.hooks.named_params, compiled.reducer))
        elif plan is not None:
            self._move(Change(now.hooks.named_params, plan, compiled.reducer))

    def _move(self, change: Change) -> None:
        """Puts another plan of the same parameters in force."""
        before, hooks = self.now.compiled, self.now.hooks
        self.note_written()
        moved = CompiledPlan(change.plan, before.params, change.reducer, self._recorder, generation=before.generation + 1)
        # A `.grad` that lies in an old bucket keeps its memory until it has moved into the new one.
        before.executor.let_go()
        moved.executor.take_over_readings(before.executor)
        self.now = dataclasses.replace(self.now, compiled=moved)
        hooks.regroup(change.plan)

    def round_ended(self, result: RoundResult) -> None:
        """Called after a round that all ranks have found sound: sends measurements."""
        compiled, hooks = self.now.compiled, self.now.hooks
        if hooks.order is not None:
            hooks.order.send()
        if hooks.tuning is not None and hooks.tuning.act is not None:
            hooks.tuning.act(compiled.present)

    def shard(self, strategy: Strategy, groups: ShardGroups) -> Sharding:
        """Lays out parameters and gradients for `strategy`, in rank 0's order if that has arrived.

        If the parameters change, later rounds reduce whole gradients until it is called again. Returns the same object as long as
        the layout stays.
        """
        now, compiled, hooks = self.now, self.now.compiled, self.now.hooks
        if self.change is not None:
            raise PhaseError(
                "an optimizer steps after its parameters have changed and before gradients of the new ones are averaged.",
                where=f"rank {self.group.rank}",
                remedy="Run a forward and a backward between the change and the step.",
            )
        if compiled.sharding is not None:
            return compiled.sharding
        plan = sharded_plan(compiled.plan, hooks, now.groups, self._config)
        own = compiled.executor.own_gradients() if self.is_active else {}
        if hooks.order is not None:
            hooks.order.close()
            hooks.order = None
        self._recorder.forgets_gathers()
        sharding = Sharding(plan, compiled.params, strategy, groups, self._recorder)
        reducer = dataclasses.replace(compiled.reducer, shard_exchanges=sharding.groups.shard)
        sharded = CompiledPlan(
            plan, compiled.params, reducer, self._recorder, generation=compiled.generation + 1, sharding=sharding
        )
        self.now = InForce(sharded, hooks)
        if self.is_active:
            _ = sharded.executor
        sharding.adopt_gradients()
        sharding.reduce_again(own)
        hooks.regroup(plan)
        return sharding

    def wait_for_parameters(self) -> None:
        """Waits until all parameters that a sharded optimizer updates have arrived."""
        if self.now.compiled.sharding is not None:
            self.now.compiled.sharding.gathers.wait_for_all()

    def require_changed_alike(self, result: RoundResult) -> None:
        """Raises PlanMismatch, on every rank, if the parameters have changed on some ranks only."""
        now, change = self.now.compiled, self.change
        is_meeting = result.round.kind is RoundKind.RETIRE and change is not None
        plan, params, reducer, described = now.plan, now.params, now.reducer, ""
        if is_meeting and change is not None:
            plan, params, reducer = change.plan, tuple(param for _, param in change.named_params), change.reducer
            described = "a communication hook was registered"
            if reducer.hook is now.reducer.hook:
                described = first_change(now.plan.params, plan.params)
        error = changed_unlike(result, rank=self.group.rank, num_ranks=self.group.num_ranks, change=described)
        if error is None:
            return
        # On the host every rank has read the same and is here now, and the comparison names a parameter. On a device the other
        # ranks read later, when this one is gone.
        # A rank whose backward has failed comes alone: the others have raised that.
        if self.group.device.type == "cpu" and not result.has_failed:
            self.compare(plan, params, reducer).require()
        raise error

    def _has_all(self, named_params: Sequence[tuple[str, Tensor]], *, of: CompiledPlan) -> bool:
        """Returns True if that plan has these parameters, in this order and unchanged, and perhaps others."""
        specs = self.members.specs(named_params)
        wanted = [(id(param), spec, param.stride()) for (_, param), spec in zip(named_params, specs, strict=True)]
        planned = zip(map(id, of.params), of.plan.params, of.strides, strict=True)
        return all(each in planned for each in wanted)  # each search continues after the one that was found

    def compare(self, plan: Plan, params: Sequence[Tensor], reducer: Reducer, *, new: Sequence[str] = ()) -> Agreement:
        """Compares the parameters and settings of all ranks, and the names of `new` parameters; a collective call."""
        settings = {**surroundings(self.group, reducer.hook), **self._config.to_dict()}
        return self.members.compare(self.group, plan.params, params, settings, new=new)

    def _planned(self, named_params: Sequence[tuple[str, Tensor]], reducer: Reducer) -> Change:
        plan = first_plan(self.members.specs(named_params), self._config, num_ranks=reducer.group.num_ranks)
        # No shards until an optimizer steps again.
        return Change(tuple(named_params), plan, dataclasses.replace(reducer, shard_exchanges=None))

    def _ready(self, change: Change, *, generation: int, before: InForce | None = None) -> InForce:
        """Makes its buckets and hooks."""
        params = [param for _, param in change.named_params]
        compiled = CompiledPlan(change.plan, params, change.reducer, self._recorder, generation=generation)
        hooks = ParamHooks(change.named_params, compiled.plan, self._listeners)
        if not self.is_active:
            return InForce(compiled, hooks)
        # Too large buckets fail here instead of in the first backward.
        executor = compiled.executor
        if before is not None:
            executor.take_over_readings(before.compiled.executor)
        hooks.start()
        hooks.watch([param for _, param in self.members.frozen()], may_have_arrived=False)
        if follows_observed_order(compiled, self._config):
            hooks.order = ObservedOrder(hooks.arrivals, len(hooks.params), self.group)
        measure(hooks, compiled, self._config, self._recorder)
        return InForce(compiled, hooks)


def _mark_stale(plans: CurrentPlan | None) -> None:
    if plans is not None:
        plans.mark_stale()
