"""The parameters and the plan in force: how they come about, and how all ranks change them together."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from undertow.config import SyncConfig
from undertow.errors import ConfigError, PhaseError
from undertow.plan import Groups, Plan, first_plan
from undertow.runtime.comm.agreement import Agreement, surroundings
from undertow.runtime.comm.broadcast import send_in_place
from undertow.runtime.comm.comm_hook import CommHook
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.agreed_errors import (
    changed_unlike,
    frozen_again,
    has_changed_unlike,
    left_by_newer,
    require_sound,
    unfrozen_in_backward,
)
from undertow.runtime.execute.compiled_plan import CompiledPlan
from undertow.runtime.execute.executor import Round
from undertow.runtime.execute.hooks import call_at_registration, earlier_watchers, is_watched
from undertow.runtime.gradients.binding import gradients_aside
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.model.module_params import ModuleParams, first_change
from undertow.runtime.replan.order import ObservedOrder
from undertow.runtime.replan.param_hooks import Listeners, ParamHooks, params_of_bucket
from undertow.runtime.replan.planning import follows_observed_order, measure, planned, sharded_plan
from undertow.runtime.replan.uses import Uses
from undertow.runtime.sharded.binding import make_gradients_whole
from undertow.runtime.sharded.groups import ShardGroups
from undertow.runtime.sharded.in_backward import StepsInBackward
from undertow.runtime.sharded.layout import Sharding
from undertow.schedule import Strategy, strategy_named


@dataclass(frozen=True, slots=True)
class _InForce:
    """What a formation works with at one moment."""

    compiled: CompiledPlan
    watch: ParamHooks
    retiring: CompiledPlan | None
    groups: Groups | None


class CurrentPlan:
    """The plan in force: `compiled` (the plan and its buckets) and `watch` (hooks on its parameters).

    A change that a forward finds counts when the next round begins: it may be gone by then, where
    torch.func.functional_call has put other parameters into the module for the time of a call. Until then the hooks are
    on both sets of parameters.

    `retiring` is the plan before, where the parameters have changed, or a hook is new: until all ranks have met under it once
    more and agreed, nothing leaves under the new one. `listeners` are called by the hooks.
    """

    def __init__(
        self,
        members: ModuleParams,
        group: OwnGroup,
        config: SyncConfig,
        recorder: Recorder,
        listeners: Listeners,
    ) -> None:
        self.retiring: CompiledPlan | None = None
        self._retiring_watch: ParamHooks | None = None  # of what is retiring, until a round has begun
        self._before: _InForce | None = None  # a change that does not count yet
        self._members, self._config, self._recorder = members, config, recorder
        self._listeners, self._has_looked = listeners, True
        self._groups: Groups | None = None  # of the plan that the next step of a sharded optimizer moves to
        self._call_before: Callable[[], object] | None = None  # see call_before
        self._accumulated: set[int] = set()  # parameters, by id, that are not watched any more and have a new gradient
        named_params = members.trained()
        self.compiled = self._assemble(named_params, Reducer.of(group, config), generation=0)
        self.watch = self._watch_over(named_params)
        # A layer may be made in the middle of a forward, and be trained in the backward that follows.
        this = weakref.ref(self)  # torch keeps such hooks for the life of the process
        self._end_registrations = call_at_registration(lambda: None if (it := this()) is None else it.look_again(if_active=True))
        try:
            self._take_over()
        except ConfigError:
            self.close()
            raise

    @property
    def plan(self) -> Plan:
        return self.compiled.plan

    @property
    def group(self) -> OwnGroup:
        return self.compiled.reducer.group

    @property
    def is_active(self) -> bool:
        """Whether there is anything to do: one rank alone has its mean already, if nothing weighs it."""
        return self.compiled.reducer.is_active or self._call_before is not None

    @property
    def trains(self) -> bool:
        """Whether a round has anything to do: not where all ranks have agreed that nothing is trained, and nothing is weighed."""
        is_settled = self.retiring is None and self.group.is_open and self._call_before is None
        return self.is_active and not (is_settled and not self.watch.named_params)

    @property
    def has_result(self) -> bool:
        """Whether anything is left of what the last round brought: else the user has thrown it away, step or no step."""
        return not self.is_active or (self._before or self).compiled.executor.has_result()

    @property
    def holds_shards(self) -> bool:
        """Whether some gradient is in shards, of what an earlier round has brought."""
        sharding = self.compiled.sharding
        return sharding is not None and sharding.holds_gradients

    def open(self) -> None:
        """Makes our process group and compares the ranks, once; a collective call the first time, PlanMismatch."""
        if self.group.num_ranks > 1 and not self.group.is_open:
            self.group.open()
            self._compare().require()
            self._members.ranks_agree()

    def concerns(self, params: set[int]) -> bool:
        """Whether one of these parameters, by id, is the module's, trained or not."""
        # Asked by every optimizer's step, of which there may be one per parameter.
        return not self._members.ids.isdisjoint(params) or self._members.has_new_of(params)

    def has_unwatched(self) -> bool:
        """Whether nobody, ourselves or another, waits for the gradient of some parameter that is trained."""
        return any(not is_watched(param) for _, param in self._members.trained_now())

    def require_watched(self) -> None:
        """PhaseError where nobody, ourselves or another, waits for the gradient of any parameter that is trained."""
        trained = self._members.trained_now()
        if trained and not any(is_watched(param) for _, param in trained):
            raise left_by_newer(trained[0][0])

    def require_left(self, param: Tensor) -> None:
        """PhaseError where this parameter, which is in no plan and has a gradient, is still one of the module's."""
        name = self._members.name_of(param)
        if name is not None:
            raise unfrozen_in_backward(name, rank=self.group.rank)

    def look_again(self, *, if_active: bool = False) -> None:
        """Looks for changes of the parameters when it is next asked to; `if_active` only where there are rounds."""
        self._has_looked &= if_active and not self.is_active

    def look_for_thawed(self) -> None:
        """A backward begins: looks again when the round does where a parameter is trained that was frozen so far."""
        self._has_looked &= not self.watch.has_thawed()

    def look(self, *, in_backward: bool = False) -> None:
        """Follows the parameters of the module where they have changed since the last look."""
        if not self._has_looked:
            self._has_looked = True
            if self._members.has_changed():
                follow = self._follow_more if in_backward else self._follow
                follow(self._members.trained())

    def settle(self) -> None:
        """Looks once more, for a round begins: what has changed by now counts.

        But for what is only frozen: where parts of a module take turns between two forwards, all of them stay in the plan, and
        those whose turn it is not are unused.
        """
        announced = self._before  # by a forward, since which gradients of new parameters are counted
        self._has_looked &= announced is None
        self.look(in_backward=True)
        if self._before is None:
            return
        try:
            self._take_over()
        except ConfigError:  # refused, and looked at again
            self._go_back(self._before)
            self._members.unsee()
            self._has_looked = False
            raise
        if self.is_active and self._before is not announced:
            self.watch.arrived_before |= self.watch.came_uncounted(self._before.watch)
        before, old = self._before.watch, self._before.compiled
        self._before = None
        before.close()
        accumulated = before.accumulated_ids()
        if self.is_active:
            accumulated |= {id(old.params[index]) for index in old.executor.written(range(len(old.params)))}
        self.watch.arrived_before |= self.watch.indices(accumulated)
        self._accumulated |= accumulated.difference(self.watch.ids)

    def close(self) -> None:
        """Takes all hooks off."""
        self._end_registrations()
        self.compiled.reducer.close()
        self.watch.close()
        if self._before is not None:
            self._before.watch.close()

    def use_hook(self, hook: CommHook) -> None:
        """Reduces buckets by `hook` from the next round on, before which the ranks meet without it and compare their hooks."""
        self.settle()
        self.group.hooks_use_users = True
        if self.group.is_open and self.group.num_ranks > 1 and self.retiring is None:
            self.retiring, self._retiring_watch = self.compiled, self.watch
        self._renew(dataclasses.replace(self.compiled.reducer, hook=hook))

    def call_before(self, call: Callable[[], object]) -> None:
        """Has `call` called before each gradient is added to what `.grad` holds, also with one rank."""
        self.settle()
        self._call_before = call
        if self.group.num_ranks == 1:
            self._renew(self.compiled.reducer)
        else:
            self.watch.call_before(call)

    def _renew(self, reducer: Reducer) -> None:
        before, named_params, arrived = self.compiled, self.watch.named_params, self.watch.arrived_before
        self.watch.close()
        self.compiled = self._assemble(named_params, reducer, generation=before.generation, sharding=before.sharding)
        self.watch = self._watch_over(named_params)
        self.watch.arrived_before |= arrived

    def adopt_plan(self) -> None:
        """A round begins: re-plans in rank 0's order, or as it has planned, where that was sent and is another plan.

        Where an optimizer steps on shards, they are laid out anew when it next does.
        """
        if self.retiring is not None:
            watch, self._retiring_watch = self._retiring_watch, None
            if watch is not None:  # the other ranks, if their parameters have not changed, move on now
                self.retiring = self._moved(self.retiring, planned(self.retiring, watch, self._config))
            return
        now = self.compiled
        plan = planned(now, self.watch, self._config)
        if now.sharding is not None:
            self._groups = self._groups if plan is None else plan.groups
            return
        self.compiled = self._moved(now, plan)
        if self.compiled is not now:
            self.watch.arrived_before |= now.executor.written(range(len(now.params)))  # which the new one cannot tell
            self.watch.arrivals.regroup(params_of_bucket(self.plan))

    def _moved(self, now: CompiledPlan, plan: Plan | None) -> CompiledPlan:
        if plan is None or plan.fingerprint == now.plan.fingerprint or now.sharding is not None:
            return now
        # The old buckets' storage goes when the last `.grad` has moved into the new ones.
        moved = CompiledPlan(plan, now.params, now.reducer, self._recorder, generation=now.generation + 1)
        moved.executor.take_over_readings(now.executor)
        return moved

    def round_ended(self, this_round: Round) -> None:
        """All ranks have found the round sound."""
        self.compiled.round_ended(this_round)
        self.watch.round_ends(self.compiled.present)

    @property
    def must_read_at_once(self) -> bool:
        """Whether ranks communicate at the end of this round if it is sound: all must know that then."""
        return self.watch.tuning is not None and self.watch.tuning.is_about_to_communicate

    @property
    def is_layout_due(self) -> bool:
        """Whether the optimizer's next step moves to another plan."""
        return self._groups is not None

    def shard(self, strategy: Strategy, shard_groups: ShardGroups, in_backward: StepsInBackward | None = None) -> Sharding:
        """Lays out parameters and gradients as `strategy` has them, in rank 0's order if that has come, from now on.

        Where the parameters change, later rounds reduce whole gradients until it is called again. What it returns is the
        same object for as long as the layout is.
        """
        now = self.compiled
        if now.sharding is not None and self._groups is None:
            return now.sharding
        if self.retiring is not None:
            raise PhaseError(
                "an optimizer steps after its parameters have changed, and no gradients of the new ones have been averaged.",
                where=f"rank {self.group.rank}",
                remedy="Run a forward and a backward between the change and the step.",
            )
        held = {} if now.sharding is None else now.sharding.held_gradients()
        groups, self._groups = self._groups, None
        plan = sharded_plan(self.compiled.plan, self.watch, groups, self._config)
        if self.watch.order is not None:
            self.watch.order.close()
            self.watch.order = None
        self._recorder.forgets_gathers()
        sharding = Sharding(plan, now.params, strategy, shard_groups, self._recorder, in_backward)
        reducer = dataclasses.replace(now.reducer, shard_exchanges=sharding.groups.shard)
        self.compiled = self._assemble(
            self.watch.named_params, reducer, generation=now.generation + 1, plan=plan, sharding=sharding
        )
        if self.is_active:
            _ = self.compiled.executor
        sharding.take_over(held)
        if in_backward is not None:
            self.watch.arrivals.learn_repeats()  # a second part of a gradient will come too late there
        self.watch.arrivals.regroup(params_of_bucket(plan))
        return sharding

    @property
    def is_counted_apart(self) -> bool:
        """Whether the last round under the old plan has a number of its own: not where only a hook is new."""
        return self.retiring is not None and self.retiring.reducer.hook is self.compiled.reducer.hook

    def retire(self, following: Round) -> Iterator[None]:
        """Meets the other ranks under the old plan for the last time, and agrees with them on the new one.

        The round before the `following` one, with its weights, and gradients only of parameters that leave with some.
        Yields where it waits. PlanMismatch, on all ranks, where changes are not alike. New parameters take over rank 0's values.
        """
        old = self.retiring
        assert old is not None  # else nothing is to be retired
        make_gradients_whole(self.watch.named_params, rank=self.group.rank)
        accumulated, self._accumulated = self._accumulated, set()
        staying = set(map(id, self.watch.params))
        # Not `old` itself: its executor remembers the round, and they would keep each other alive.
        buckets, ids = old.plan.buckets, [id(param) for param in old.params]

        def places(bucket: int, *, without: set[int]) -> list[int]:
            return [place for place, param in enumerate(buckets[bucket].params) if ids[param] not in without]

        this_round = Round(
            number=following.number - self.is_counted_apart,
            generation=old.generation,
            mode=following.mode,
            weighing=following.weighing,
            is_synchronized=True,
            not_arrived=partial(places, without=accumulated),
            rebinds=partial(places, without=staying),
            has_repeats=bool,
            has_changed=True,
        )
        releases = old.releases(this_round)
        with gradients_aside([param for param in old.params if id(param) in staying]):
            old.executor.begin(this_round)
            old.executor.run(releases.end_backward())
            yield
            old.executor.run(releases.join())
        self._recorder.forgets_buckets()
        require_sound(this_round, rank=self.group.rank, places=self.group.places)
        change = (
            first_change(old.plan.params, self.plan.params) if self.is_counted_apart else "a communication hook was registered"
        )
        self.require_changed_alike(this_round, change=change)
        if lost := [name for name, param in self._members.named_params() if id(param) in accumulated.difference(ids)]:
            raise frozen_again(lost[0], this_round.number, rank=self.group.rank)
        agreement = self._compare()
        yield
        agreement.require()
        self._members.ranks_agree()
        known = set(map(id, old.params))
        self.wait_for_parameters()  # before others are written
        write = send_in_place([param for param in self.watch.params if id(param) not in known], self.group)
        yield
        write()
        self.retiring = None

    def wait_for_parameters(self) -> None:
        """Returns when every parameter is what a sharded optimizer has made of it."""
        for compiled in (self.compiled, self.retiring, None if self._before is None else self._before.compiled):
            if compiled is not None and compiled.sharding is not None:
                compiled.sharding.gathers.wait_for_all()

    @property
    def has_other_buffers(self) -> bool:
        """Whether this rank's buffers are others than those that the ranks have compared."""
        return self._config.buffers != "off" and self._members.common_buffers.are_others()

    def compare_buffers(self) -> Iterator[None]:
        """All ranks have other buffers: from now on these are the common ones, if they are the same; yields where it waits."""
        agreement = self._members.compare_buffers(self.group)
        yield
        if agreement.is_reached():
            self._members.ranks_agree()
        else:  # each rank goes on with what they had in common
            self._members.common_buffers.accept()

    def require_changed_alike(self, this_round: Round, *, change: str = "") -> None:
        """PlanMismatch, on every rank, where the parameters have changed on some ranks and not on others."""
        if not has_changed_unlike(this_round, num_ranks=self.group.num_ranks):
            return
        # On the host every rank has read the same and is here now, and the comparison names a parameter. On a device the
        # others read later, when this rank is gone.
        if self.group.device.type == "cpu":
            self._compare().require()
        raise changed_unlike(this_round, rank=self.group.rank, num_ranks=self.group.num_ranks, change=change)

    def _follow_more(self, named_params: Sequence[tuple[str, Tensor]]) -> None:
        """The same, but what is only frozen, maybe for its turn, stays in the plan until a forward finds it so."""
        before, has_all = self._before, self._has_all(named_params, of=self.compiled)
        if before is not None and (self._is_in_force(named_params, of=before.compiled) or not has_all):
            self._go_back(before)
        if not self._has_all(named_params, of=self.compiled):
            self._follow(self._members.trained(also=self.watch.ids))
        if not self._is_in_force(named_params, of=self.compiled):
            self._members.unsee()  # that forward is to look

    def _follow(self, named_params: Sequence[tuple[str, Tensor]]) -> None:
        """From now on these are the parameters. Every rank does so in the same step, or all raise PlanMismatch."""
        if self._before is not None:
            self._go_back(self._before)
        if self._is_in_force(named_params, of=self.compiled):
            return
        before = _InForce(self.compiled, self.watch, self.retiring, self._groups)
        self._groups = None
        if self.retiring is None and self.is_active:
            self.retiring, self._retiring_watch = self.compiled, self.watch
        generation = (self.retiring or self.compiled).generation + 1
        try:
            reducer = dataclasses.replace(self.compiled.reducer, shard_exchanges=None)  # until an optimizer steps again
            self.compiled = self._assemble(named_params, reducer, generation=generation)
            self.watch = self._watch_over(named_params, before=before.watch)
        except BaseException:  # a change that cannot be followed is refused again, and not forgotten
            self.compiled, self.retiring, self._groups = before.compiled, before.retiring, before.groups
            self._has_looked = False
            self._members.unsee()
            raise
        self._before = before

    def _go_back(self, before: _InForce) -> None:
        self.watch.close()
        self.compiled, self.watch, self.retiring = before.compiled, before.watch, before.retiring
        self._groups, self._retiring_watch, self._before = before.groups, None, None

    def _is_in_force(self, named_params: Sequence[tuple[str, Tensor]], *, of: CompiledPlan) -> bool:
        return len(named_params) == len(of.params) and self._has_all(named_params, of=of)

    def _has_all(self, named_params: Sequence[tuple[str, Tensor]], *, of: CompiledPlan) -> bool:
        """Whether that plan has these parameters as they are now, and perhaps others; in the same order."""
        specs = self._members.specs(named_params)
        wanted = [(id(param), spec, param.stride()) for (_, param), spec in zip(named_params, specs, strict=True)]
        planned = zip(map(id, of.params), of.plan.params, of.strides, strict=True)
        return all(each in planned for each in wanted)  # which goes on behind the one that was found

    def _compare(self) -> Agreement:
        """Compares the parameters and settings of all ranks; a collective call."""
        settings = {**surroundings(self.group, self.compiled.reducer.hook), **self._config.to_dict()}
        return self._members.compare(self.group, self.plan.params, self.compiled.params, settings)

    def _assemble(
        self,
        named_params: Sequence[tuple[str, Tensor]],
        reducer: Reducer,
        *,
        generation: int,
        plan: Plan | None = None,
        sharding: Sharding | None = None,
    ) -> CompiledPlan:
        if plan is None:
            # One that is pinned for shards, and may have parameters in pieces, counts from the first step on.
            config = self._config
            if strategy_named(config.strategy).gather is not None:
                config = dataclasses.replace(config, plan=None)
            plan = first_plan(self._members.specs(named_params), config, num_ranks=reducer.group.num_ranks)
        params = [param for _, param in named_params]
        return CompiledPlan(plan, params, reducer, self._recorder, generation=generation, sharding=sharding)

    def _watch_over(self, named_params: Sequence[tuple[str, Tensor]], *, before: ParamHooks | None = None) -> ParamHooks:
        watch = ParamHooks(named_params, self.plan, self._listeners, frozen=self._members.frozen())
        if self.is_active:
            _ = self.compiled.executor  # what does not fit into memory fails here and not in the first backward
            watch.start()
            if self._call_before is not None:
                watch.call_before(self._call_before)
            if follows_observed_order(self.compiled, self._config):
                watch.order = ObservedOrder(watch.params, self.group)
        else:
            watch.uses = Uses(watch.params, None if before is None else before.uses)
        measure(watch, self.compiled, self._config, self._recorder)
        return watch

    def _take_over(self) -> None:
        """A module may be wrapped again, alone or as part of a larger one; its gradients are averaged once, by the newest.

        ConfigError where taking over would leave a parameter of the earlier one without anybody, or in another group.
        """
        if not self.is_active:
            return
        earlier = earlier_watchers(self.watch.named_params, but=self._listeners.on_full)
        for name, engine in earlier.items():
            if not engine.may_pass_on(self.watch.ids, self.group.user):
                raise ConfigError(
                    "a part of this module is synchronized already.",
                    where=f"parameter {name!r} belongs to an earlier attach() or DistributedDataParallel",
                    remedy="Call close() on the earlier one first.",
                )
        for engine in earlier.values():
            self.watch.arrived_before |= self.watch.indices(engine.pass_on())
            self._members.gives_back |= engine.current_plan._members.gives_back
