"""The steps of the sharded optimizers of a module, which update this rank's shards.

Reasons: docs/design/sharded-optimizer.md.
"""

import contextlib
import gc
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from undertow.config import SyncConfig, refused
from undertow.engine.engine import Engine
from undertow.engine.progress import params_of
from undertow.engine.step_events import StepListener
from undertow.errors import PhaseError, listed, require
from undertow.ranks.agreement import require_agreement
from undertow.ranks.transport import OwnGroup
from undertow.schedule import ZERO1, OpKind, strategy_named
from undertow.sharded.gathers import wait_before_forwards
from undertow.sharded.placeholder import gradients_of
from undertow.sharded.shard_exchanges import ShardExchanges
from undertow.sharded.sharding import Sharding
from undertow.sharded.written import as_settings, require_alike

# For each parameter, by id: the number of the optimizer that updates it, and if one rank updates
# all of it.
_Updates = dict[int, tuple[int, bool]]
_Groups = list[list[int]]  # the parameters of an optimizer, by id


@dataclass(frozen=True, slots=True, eq=False)
class _Stepper:
    """A ShardedOptimizer of a model."""

    optimizer: weakref.ref[Optimizer]
    is_whole: bool  # one rank updates all of a parameter
    # Parameters that it has had and no other has, which users may take out of its groups for a
    # while. Weak, because a model may drop them.
    had: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def params(self) -> Collection[Tensor]:
        """Returns the parameters that it has had; none if it is gone."""
        optimizer = self.optimizer()
        if optimizer is None:
            return ()
        self.had.update(dict.fromkeys(params_of(optimizer)))
        return tuple(self.had)


class ShardedSteps(StepListener):
    """Steps of `module` in shards; making one is a collective call, which makes the separate
    process groups that shards need: none over gloo without a mesh.

    Updated parameters are gathered from the end of an update on, under the next forward, or at once
    if the settings ask for no overlap. Raises ConfigError if the settings do not work with shards.
    """

    def __init__(
        self, module: nn.Module, engine: Engine, config: SyncConfig, *, is_compiled: bool
    ) -> None:
        strategy = self._strategy = strategy_named(config.strategy or ZERO1.name)
        require(
            strategy.gather is not None,
            f"strategy={strategy.name!r} keeps all of the optimizer on every rank.",
            where="ShardedOptimizer",
            remedy='Set strategy="zero1" or "zero2", or use a plain optimizer.',
        )
        if engine.current_plan.comm_hook is not None:
            raise refused("hook", "shards", where="ShardedOptimizer")
        if "join" in engine.current_plan.group.borrowers:
            raise refused("join", "shards", where="join")
        self._engine, self._config, self._is_compiled = engine, config, is_compiled
        self._module = weakref.ref(module)  # which holds this object, by its hooks
        self._exchanges = ShardExchanges(engine.current_plan.group, config)
        engine.current_plan.shards = self
        self._steppers: list[_Stepper] = []  # those that were made; some may be gone
        self._numbers: dict[int, int] = {}  # of those in the layout, by id
        self._updates: _Updates = {}  # of the layout
        self._may_have_changed = False  # since then
        self.sharding: Sharding | None = None
        self._hooks: list[RemovableHandle] = []  # before the forwards of modules
        self._is_closed = False

    @property
    def group(self) -> OwnGroup:
        """The ranks with the other shards of this replica."""
        return self._exchanges.inside.group

    def hand_to(self, stepper: Optimizer, settings: dict[str, Any], *, is_whole: bool) -> None:
        """Makes `stepper` the only one that updates its parameters from now on. A collective call;
        raises PlanMismatch if ranks give different `settings`.

        Lays the parameters out if every trained one has a stepper now. With `is_whole`, one rank
        updates all of a parameter. Raises ConfigError if an earlier one that still exists updates
        one of its parameters.
        """
        if self.steppers:
            # its scheduler makes it refer to itself: whether it is gone must not depend on the rank
            gc.collect()
        group = self._engine.current_plan.group
        if group.num_ranks > 1:
            described = {
                "earlier ShardedOptimizers": list(map(_class_name, self.steppers)),
                "whole": is_whole,
                **settings,
                **self._config.to_dict(),
            }
            require_agreement(group, settings=described)
        self.regroup(stepper)
        alive = [each for each in self._steppers if each.optimizer() is not None]
        self._steppers = [*alive, _Stepper(weakref.ref(stepper), is_whole)]
        try:
            self.lay_out()
        except BaseException:
            self._steppers = alive
            raise

    def regroup(self, stepper: Optimizer) -> None:
        """Called when `stepper` has other parameters than before.

        Raises ConfigError if another one that still exists updates one of them.
        """
        others = [other for other in self.steppers if other is not stepper]
        taken = {id(param) for other in others for param in params_of(other)}
        names = self._engine.current_plan.members.names
        both = [param for param in params_of(stepper) if id(param) in taken]
        require(
            not both,
            f"a ShardedOptimizer of {', '.join(map(_class_name, others))} updates "
            f"{listed([repr(names.get(id(param), '?')) for param in both], most=3)} already.",
            where=f"ShardedOptimizer({_class_name(stepper)}, ...)",
            remedy="Give each of several optimizers its own parameters, as params=. To replace an "
            "optimizer, `del` the first one before you make another.",
        )
        for each in self._steppers:
            for param in params_of(stepper):
                each.had.pop(param, None)  # type: ignore[no-untyped-call]  # torch's method
        self._may_have_changed = True

    @property
    def steppers(self) -> list[Optimizer]:
        """The ShardedOptimizers that exist, first the one that was made first."""
        return [found for each in self._steppers if (found := each.optimizer()) is not None]

    def are_others(self, present: _Groups, before: _Groups) -> bool:
        """Returns True if groups of an optimizer have other parameters of the plan than `before`,
        or in another order.

        A parameter that was added is in the plan after the next forward, on all ranks.
        """
        planned = {id(param) for _, param in self._engine.current_plan.hooks.named_params}
        none: list[int] = []
        return any(
            [it for it in ids if it in planned] != [it for it in had if it in planned]
            for ids, had in zip_longest(present, before, fillvalue=none)
        )

    def require_stepper(self, optimizer: Optimizer) -> None:
        if self._steppers and optimizer not in self.steppers:
            raise PhaseError(
                f"{type(optimizer).__name__} steps on parameters that a ShardedOptimizer updates.",
                where=f"rank {self._exchanges.rank}: each rank has its shards of the gradients "
                "only",
                remedy="Step the ShardedOptimizer, and leave its parameters out of other "
                "optimizers.",
            )

    def lay_out(self) -> None:
        """Called when there are other parameters or optimizers: lays the parameters out.

        Not while the first of several optimizers is made, nor before a change of the parameters
        is in force; this is called again then.
        """
        current_plan = self._engine.current_plan
        updates = self._updates_now()
        if current_plan.change is None and not self._left_out(updates):
            current_plan.wait_for_parameters()
            self._make_layout(updates)

    def begin(self, stepper: Optimizer, *, is_stepping: bool = True) -> Sharding:
        """Prepares a step: lays parameters out if that is due, and registers the hooks that wait
        before forwards. Returns this rank's shards, to be stepped.

        Nothing that `stepper` updates is in flight. The same object while the layout is the same. A
        collective call if it changes: if an optimizer has other parameters, and before the first
        step if rank 0's order of arrival makes another plan. Also if no synchronization has
        followed the last step. In both cases raises ReplicaMismatch on every rank if ranks have
        written different gradients.
        """
        self.require_open("Step before close(), or make a new wrapper and a new optimizer.")
        current_plan, moves = self._engine.current_plan, self._engine.moves
        progress = self._engine.progress
        self._engine.rounds.count_told()  # rank 0's order comes before the first step
        sharding = self.sharding
        is_same = sharding is current_plan.compiled.layout and current_plan.change is None
        is_alone = self._exchanges.num_ranks == 1
        has_mean = is_alone or progress.has_mean_for(stepper, is_stepping=is_stepping)
        if sharding is not None and is_same and not has_mean:
            # All ranks know that no synchronization has followed the last step.
            require_alike(
                current_plan.group,
                sharding.names,
                gradients_of(sharding.params, except_of=self._own_gradients()),
                where="a step of a sharded optimizer without a synchronization since the one "
                "before",
                remedy="On every rank, write g = undertow.average_gradients(g, parameters) before "
                "you assign a gradient that is this rank's own.",
            )
        if sharding is None or not is_same or moves.has_order or self._may_have_changed:
            updates = self._updates_now()
            self._require_steppers(updates)
            current_plan.wait_for_parameters()
            sharding = self._make_layout(updates)
        module = self._module()
        if not (self._hooks or is_alone or self._is_compiled or module is None):
            self._hooks = wait_before_forwards(module, sharding.gathers)
        sharding.follow_parameters(self._numbers[id(stepper)])
        written = sharding.adopt_gradients(self._own_gradients())
        if written and has_mean:
            # Others may have written none, so this is no place for an exchange.
            progress.steps.add_settings(as_settings(sharding.names, written))
        return sharding

    def _own_gradients(self) -> set[int]:
        """Returns the parameters, by id, with gradients that are not averaged yet."""
        hooks = self._engine.current_plan.hooks
        return hooks.ids_of(hooks.arrived_before)

    def _updates_now(self) -> _Updates:
        updates: _Updates = {}
        for number, each in enumerate(self._steppers):
            for param in each.params():
                updates[id(param)] = number, each.is_whole
        return updates

    def _left_out(self, updates: _Updates) -> list[str]:
        """Returns the trained parameters that no optimizer updates, but must: later ones may be
        left out, as in torch."""
        if self.sharding is not None:
            return []
        named_params = self._engine.current_plan.hooks.named_params
        return [repr(name) for name, param in named_params if id(param) not in updates]

    def _require_steppers(self, updates: _Updates) -> None:
        left = self._left_out(updates)
        require(
            not left,
            f"no ShardedOptimizer updates {listed(left, most=3)}: their gradients are cut into "
            "shards, and no plain optimizer can step on them.",
            where=f"the first step of a ShardedOptimizer, rank {self._exchanges.rank}",
            remedy="Give them to one of the optimizers, or freeze them (requires_grad_(False)).",
        )

    def _make_layout(self, updates: _Updates) -> Sharding:
        """Cuts the parameters into shards, and the gradients that are reduced already.

        Raises ReplicaMismatch on every rank if ranks have written different gradients, or have
        different ones from before the optimizer was made.
        """
        current_plan = self._engine.current_plan
        plan, compiled = self._engine.moves.shard_plan(updates), current_plan.compiled
        before = self.sharding if self.sharding is compiled.layout else None
        is_same = updates == self._updates
        stays = is_same and before is not None and before.plan.is_alike(plan.groups, plan.wires)
        not_averaged = self._own_gradients()
        is_first = self.sharding is None
        # At a rebuild all gradients that are left are this rank's own, or cleared.
        if is_first or (before is not None and not stays):
            # Ranks with other gradients would wait for other shards, and the new layout cannot tell
            # which gradients a program has written.
            require_alike(
                current_plan.group,
                [param.name for param in compiled.plan.params],
                gradients_of(compiled.params, except_of=not_averaged),
                where="before gradients are cut into shards"
                if is_first
                else "before shards move to another plan",
                remedy="On every rank, write the same values into `.grad` after backward, or call "
                "zero_grad().",
            )
        self._numbers = {id(each.optimizer()): at for at, each in enumerate(self._steppers)}
        self._may_have_changed = False
        if before is not None and stays:
            return before
        sharding = Sharding(
            plan, compiled.params, self._strategy, self._exchanges, compiled.recorder
        )
        self._engine.recorder.forgets_gathers()
        current_plan.regroup(plan, sharding)
        if current_plan.tuning is not None:
            current_plan.tuning.lays_out()
        if before is not None:
            before.move_gradients(sharding)
        sharding.adopt_gradients(not_averaged)
        self._remove_hooks()
        self._updates, self.sharding = updates, sharding
        return sharding

    @contextlib.contextmanager
    def update(self, sharding: Sharding, stepper: Optimizer) -> Iterator[None]:
        """Context for updating this rank's shards of `stepper`; at its end they are sent, and the
        other ranks' shards received.

        Waits for these if a read could not be seen, or would cut a graph, or without overlap.
        """
        buckets = sharding.buckets_of[self._numbers[id(stepper)]]
        try:
            yield
        except BaseException:  # also Ctrl-C: the other ranks need the half that is updated too
            with contextlib.suppress(Exception):
                self._launch_gathers(sharding, buckets)
            raise
        is_unseen = sharding.gathers.is_read_unseen()
        self._launch_gathers(sharding, buckets)
        if is_unseen or self._is_compiled or not self._config.overlap:
            sharding.gathers.wait_for_all()

    def _launch_gathers(self, sharding: Sharding, buckets: Sequence[int]) -> None:
        if self._exchanges.num_ranks == 1:
            for bucket in buckets:
                flat = sharding.flats[bucket]
                if flat.exact is not None:
                    flat.publish()
                flat.copy_out()
            return
        compiled = self._engine.current_plan.compiled
        try:
            compiled.group.watch.check()
            for index in sorted(buckets, reverse=True):  # in the order of the next forward
                live = compiled.buckets[index]
                with compiled.observed(OpKind.ALL_GATHER, live):
                    sharding.gathers.launch(live)
        except BaseException as error:
            sharding.gathers.are_cut_off(buckets)
            compiled.group.watch.fail(error)  # others wait for this rank's message
            raise

    def unscaling_begins(self, optimizer: Optimizer) -> None:
        if not self._is_closed and optimizer in self.steppers:
            # scalers unscale shards in every step, with the same bits
            self.begin(optimizer, is_stepping=False)

    def full_gradient(self, param: Tensor) -> Tensor | None:
        """Returns the mean gradient of a parameter, whole, or None if it has none.

        A collective call. Raises ReplicaMismatch on every rank if some of them have written another
        gradient: they would not gather the shards.
        """
        sharding = self.sharding
        if sharding is None:
            return param.grad
        part = sharding.parts.get(param)
        if part is not None and not self._is_closed:
            require_alike(
                self._engine.current_plan.group,
                [sharding.names[part.param]],
                gradients_of([sharding.params[part.param]], except_of=self._own_gradients()),
                where="full_gradient()",
                remedy="On every rank, write the same values into `.grad` after backward.",
            )
        return sharding.full_gradient(param)

    def require_open(self, remedy: str) -> None:
        """Raises PhaseError after `close`."""
        if self._is_closed:
            raise PhaseError(
                "the model of this optimizer is closed, by close() or by a newer wrapper of its "
                "parameters: its shards are no longer gathered.",
                where=f"ShardedOptimizer, rank {self._exchanges.rank}",
                remedy=remedy,
            )

    def forward_begins(self, *, is_training: bool, is_compiled: bool) -> None:
        """Called before every forward of the module, also of an evaluation."""
        self._is_compiled |= is_compiled
        if self.sharding is not None and (is_compiled or not is_training or not self._hooks):
            self.sharding.gathers.wait_for_all()

    def forward_ends(self) -> None:
        """Called after it, also if it has raised."""
        # This increments versions, so autograd detects a parameter that was read too early.
        if self.sharding is not None:
            self.sharding.gathers.wait_for_all()

    def close(self) -> None:
        """Takes hooks off and ends threads and the groups; nothing may be in flight.

        Gradients in shards are dropped.
        """
        self._is_closed = True
        if self.sharding is not None:
            self.sharding.drop_gradients()
            self.sharding.gathers.let_go()
        self._remove_hooks()
        self._exchanges.close()
        self._engine.current_plan.shards = None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _class_name(stepper: Optimizer) -> str:
    return str(getattr(stepper, "optimizer_class", type(stepper)).__name__)
