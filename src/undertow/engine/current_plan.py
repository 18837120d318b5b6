"""The parameters and the plan in force: how they are made, and how a change of the module is found
and followed.

Reasons: docs/design/plan-changes.md.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim.optimizer import Optimizer

from undertow.buckets.bucket import BucketLayout
from undertow.buckets.comm_hook import CommHook
from undertow.buckets.recorder import Recorder
from undertow.buckets.transfer import Reducer
from undertow.config import SyncConfig
from undertow.device import device_of
from undertow.engine.agreed_errors import part_of_another
from undertow.engine.arrivals import BackwardListener
from undertow.engine.compiled import CompiledPlan
from undertow.engine.hooks import (
    GradientFactor,
    ParamHooks,
    call_at_registration,
    earlier_watchers,
)
from undertow.engine.params import ModuleParams
from undertow.engine.tuning import Tuning, order_of
from undertow.errors import PhaseError, require
from undertow.mesh.axes import are_even, require_distributed_before, require_fits
from undertow.mesh.local_tensors import KeptPlacements, local_params, local_tensor
from undertow.plan import Plan, first_plan
from undertow.ranks.agreement import BUILD_ALIKE, surroundings
from undertow.ranks.transport import OwnGroup


@dataclass(frozen=True, slots=True)
class Change:
    """The parameters, and the reducer, of the next plan, until all ranks rebuild."""

    named_params: Sequence[tuple[str, Tensor]]
    plan: Plan
    reducer: Reducer
    # parameters of the plan in force, by id, that a forward has found frozen or gone
    left: frozenset[int] = frozenset()

    @property
    def ids(self) -> set[int]:
        return {id(param) for _, param in self.named_params}


class Shards(Protocol):
    """The owner of a layout in shards."""

    def lay_out(self) -> None:
        """Called when other parameters are in force, whole on every rank: lays them out."""

    def require_stepper(self, optimizer: Optimizer) -> None:
        """Raises PhaseError unless `optimizer` updates shards."""


class CurrentPlan:
    """Owns the plan in force, `compiled`, and the `hooks` on its parameters; also a `change` that
    ranks have not agreed on yet.

    `is_active` if there are rounds.

    A look at the module finds a change. It is a value: nothing follows it before all ranks
    `rebuild`, and the next look may find another one or none, for example when
    torch.func.functional_call puts other parameters into the module for one call. Until then hooks
    tell which parameters outside of the plan get a gradient. The hooks call the `engine`.
    """

    def __init__(
        self,
        members: ModuleParams,
        group: OwnGroup,
        config: SyncConfig,
        recorder: Recorder,
        engine: BackwardListener,
    ) -> None:
        self.members, self.group = members, group
        self._recorder, self._engine = recorder, engine
        self.change: Change | None = None
        # by id, parameters that have left the plan, and whose names others have now
        self.replaced: dict[int, weakref.ref[Tensor]] = {}
        self.shards: Shards | None = None  # a `ShardedSteps`, which sets it
        self.is_stale = False  # the next `find_change` compares the module's parameters
        self.placements = KeptPlacements(group.waiting, lambda error: group.watch.fail(error))
        self.compiled: CompiledPlan
        self.hooks: ParamHooks
        self.tuning: Tuning | None = None  # of these parameters, if there are rounds
        self.is_active: bool
        self._put_in_force(self._planned(members.trained(), Reducer.of(group, config)))
        # The settings of a group of experts list only that group, other settings none.
        divisor = config.experts[0].divisor if config.experts else None
        self._factor = GradientFactor(1 if divisor is None else group.num_ranks / divisor)
        self._apply_factor()
        # A layer may be made in the middle of a forward, and be trained in the backward that
        # follows.
        plans = weakref.ref(self)  # torch keeps such hooks for the life of the process
        self._end_registrations = call_at_registration(lambda *_: _mark_stale(plans()))

    @property
    def trains(self) -> bool:
        """True if a round has anything to do: all ranks may have agreed that nothing is trained."""
        is_settled = self.change is None and self.group.is_open
        return self.is_active and not (is_settled and not self.hooks.named_params)

    @property
    def has_result(self) -> bool:
        """True if anything is left of the result of the last round.

        Otherwise the user has cleared it, step or no step.
        """
        return self.compiled.has_result()

    def open_group(self) -> None:
        """Creates Undertow's process group and compares the ranks.

        A collective call the first time. Raises PlanMismatch.
        """
        if self.group.num_ranks > 1 and not self.group.is_open:
            self.group.open()
            compiled = self.compiled
            self.require_alike(compiled.plan, compiled.params, compiled.reducer)
            self.members.read_again()

    def find_change_at_forward(self) -> None:
        """Called by a forward: looks for a change, also of parameters that are frozen now."""
        self.is_stale = False
        if self.members.has_changed():
            self._set_change(begins_forward=True)

    def find_change(self) -> None:
        """Called when a forward ends, a round begins, or a gradient arrives outside of the plan:
        the change may be another one.

        A parameter that is only frozen stays in the plan: if parts of a module take turns between
        two forwards, the parameters of the other parts are unused.
        """
        if not self.is_stale and self.change is None:
            return
        if self.members.has_changed() or (self.change is not None and not self.members.are_lent()):
            self._set_change()
        self.is_stale = False
        if not self.is_active and self.change is not None:  # one rank has no other to agree with
            self.follow()

    def _set_change(self, *, begins_forward: bool = False) -> None:
        hooks, compiled = self.hooks, self.compiled
        reducer = compiled.reducer if self.change is None else self.change.reducer
        present = self.members.named_params()
        # Parameters leave the plan at a forward only: later looks keep what it has found.
        found = frozenset[int]() if self.change is None else self.change.left
        leaving = hooks.ids if begins_forward else found
        accumulated = hooks.ids_of(hooks.arrived_before)
        # A parameter that is trained again does not leave. A frozen one with an accumulated
        # gradient stays for one more round.
        leaving = leaving.difference(
            id(param) for _, param in present if param.requires_grad or id(param) in accumulated
        )
        try:
            require_distributed_before(hooks.named_params, present)
            named_params = self.members.trained(also=(hooks.ids - leaving).union(hooks.outside))
            gone = hooks.ids.difference(id(param) for _, param in named_params)
            # A parameter that is only gone, maybe lent for a call, stays in the plan until a
            # forward finds that it has left.
            has_others = bool(gone & leaving) or not self._has_all(named_params)
            has_others |= self.members.are_others_frozen(present, planned=hooks.ids)
            change = None
            if has_others or reducer.hook is not compiled.reducer.hook:
                planned = self._planned(named_params, reducer)
                change = dataclasses.replace(planned, left=leaving)
            self.change = change
        except BaseException:
            # A change that cannot be followed is refused again, and not forgotten.
            self.is_stale = True
            self.members.is_unseen = True
            raise
        # A parameter that stays in the plan for its turn leaves it when a forward finds it frozen,
        # or gone, still.
        self.members.is_unseen = bool(gone - leaving) or not all(
            param.requires_grad for _, param in named_params
        )
        if self.is_active:
            self.placements.follow(present)
            hooks.watch([param for _, param in present], may_have_arrived=not begins_forward)
        self._apply_factor()

    @property
    def comm_hook(self) -> CommHook | None:
        """The communication hook that reduces buckets, from the next round on at the latest."""
        reducer = self.compiled.reducer if self.change is None else self.change.reducer
        return reducer.hook

    def all_params(self) -> list[Tensor]:
        """Returns the parameters of the plan in force, and of the change."""
        changed = () if self.change is None else self.change.named_params
        return list(dict.fromkeys((*self.hooks.params, *(param for _, param in changed))))

    def prepare_to_leave(self) -> None:
        """Called before ranks leave the plan in force: `.grad` holds all its results.

        Raises ConfigError if another engine watches a parameter of the change, because gradients
        must be averaged once, and PhaseError if ranks have shards of gradients.
        """
        change = self.change
        assert change is not None
        for name in earlier_watchers(change.named_params, other_than=self._engine):
            raise part_of_another(name)
        self.compiled.layout.make_gradients_whole(change.named_params)
        self.note_written()

    def new_params(self) -> list[tuple[str, Tensor]]:
        """Returns the module's parameters whose values the ranks have not compared or averaged."""
        known = set(self.hooks.ids)
        common_frozen = self.members.common_frozen
        known.update(id(param) for _, param in common_frozen if not param.requires_grad)
        return [
            (name, param) for name, param in self.members.named_params() if id(param) not in known
        ]

    def follow(self) -> None:
        """Puts the change in force."""
        change, hooks = self.change, self.hooks
        assert change is not None  # else this is not called
        arrived = hooks.arrived_in_backward()
        arrived_before = hooks.ids_of(hooks.arrived_before).union(hooks.outside)
        present, ids = dict(self.members.named_params()), change.ids
        self.replaced = {key: ref for key, ref in self.replaced.items() if ref() is not None}
        for name, param in hooks.named_params:
            if present.get(name, param) is not param and id(param) not in ids:
                self.replaced[id(param)] = weakref.ref(param)
        self._close_hooks()
        comm_hook = self.compiled.reducer.hook
        self._put_in_force(change, before=self.compiled)
        self.register_hooks()
        if comm_hook is not None:
            comm_hook.buckets_change(is_told=self.group.rank == 0)
        self.hooks.arrived_before |= self.hooks.indices(arrived | arrived_before)
        self.change = None
        self.members.read_again()
        self._apply_factor()
        if self.shards is not None:
            self.shards.lay_out()
        # in this backward: one that a hook has cleared since is missed
        self.hooks.arrivals.note(self.hooks.indices(arrived))

    def _apply_factor(self) -> None:
        """Called when there are other parameters; new ones may train before the change is in
        force."""
        if not self._factor.is_one:
            present = [param for _, param in self.members.named_params()]
            self._factor.follow((*self.hooks.params, *present))

    def note_written(self) -> None:
        """Counts gradients that other code than autograd has written into `.grad`, which another
        plan cannot detect."""
        if self.is_active:
            self.hooks.arrived_before |= self.compiled.written(range(len(self.compiled.params)))

    def close(self) -> None:
        """Removes all hooks."""
        self._end_registrations()
        self.compiled.reducer.close()
        self._close_hooks()
        self.placements.follow(())
        self._factor.follow(())

    def _close_hooks(self) -> None:
        self.hooks.close()
        if self.tuning is not None:
            self.tuning.close()

    def use_hook(self, hook: CommHook, *, is_in_round: bool) -> None:
        """Reduces buckets by `hook` from the next round on.

        Before it the ranks leave the present plan, and compare their hooks. Raises PhaseError in a
        round, and if there is a hook already.
        """
        earlier = self.comm_hook
        require(
            not is_in_round and earlier is None,
            "register_comm_hook can only be called once, and not within a backward.",
            where="gradients are being synchronized"
            if earlier is None
            else f"{earlier.name} is registered",
            remedy="Write one hook that calls the others, and register it before training.",
            error=PhaseError,
        )
        self.find_change()
        self.group.borrowers.add("hooks")
        reducer = dataclasses.replace(self.compiled.reducer, hook=hook)
        named_params = self.hooks.named_params if self.change is None else self.change.named_params
        left = frozenset[int]() if self.change is None else self.change.left
        self.change = dataclasses.replace(self._planned(named_params, reducer), left=left)
        if not self.group.is_open or self.group.num_ranks == 1:
            self.note_written()
            self.follow()

    def regroup(self, plan: Plan, layout: BucketLayout | None = None) -> None:
        """Puts another plan of the same parameters in force, between two rounds; a `layout` is that
        of shards, which take over the gradients themselves.

        `note_written` comes before it, if gradients may have been written since the last round.
        """
        before = self.compiled
        if layout is None:
            # A `.grad` that lies in an old bucket keeps its memory until it is packed again.
            before.let_go()
        self.compiled = CompiledPlan(
            plan, before.params, before.reducer, self._recorder, before=before, layout=layout
        )
        if self.is_active:
            _ = self.compiled.buckets
        self.hooks.regroup(plan)

    def wait_for_parameters(self) -> None:
        """Waits until all parameters that a sharded optimizer updates have arrived."""
        self.compiled.layout.wait_for_parameters()

    def _has_all(self, named_params: Sequence[tuple[str, Tensor]]) -> bool:
        """Returns True if these are in the plan in force, unchanged and in this order."""
        compiled = self.compiled
        specs = self.members.specs(named_params)
        wanted = [
            (id(param), spec, local_tensor(param).stride())
            for (_, param), spec in zip(named_params, specs, strict=True)
        ]
        ids = map(id, self.hooks.params)
        planned = zip(ids, compiled.plan.params, compiled.strides, strict=True)
        # each search continues after the one that was found
        return all(each in planned for each in wanted)

    def require_alike(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        reducer: Reducer,
        *,
        new: Sequence[str] = (),
        remedy: str = BUILD_ALIKE,
        is_of_axis: bool = False,
    ) -> None:
        """Compares the parameters and settings of all ranks, and the names of `new` parameters.

        A collective call, with `is_of_axis` of the data axis only. Raises PlanMismatch, on every
        rank, if ranks differ; if tensors do, the error has this `remedy`.
        """
        hook = reducer.hook
        settings = {
            **surroundings(self.group),
            "communication hook": None if hook is None else hook.name,
            **self.compiled.reducer.config.to_dict(),
        }
        self.members.require_alike(
            self.group,
            plan.params,
            params,
            settings,
            new=new,
            remedy=remedy,
            is_of_axis=is_of_axis,
        )

    def _planned(self, named_params: Sequence[tuple[str, Tensor]], reducer: Reducer) -> Change:
        require_fits(self.members.named_params(), self.group.user.ranks, reducer.config)
        for name, param in named_params:
            require(
                device_of(param.device).is_host == self.group.hardware.is_host,
                f"parameter {name!r} is on {param.device}, and the model was wrapped on "
                f"{self.group.device}.",
                where="a module whose gradients are averaged",
                remedy="Move the whole module with module.to(device) before it is wrapped.",
            )
        plan = first_plan(
            self.members.specs(named_params), reducer.config, num_ranks=reducer.group.num_ranks
        )
        return Change(tuple(named_params), plan, reducer)

    def _put_in_force(self, change: Change, *, before: CompiledPlan | None = None) -> None:
        """Makes the buckets and hooks of a change; `register_hooks` registers the hooks."""
        group = self.group
        params = local_params(param for _, param in change.named_params)
        compiled = CompiledPlan(change.plan, params, change.reducer, self._recorder, before=before)
        hooks = ParamHooks(change.named_params, compiled.plan, self._engine, group.hardware)
        tuning: Tuning | None = None
        if compiled.reducer.is_active:
            _ = compiled.buckets  # too large ones fail here instead of in the first backward
            if params and group.num_ranks > 1:
                is_even = are_even(param for _, param in self.members.named_params())
                group.deciding = group.everyone if is_even else group
                is_observed = change.reducer.config.order == "observed"
                tuning = Tuning(
                    hooks.arrivals,
                    self._recorder,
                    change.reducer,
                    None if is_observed else order_of(compiled.plan),
                    number=self._engine.turn.number,
                    earlier=self.tuning,
                )
        self.compiled, self.hooks, self.tuning = compiled, hooks, tuning
        self.is_active = compiled.reducer.is_active

    def register_hooks(self) -> None:
        """Registers the hooks of the plan in force: from then on gradients call the engine."""
        if self.is_active:
            # before the hooks by which a gradient counts as arrived
            self.placements.follow(self.members.named_params())
            self.hooks.register()
            self.hooks.watch([param for _, param in self.members.frozen()], may_have_arrived=False)


def _mark_stale(plans: CurrentPlan | None) -> None:
    if plans is not None:
        plans.is_stale = True
