"""The parameters and the plan in force: how they are made, and how all ranks change them together."""

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from undertow.config import SyncConfig
from undertow.errors import ConfigError, PhaseError, require
from undertow.plan import Groups, Plan, first_plan
from undertow.runtime.comm.agreement import Agreement, surroundings
from undertow.runtime.comm.broadcast import send_in_place
from undertow.runtime.comm.comm_hook import CommHook
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.agreed_errors import (
    changed_unlike,
    frozen_again,
    left_by_newer,
    require_sound,
    started_unlike,
)
from undertow.runtime.execute.compiled_plan import CompiledPlan
from undertow.runtime.execute.hooks import (
    GradientFactor,
    call_at_registration,
    earlier_watchers,
    is_watched,
)
from undertow.runtime.execute.round import Round, RoundKind, RoundResult
from undertow.runtime.gradients.binding import gradients_aside
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.model.fingerprints import fingerprints
from undertow.runtime.model.module_params import ModuleParams, first_change
from undertow.runtime.replan.param_hooks import Listeners, ObservedOrder, ParamHooks
from undertow.runtime.replan.planning import follows_observed_order, measure, planned, sharded_plan
from undertow.runtime.replan.single_rank import SingleRank
from undertow.runtime.sharded.binding import make_gradients_whole
from undertow.runtime.sharded.layout import ShardGroups, Sharding
from undertow.schedule import Strategy, strategy_named


@dataclass(frozen=True, slots=True)
class InForce:
    """A plan, ready to run, and the hooks on its parameters.

    `retiring` is the plan before it, if the parameters have changed or a communication hook is new: until all ranks have met
    under it once more and agreed, nothing is sent under the new one.
    """

    compiled: CompiledPlan
    hooks: ParamHooks
    retiring: CompiledPlan | None = None
    retiring_hooks: ParamHooks | None = None  # until a round has begun
    groups: Groups | None = None  # of the plan to which the next step of a sharded optimizer moves
    has_more: bool = False  # parameters than the plan before, as a forward has found


class CurrentPlan:
    """Owns the plan in force, `now`; `is_active` if there are rounds.

    A change that a forward finds counts when the next round begins: it may be gone by then, as when torch.func.functional_call
    puts other parameters into the module for one call. Until then the hooks are on both sets of parameters. `listeners` are
    called by the hooks.
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
        self._before: InForce | None = None  # the plan before a change that does not count yet
        self.is_stale = False  # the module is to be looked at, or a change that was found does not count yet
        self._accumulated: set[int] = set()  # parameters, by id, that are not watched any more and have a new gradient
        named_params, reducer = members.trained(), Reducer.of(group, config)
        self.is_active = reducer.is_active  # a single rank has its mean already
        compiled = self._compile(named_params, reducer, generation=0)
        self.now = InForce(compiled, self._hook(named_params, compiled))
        # The settings of a group of experts list only that group, other settings none.
        divisor = config.experts[0].divisor if config.experts else None
        self._factor = GradientFactor(1 if divisor is None else group.num_ranks / divisor)
        self._apply_factor()
        # A layer may be made in the middle of a forward, and be trained in the backward that follows.
        this = weakref.ref(self)  # torch keeps such hooks for the life of the process
        self._end_registrations = call_at_registration(lambda *_: None if (it := this()) is None else it.mark_stale())
        try:
            self._take_over()
        except ConfigError:
            self.close()
            raise

    @property
    def trains(self) -> bool:
        """True if a round has anything to do: all ranks may have agreed that nothing is trained."""
        is_settled = self.now.retiring is None and self.group.is_open
        return self.is_active and not (is_settled and not self.now.hooks.named_params)

    @property
    def has_result(self) -> bool:
        """True if anything is left of the result of the last round; otherwise the user has cleared it, step or no step."""
        return not self.is_active or (self._before or self.now).compiled.executor.has_result()

    def open(self) -> None:
        """Creates Undertow's process group and compares the ranks; a collective call the first time. Raises PlanMismatch."""
        if self.group.num_ranks > 1 and not self.group.is_open:
            self.group.open()
            self._compare().require()
            self.members.ranks_agree()

    def owns_any(self, params: set[int]) -> bool:
        """Returns True if one of these parameters, by id, is the module's, trained or not."""
        # Called by every optimizer's step; there may be an optimizer for each parameter.
        return not self.members.ids.isdisjoint(params) or self.members.has_new_of(params)

    def require_watched(self) -> None:
        """Raises PhaseError if no engine waits for the gradient of any trained parameter."""
        trained = self.members.trained_now()
        if trained and not any(is_watched(param) for _, param in trained):
            raise left_by_newer(trained[0][0])

    def mark_stale(self) -> None:
        """Makes the next `look` compare the module's parameters, if there are rounds."""
        self.is_stale |= self.is_active

    def look_at_gradients(self) -> None:
        """Called when a step begins: marks present tensors in `.grad` as known."""
        self.now.compiled.executor.look()
        if self._before is not None:
            self._before.compiled.executor.look()

    def look(self) -> None:
        """Called by a forward: follows the parameters of the module if they have changed."""
        self.is_stale = self._before is not None
        if self.members.has_changed():
            has_more = (self._before is not None and self.now.has_more) or self.members.has_more()
            self._follow(self.members.trained())
            if self._before is not None:
                self.now = dataclasses.replace(self.now, has_more=has_more)

    @property
    def meets_before_forward(self) -> bool:
        """True if a training forward is the first to use new parameters, which are to have rank 0's values before.

        Not while a sharded optimizer's gradients are there, which the user may clear until then: ranks meet after the backward,
        and compare the values.
        """
        if self._before is None or not self.now.has_more or self.group.num_ranks == 1:
            return False
        is_new = not self.now.hooks.ids <= self._before.hooks.ids
        return is_new and not (self._before.compiled.sharding is not None and self.has_result)

    def apply_changes(self) -> None:
        """Called when a round begins: looks once more, and applies the changes found.

        A parameter that is only frozen stays in the plan: if parts of a module take turns between two forwards, the parameters
        of the other parts are unused.
        """
        announced = self._before  # by a forward, since which gradients of new parameters are counted
        followed = self._factor.params
        if not self.is_stale:  # as it stays until this has run without an error
            return
        if self.members.has_changed():
            self._follow_added(self.members.trained())
        if self._before is None:
            self.is_stale = False
            return
        try:
            self._take_over()
        except ConfigError:  # refused, and looked at again
            self._go_back(self._before)
            self.members.is_unseen = True
            self.is_stale = True
            raise
        before, old, hooks = self._before.hooks, self._before.compiled, self.now.hooks
        if self.is_active and self._before is not announced:
            # Parameters that were not watched so far: their gradients arrived in this backward, before Undertow's hooks.
            hooks.arrived_before |= {
                index for index, param in enumerate(hooks.params) if id(param) not in before.ids and param.grad is not None
            }
            self._factor.apply(set(hooks.params) - set(followed))
        self._before, self.is_stale = None, False
        self._apply_factor()
        before.close()
        accumulated = before.accumulated_ids()
        if self.is_active:
            accumulated |= {id(old.params[index]) for index in old.executor.written(range(len(old.params)))}
        hooks.arrived_before |= hooks.indices(accumulated)
        self._accumulated |= accumulated.difference(hooks.ids)

    def close(self) -> None:
        """Removes all hooks."""
        self._end_registrations()
        self.now.compiled.reducer.close()
        self.now.hooks.close()
        self._factor.follow(())
        if self._before is not None:
            self._before.hooks.close()

    def use_hook(self, hook: CommHook) -> None:
        """Reduces buckets by `hook` from the next round on; before it the ranks meet without it and compare their hooks."""
        self.apply_changes()
        self.group.borrowers.add("hooks")
        now = self.now
        if self.group.is_open and self.group.num_ranks > 1 and now.retiring is None:
            self.now = dataclasses.replace(now, retiring=now.compiled, retiring_hooks=now.hooks)
        before, hooks = self.now.compiled, self.now.hooks
        hooks.close()
        reducer = dataclasses.replace(before.reducer, hook=hook)
        compiled = self._compile(hooks.named_params, reducer, generation=before.generation, sharding=before.sharding)
        self.is_active = True
        self.now = dataclasses.replace(self.now, compiled=compiled, hooks=self._hook(hooks.named_params, compiled))
        self.now.hooks.arrived_before |= hooks.arrived_before

    def adopt_plan(self) -> None:
        """Called when a round begins: moves to the plan that rank 0 has sent, if it differs.

        With a sharded optimizer, parameters are laid out anew at its next step.
        """
        now = self.now
        if now.retiring is not None:
            if now.retiring_hooks is not None:  # the other ranks, if their parameters have not changed, move on now
                retiring = self._moved(now.retiring, planned(now.retiring, now.retiring_hooks, self._config))
                self.now = dataclasses.replace(now, retiring=retiring, retiring_hooks=None)
            return
        compiled = now.compiled
        order, tuning = now.hooks.order, now.hooks.tuning
        is_sent = (order is not None and order.sent is not None) or (tuning is not None and tuning.sent is not None)
        plan = planned(compiled, now.hooks, self._config) if is_sent else None
        if plan is None:
            return
        if compiled.sharding is not None:
            self.now = dataclasses.replace(now, groups=plan.groups)
            return
        now.hooks.arrived_before |= compiled.executor.written(range(len(compiled.params)))  # which the new plan cannot tell
        self.now = dataclasses.replace(now, compiled=self._moved(compiled, plan))
        now.hooks.regroup(plan)

    def _moved(self, compiled: CompiledPlan, plan: Plan | None) -> CompiledPlan:
        if plan is None or compiled.sharding is not None:
            return compiled
        moved = CompiledPlan(plan, compiled.params, compiled.reducer, self._recorder, generation=compiled.generation + 1)
        # A `.grad` that lies in an old bucket keeps its memory until it has moved into the new one.
        compiled.executor.let_go()
        moved.executor.take_over_readings(compiled.executor)
        return moved

    def round_ended(self, result: RoundResult) -> None:
        """Called after a round that all ranks have found sound: sends measurements."""
        compiled, hooks = self.now.compiled, self.now.hooks
        if hooks.order is not None:
            hooks.order.send()
        if hooks.tuning is not None:
            hooks.tuning.round_ends(compiled.present)

    def shard(self, strategy: Strategy, groups: ShardGroups) -> Sharding:
        """Lays out parameters and gradients for `strategy`, in rank 0's order if that has arrived.

        If the parameters change, later rounds reduce whole gradients until it is called again. Returns the same object as long as
        the layout stays.
        """
        now, compiled, hooks = self.now, self.now.compiled, self.now.hooks
        if compiled.sharding is not None and now.groups is None:
            return compiled.sharding
        require(
            now.retiring is None,
            "an optimizer steps after its parameters have changed and before gradients of the new ones are averaged.",
            where=f"rank {self.group.rank}",
            remedy="Run a forward and a backward between the change and the step.",
            error=PhaseError,
        )
        plan = sharded_plan(compiled.plan, hooks, now.groups, self._config)
        own = compiled.executor.own_gradients() if self.is_active else {}
        if hooks.order is not None:
            hooks.order.close()
            hooks.order = None
        if compiled.sharding is not None:
            compiled.executor.let_go()
        self._recorder.forgets_gathers()
        sharding = Sharding(plan, compiled.params, strategy, groups, self._recorder)
        reducer = dataclasses.replace(compiled.reducer, shard_exchanges=sharding.groups.shard)
        sharded = CompiledPlan(
            plan, compiled.params, reducer, self._recorder, generation=compiled.generation + 1, sharding=sharding
        )
        self.now = InForce(sharded, hooks)
        if self.is_active:
            _ = sharded.executor
        sharding.take_over(() if compiled.sharding is None else compiled.sharding.held())
        sharding.adopt_gradients()
        sharding.reduce_again(own)
        hooks.regroup(plan)
        return sharding

    @property
    def is_counted_apart(self) -> bool:
        """True if the last round under the old plan has a separate number, as it has unless only a hook is new."""
        retiring = self.now.retiring
        return retiring is not None and retiring.reducer.hook is self.now.compiled.reducer.hook

    def retire(self, number: int, *, mode: int | None, are_used: bool = False) -> Iterator[None]:
        """Meets the other ranks under the old plan for the last time, and agrees with them on the new one.

        This is round `number`, with the mode of the next one. It has gradients only of parameters that leave with
        some. Yields before each wait. New parameters take over rank 0's values. Raises PlanMismatch, on all ranks, if changes
        differ, or if these values differ and some rank has used its own already (`are_used`).
        """
        old, hooks = self.now.retiring, self.now.hooks
        assert old is not None  # else there is nothing to retire
        make_gradients_whole(hooks.named_params, rank=self.group.rank)
        accumulated, self._accumulated = self._accumulated, set()
        # Not `old` itself: its executor remembers the round, and they would keep each other alive.
        buckets, ids = old.plan.buckets, [id(param) for param in old.params]

        def places(bucket: int, *, without: set[int]) -> list[int]:
            return [place for place, param in enumerate(buckets[bucket].params) if ids[param] not in without]

        this_round = Round(
            kind=RoundKind.RETIRE,
            number=number,
            generation=old.generation,
            mode=mode,
            not_arrived=partial(places, without=accumulated),
            rebinds=partial(places, without=set(hooks.ids)),
        )
        result, releases = RoundResult(this_round), old.synchronizing
        with gradients_aside([param for param in old.params if id(param) in hooks.ids]):
            releases.reset()
            old.executor.begin(result)
            old.executor.run(releases.happen(releases.end))
            yield
            old.executor.run(releases.happen(releases.join))
        self._recorder.forgets_buckets()
        require_sound(result, rank=self.group.rank, places=self.group.places)
        change = (
            first_change(old.plan.params, self.now.compiled.plan.params)
            if self.is_counted_apart
            else "a communication hook was registered"
        )
        self.require_changed_alike(result, change=change)
        if lost := [name for name, param in self.members.named_params() if id(param) in accumulated.difference(ids)]:
            raise frozen_again(lost[0], this_round.number, rank=self.group.rank)
        known = {*ids, *(id(param) for _, param in self.members.common_frozen if not param.requires_grad)}
        new = [(name, param) for name, param in self.members.named_params() if id(param) not in known]
        agreement = self._compare(new=[name for name, _ in new])
        yield
        agreement.require()
        self.wait_for_parameters()  # before others are written
        if new:
            yield from self._make_equal(new, this_round.number, are_used=are_used)
        self.members.ranks_agree()
        self.now = dataclasses.replace(self.now, retiring=None)

    def _make_equal(self, named_params: Sequence[tuple[str, Tensor]], number: int, *, are_used: bool) -> Iterator[None]:
        """Gives these parameters rank 0's values, or raises PlanMismatch if that is too late; yields before each wait."""
        params = [param for _, param in named_params]
        values = fingerprints(params, device=self.group.device)
        mine = torch.cat((torch.full_like(values[:1], are_used), values))  # [1 + number of parameters] int64
        received = self.group.all_gather(mine, "the comparison of new parameters")
        yield
        are_used_by, *of_ranks = torch.stack(received.take()).T.tolist()
        differing = [index for index, values in enumerate(of_ranks) if len(set(values)) > 1]
        if differing and any(are_used_by):
            first = of_ranks[differing[0]]
            others = [rank for rank, value in enumerate(first) if value != first[0]]
            raise started_unlike(named_params[differing[0]][0], number, others=others, rank=self.group.rank)
        write = send_in_place(params if differing else (), self.group)
        yield
        write()

    def wait_for_parameters(self) -> None:
        """Waits until all parameters that a sharded optimizer updates have arrived."""
        for compiled in (self.now.compiled, self.now.retiring, None if self._before is None else self._before.compiled):
            if compiled is not None and compiled.sharding is not None:
                compiled.sharding.gathers.wait_for_all()

    @property
    def has_other_buffers(self) -> bool:
        """True if this rank's buffers differ from those that the ranks have compared."""
        common = self.members.common_buffers
        is_usual = common.is_empty and not any(common.tables)  # tested first, because this runs in every round
        return not is_usual and self._config.buffers != "off" and common.are_others()

    def compare_buffers(self) -> Iterator[None]:
        """Called if all ranks have other buffers: makes them the common ones if they are the same; yields before the wait."""
        agreement = self.members.compare(self.group)
        yield
        if agreement.is_reached():
            self.members.ranks_agree()
        else:  # each rank continues with the buffers that they had in common
            self.members.common_buffers.accept()

    def require_changed_alike(self, result: RoundResult, *, change: str = "") -> None:
        """Raises PlanMismatch, on every rank, if the parameters have changed on some ranks only."""
        error = changed_unlike(result, rank=self.group.rank, num_ranks=self.group.num_ranks, change=change)
        if error is None:
            return
        # On the host every rank has read the same and is here now, and the comparison names a parameter. On a device the other
        # ranks read later, when this one is gone.
        if self.group.device.type == "cpu":
            self._compare().require()
        raise error

    def _follow_added(self, named_params: Sequence[tuple[str, Tensor]]) -> None:
        """Follows new parameters; a parameter that is only frozen, maybe for its turn, stays until a forward finds it so."""
        before, has_all = self._before, self._has_all(named_params, of=self.now.compiled)
        if before is not None and (self._is_in_force(named_params, of=before.compiled) or not has_all):
            self._go_back(before)
        if not self._has_all(named_params, of=self.now.compiled):
            self._follow(self.members.trained(also=self.now.hooks.ids))
        if not self._is_in_force(named_params, of=self.now.compiled):
            self.members.is_unseen = True  # that forward is to look

    def _follow(self, named_params: Sequence[tuple[str, Tensor]]) -> None:
        """Makes these the parameters. Every rank does so in the same step, or all raise PlanMismatch."""
        if self._before is not None:
            self._go_back(self._before)
        before = self.now
        if self._is_in_force(named_params, of=before.compiled):
            return
        retiring, retiring_hooks = before.retiring, before.retiring_hooks
        if retiring is None and self.is_active:
            retiring, retiring_hooks = before.compiled, before.hooks
        try:
            reducer = dataclasses.replace(before.compiled.reducer, shard_exchanges=None)  # until an optimizer steps again
            compiled = self._compile(named_params, reducer, generation=(retiring or before.compiled).generation + 1)
            hooks = self._hook(named_params, compiled, before=before.hooks)
        except BaseException:  # a change that cannot be followed is refused again, and not forgotten
            self.is_stale = True
            self.members.is_unseen = True
            raise
        self.now, self._before, self.is_stale = InForce(compiled, hooks, retiring, retiring_hooks), before, True
        self._apply_factor()

    def _go_back(self, before: InForce) -> None:
        self.now.hooks.close()
        self.now, self._before, self.is_stale = dataclasses.replace(before, retiring_hooks=None), None, False
        self._apply_factor()

    def _apply_factor(self) -> None:
        """Called when the parameters change. Until a change counts, the old and the new parameters may train."""
        before = () if self._before is None else self._before.hooks.params
        in_module = [param for _, param in self.members.named_params()]
        self._factor.follow((*self.now.hooks.params, *before, *in_module))

    def _is_in_force(self, named_params: Sequence[tuple[str, Tensor]], *, of: CompiledPlan) -> bool:
        return len(named_params) == len(of.params) and self._has_all(named_params, of=of)

    def _has_all(self, named_params: Sequence[tuple[str, Tensor]], *, of: CompiledPlan) -> bool:
        """Returns True if that plan has these parameters, in this order and unchanged, and perhaps others."""
        specs = self.members.specs(named_params)
        wanted = [(id(param), spec, param.stride()) for (_, param), spec in zip(named_params, specs, strict=True)]
        planned = zip(map(id, of.params), of.plan.params, of.strides, strict=True)
        return all(each in planned for each in wanted)  # each search continues after the one that was found

    def _compare(self, *, new: Sequence[str] = ()) -> Agreement:
        """Compares the parameters and settings of all ranks, and the names of `new` parameters; a collective call."""
        compiled = self.now.compiled
        settings = {**surroundings(self.group, compiled.reducer.hook), **self._config.to_dict()}
        return self.members.compare(self.group, compiled.plan.params, compiled.params, settings, new=new)

    def _compile(
        self,
        named_params: Sequence[tuple[str, Tensor]],
        reducer: Reducer,
        *,
        generation: int,
        sharding: Sharding | None = None,
    ) -> CompiledPlan:
        config = self._config
        # A plan pinned for shards may have parameters in pieces; it counts from the first step of the optimizer on.
        if strategy_named(config.strategy).gather is not None:
            config = dataclasses.replace(config, plan=None)
        plan = first_plan(self.members.specs(named_params), config, num_ranks=reducer.group.num_ranks)
        params = [param for _, param in named_params]
        return CompiledPlan(plan, params, reducer, self._recorder, generation=generation, sharding=sharding)

    def _hook(
        self, named_params: Sequence[tuple[str, Tensor]], compiled: CompiledPlan, *, before: ParamHooks | None = None
    ) -> ParamHooks:
        hooks = ParamHooks(named_params, compiled.plan, self._listeners, frozen=[param for _, param in self.members.frozen()])
        if self.is_active:
            _ = compiled.executor  # what does not fit into memory fails here instead of in the first backward
            hooks.start(self._listeners.on_thawed)
            if follows_observed_order(compiled, self._config):
                hooks.order = ObservedOrder(hooks.arrivals, len(hooks.params), self.group)
        else:
            hooks.alone = SingleRank(hooks.params, None if before is None else before.alone)
        measure(hooks, compiled, self._config, self._recorder)
        return hooks

    def _take_over(self) -> None:
        """Takes over the parameters of engines whose module was wrapped again, alone or in a larger one.

        Gradients are averaged once, by the newest engine. Raises ConfigError if an earlier engine would keep parameters that no
        other engine watches, or has another group.
        """
        if not self.is_active:
            return
        hooks = self.now.hooks
        earlier = earlier_watchers(hooks.named_params, but=self._listeners.on_full)
        for name, engine in earlier.items():
            if not engine.may_hand_over(hooks.ids, self.group.user):
                raise ConfigError(
                    "a part of this module is synchronized already.",
                    where=f"parameter {name!r} belongs to an earlier attach() or DistributedDataParallel",
                    remedy="Call close() on the earlier one if it trains no more. If two models share a "
                    "part, wrap one module that holds both, or name the part in `ignore` of one of them.",
                )
        for engine in earlier.values():
            hooks.arrived_before |= hooks.indices(engine.hand_over())
            self.members.gives_back |= engine.current_plan.members.gives_back
