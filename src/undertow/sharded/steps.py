"""This rank's shards of the parameters and gradients of a plan, and the steps of the sharded
optimizer that updates them.

Reasons: docs/design/sharded-optimizer.md.
"""

import contextlib
import gc
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from undertow.buckets.bucket import Layout, LiveBucket, Shared
from undertow.buckets.memory import BucketMemory, strides_of_gradient
from undertow.buckets.recorder import Recorder
from undertow.config import SyncConfig, refused
from undertow.engine.engine import Engine
from undertow.engine.progress import params_of
from undertow.engine.step_events import StepListener
from undertow.errors import ConfigError, PhaseError, listed, require
from undertow.plan import Bucket, Plan
from undertow.ranks.agreement import require_agreement
from undertow.ranks.exchanges import accumulation_dtype
from undertow.schedule import ZERO1, OpKind, Strategy, strategy_named
from undertow.sharded.gathers import Gathers, wait_before_forwards
from undertow.sharded.gradients import ShardedGradients
from undertow.sharded.groups import ShardGroups
from undertow.sharded.params import FlatParams, ShardPart, in_memory_order
from undertow.sharded.placeholder import GradientPlaceholder
from undertow.sharded.reduce_scatter import ReduceScatter
from undertow.torch_private import private

# For each parameter, by id: the number of the optimizer that updates it, and if one rank updates
# all of it.
_Updates = dict[int, tuple[int, bool]]

_grad_of = attrgetter("grad")


class Sharding(Layout):
    """This rank's shards of `plan` over `params`, which move into memory of the buckets.

    `flats` is the memory of each bucket, and `parts` has this rank's part of each parameter, which
    may be empty.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        strategy: Strategy,
        groups: ShardGroups,
        recorder: Recorder,
    ) -> None:
        _require_shardable(plan, params)
        super().__init__(groups.shard.group)  # the ranks with the other shards of this replica
        self.plan, self.params, self.strategy, self.groups = plan, tuple(params), strategy, groups
        self.exchanges = groups.axes
        # Fixed now, when all ranks have the same: the order of elements in a bucket.
        self.strides = [strides_of_gradient(param) for param in params]
        self.flats = [
            FlatParams(
                bucket,
                [params[index] for index in bucket.params],
                rank=self.group.rank,
                num_ranks=plan.num_ranks,
                num_shards=self.group.num_ranks,
                param_wire=groups.param_wire,
            )
            for bucket in plan.buckets
        ]
        self.parts: dict[Tensor, ShardPart] = {}  # by identity of the parameter
        for flat in self.flats:
            self.parts.update(zip(flat.params, flat.parts, strict=True))
        self._gradients: list[ShardedGradients] = []  # of each bucket; a single rank has none
        # by the number of their optimizer
        self.buckets_of: defaultdict[int, list[int]] = defaultdict(list)
        for bucket in plan.buckets:
            self.buckets_of[bucket.stepper].append(bucket.index)
        self._placeholders = [
            GradientPlaceholder(param, name=spec.name, group=self.group)
            for spec, param in zip(plan.params, params, strict=True)
        ]
        shards = [groups.shards_of(bucket) for bucket in plan.buckets]
        self.gathers = Gathers(self.flats, shards, groups.shard, recorder)

    def live_buckets(self, shared: Shared) -> Sequence[LiveBucket]:
        buckets = [self._sharded_bucket(spec, shared) for spec in self.plan.buckets]
        self._gradients = [gradients for _, gradients in buckets]
        return [bucket for bucket, _ in buckets]

    def _sharded_bucket(self, spec: Bucket, shared: Shared) -> tuple[LiveBucket, ShardedGradients]:
        params = shared.params_of(spec)
        placeholders = [self._placeholders[index] for index in spec.params]
        gradients = ShardedGradients(
            params,
            BucketMemory(spec, params),
            tuple(zip(placeholders, self.flats[spec.index].parts, strict=True)),
            shard_numel=self.groups.shard_numel(spec),
        )
        transfer = ReduceScatter(spec, self.plan, gradients, shared.reducer, self.groups)
        return LiveBucket(spec, shared, gradients, transfer), gradients

    def make_gradients_whole(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        """Called before gradients move to another plan.

        Raises PhaseError if ranks have shards of one of them.
        """
        for name, param in named_params:
            grad = param.grad
            if not isinstance(grad, GradientPlaceholder):
                continue
            require(
                grad.is_cleared,
                "the parameters have changed while sharded gradients are held.",
                where=f"parameter {name!r}, rank {self.groups.rank}",
                remedy="Call zero_grad() before parameters are frozen, unfrozen, added or "
                "replaced.",
                error=PhaseError,
            )
            param.grad = grad.added
            if grad.added is None:
                param.grad = torch.zeros_like(param, dtype=private.gradient_dtype(param))

    def wait_for_parameters(self) -> None:
        if self.gathers.in_flight:
            self.gathers.wait_for_all()

    def follow_parameters(self, stepper: int | None = None) -> None:
        """Waits for the parameters of an optimizer, and takes over values written into them from
        outside since the last step. None means all optimizers."""
        buckets = range(len(self.flats)) if stepper is None else self.buckets_of[stepper]
        if self.gathers.in_flight:
            self.gathers.wait(buckets)
        for bucket in buckets:
            self.flats[bucket].follow()

    @torch.no_grad()
    def adopt_gradients(self, own: Collection[int] = ()) -> None:
        """Replaces whole gradients by placeholders; a single rank keeps them.

        Gradients are the same on every rank, except those of the parameters in `own`, by id: they
        are this rank's own, and the next synchronization reduces them.
        """
        if not self._gradients:
            return
        for index, grad in enumerate(map(_grad_of, self.params)):
            if grad is None or isinstance(grad, GradientPlaceholder):
                continue
            param, placeholder = self.params[index], self._placeholders[index]
            part = self.parts[param]
            if id(param) in own:
                placeholder.bind_to(param)
                placeholder.is_cleared, placeholder.added = True, grad
                continue
            values = in_memory_order(self.group.hardware.keep(grad), self.strides[index])
            placeholder.part.copy_(values[part.start : part.stop])
            placeholder.bind_to(param)

    @torch.no_grad()
    def move_gradients(self, to: "Sharding") -> None:
        """Moves gradients in shards to another layout of the same parameters, with the same bits.

        A collective call.
        """
        for bucket in self.plan.buckets:
            held: dict[int, GradientPlaceholder] = {}
            whole: dict[int, Tensor] = {}  # [param.numel()] of the wide dtype
            for slot in bucket.slots:
                grad = self.params[slot.param].grad
                if isinstance(grad, GradientPlaceholder):
                    held[slot.param] = grad
                    if not grad.is_cleared:
                        whole[slot.param] = grad.part.new_empty(slot.stop - slot.start)
            if whole:
                # kept, because nothing holds this layout any more
                own = self.group.hardware.keep(self._gradients[bucket.index].shard)
                self.gather_whole(bucket, own, whole)
            for index, grad in held.items():
                to._take_gradient(index, grad, whole.get(index), self.strides[index])

    def _take_gradient(
        self,
        index: int,
        grad: GradientPlaceholder,
        whole: Tensor | None,
        strides: tuple[int, ...],
    ) -> None:
        """Takes over a gradient from another layout, with its mean, in memory of these strides."""
        param, placeholder = self.params[index], self._placeholders[index]
        placeholder.bind_to(param)
        placeholder.added, placeholder.is_cleared = grad.added, grad.is_cleared
        if whole is not None:
            part = self.parts[param]
            values = in_memory_order(whole.as_strided(param.shape, strides), self.strides[index])
            placeholder.part.copy_(values[part.start : part.stop])

    def gradients(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns the mean gradient of this rank's part of each parameter, or None. [part.numel] of
        the wide dtype"""
        found: list[Tensor | None] = []
        for param in params:
            grad = param.grad
            if isinstance(grad, GradientPlaceholder):
                grad = torch.zeros_like(grad.part) if grad.is_cleared else grad.part
            elif grad is not None:  # on a single rank
                grad = in_memory_order(grad, self.strides[self.parts[param].param])
                grad = grad.to(accumulation_dtype(grad.dtype))
            found.append(grad)
        return found

    def require_synchronized(self, params: Sequence[Tensor]) -> None:
        """Raises PhaseError if a gradient of these parameters has grown since it was reduced, on
        any rank's part.

        Also raises it if a parameter has a gradient but no part in the layout, because it was
        frozen when gradients were synchronized.
        """
        for param in params:
            grad = param.grad
            if isinstance(grad, GradientPlaceholder):
                if grad.added is None:
                    continue
                raise PhaseError(
                    "the optimizer steps on gradients that were accumulated and not synchronized.",
                    where=f"parameter {grad.param_name!r}, rank {self.groups.rank}",
                    remedy="Run the last backward of a step outside of accumulate() and no_sync().",
                )
            if grad is not None and param.requires_grad and param not in self.parts:
                raise PhaseError(
                    "the optimizer steps on a gradient that is not synchronized: its parameter "
                    "was frozen in the meantime.",
                    where=f"a parameter of shape {tuple(param.shape)}, rank {self.groups.rank}",
                    remedy="Freeze and unfreeze parameters between a step and its next forward, "
                    "or call zero_grad() then.",
                )

    def drop_gradients(self) -> None:
        for param in self.params:
            if isinstance(param.grad, GradientPlaceholder):
                param.grad = None

    @property
    def holds_shards(self) -> bool:
        return any(
            isinstance(param.grad, GradientPlaceholder) and not param.grad.is_cleared
            for param in self.params
        )

    def full_gradient(self, param: Tensor) -> Tensor | None:
        """Returns the mean gradient of a parameter, of its shape, or None if it has none.

        A collective call.
        """
        grad = param.grad
        if not isinstance(grad, GradientPlaceholder):
            return grad
        part = self.parts[param]
        wide = accumulation_dtype(param.dtype)
        whole = torch.zeros(param.numel(), dtype=wide, device=param.device)
        if not grad.is_cleared:
            bucket = self.plan.buckets[part.bucket]
            own = self._gradients[bucket.index].shard
            self.gather_whole(bucket, own, {part.param: whole})
        return whole.as_strided(param.shape, self.strides[part.param]).to(grad.dtype)

    def gather_whole(self, bucket: Bucket, own: Tensor, into: Mapping[int, Tensor]) -> None:
        """Writes all ranks' shards of data in that bucket's layout into whole tensors.

        A collective call. `own` is this rank's shard. `into` has elements in memory order, by
        parameter.
        """
        shards = self.groups.shards_of(bucket)
        part = shards[self.group.rank]
        flat = own.new_empty(shards[-1].stop)
        flat[part.start : part.stop].copy_(own)
        if self.group.num_ranks > 1:
            number = len(self.plan.buckets) + bucket.index
            handle = self.groups.shard.all_gather(flat, shards, number=number)
            what = f"the shards of bucket {bucket.index}"
            self.group.makes_call(what)
            with self.group.waiting(what):
                handle.wait()
        for slot in bucket.slots:
            if slot.param in into:
                into[slot.param].copy_(flat[slot.start : slot.stop])


def _require_shardable(plan: Plan, params: Sequence[Tensor]) -> None:
    for bucket in plan.buckets:
        if bucket.is_sparse:
            name = plan.params[bucket.slots[0].param].name
            raise refused("shards", "sparse", where=f"ShardedOptimizer, parameter {name!r}")
    # Of two parameters that share memory, each would be updated as if it were alone.
    places = sorted(
        (param.data_ptr(), param.nbytes, index)
        for index, param in enumerate(params)
        if param.nbytes
    )
    for (start, num_bytes, first), (following, _, second) in pairwise(places):
        if following < start + num_bytes:
            names = " and ".join(repr(plan.params[index].name) for index in sorted((first, second)))
            raise ConfigError(
                f"parameters {names} lie in the same memory: a sharded optimizer would update "
                "each by itself.",
                where="ShardedOptimizer",
                remedy="Make them one parameter (second.weight = first.weight), or use a plain "
                "optimizer.",
            )


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
    """Steps of `module` in shards, exchanged over separate process groups; making one is a
    collective call.

    Updated parameters are gathered during the next forward, or at once if the settings ask for no
    overlap. Raises ConfigError if the settings do not go with shards.
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
        self._groups = ShardGroups(engine.current_plan.group, config)
        engine.current_plan.shards = self
        self._steppers: list[_Stepper] = []  # those that were made; some may be gone
        self._numbers: dict[int, int] = {}  # of those in the layout, by id
        self._updates: _Updates = {}  # of the layout
        self._may_have_changed = False  # since then
        self.sharding: Sharding | None = None
        self._hooks: list[RemovableHandle] = []  # before the forwards of modules
        self._is_closed = False

    def hand_to(self, stepper: Optimizer, settings: dict[str, Any], *, is_whole: bool) -> None:
        """Lets `stepper` update its parameters from now on, and nobody else. A collective call;
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

    def require_stepper(self, optimizer: Optimizer) -> None:
        if self._steppers and optimizer not in self.steppers:
            raise PhaseError(
                f"{type(optimizer).__name__} steps on parameters that a ShardedOptimizer updates.",
                where=f"rank {self._groups.rank}: each rank has its shards of the gradients only",
                remedy="Give all parameters to ShardedOptimizers, and step those.",
            )

    def lay_out(self) -> None:
        """Called when there are other parameters or optimizers: lays the parameters out.

        Not while the first of several optimizers is made, nor before a change of the parameters
        is in force; this is called again then.
        """
        current_plan = self._engine.current_plan
        if current_plan.change is None and not self._left_out():
            current_plan.wait_for_parameters()
            self._make_layout()

    def begin(self, stepper: Optimizer | None = None) -> Sharding:
        """Returns this rank's shards, to be stepped.

        Nothing that `stepper` updates is in flight; None means all optimizers. The same object
        while the layout is the same. A collective call if it changes: if an optimizer has other
        parameters, and before the first step if rank 0's order of arrival makes another plan.
        """
        self.require_open("Step before close(), or make a new wrapper and a new optimizer.")
        current_plan, moves = self._engine.current_plan, self._engine.moves
        sharding = self.sharding
        is_same = sharding is current_plan.compiled.layout and current_plan.change is None
        if sharding is None or not is_same or moves.has_order or self._may_have_changed:
            self._require_steppers()
            current_plan.wait_for_parameters()
            sharding = self._make_layout()
        module = self._module()
        is_alone = self._groups.num_ranks == 1
        if not (self._hooks or is_alone or self._is_compiled or module is None):
            self._hooks = wait_before_forwards(module, sharding.gathers)
        sharding.follow_parameters(None if stepper is None else self._numbers[id(stepper)])
        sharding.adopt_gradients(self._own_gradients())
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

    def _left_out(self) -> list[str]:
        """Returns the trained parameters that no optimizer updates, but must: later ones may be
        left out, as in torch."""
        if self.sharding is not None:
            return []
        updates = self._updates_now()
        named_params = self._engine.current_plan.hooks.named_params
        return [repr(name) for name, param in named_params if id(param) not in updates]

    def _require_steppers(self) -> None:
        left = self._left_out()
        require(
            not left,
            f"no ShardedOptimizer updates {listed(left, most=3)}: their gradients are cut into "
            "shards, and no plain optimizer can step on them.",
            where=f"the first step of a ShardedOptimizer, rank {self._groups.rank}",
            remedy="Give them to one of the optimizers, or freeze them (requires_grad_(False)).",
        )

    def _make_layout(self) -> Sharding:
        """Cuts the parameters into shards, and the gradients that are reduced already."""
        current_plan, updates = self._engine.current_plan, self._updates_now()
        plan, compiled = self._engine.moves.shard_plan(updates), current_plan.compiled
        before = self.sharding if self.sharding is compiled.layout else None
        is_same = updates == self._updates
        self._numbers = {id(each.optimizer()): at for at, each in enumerate(self._steppers)}
        self._may_have_changed = False
        if before is not None and is_same and before.plan.is_alike(plan.groups, plan.wires):
            return before
        not_averaged = self._own_gradients()
        sharding = Sharding(plan, compiled.params, self._strategy, self._groups, compiled.recorder)
        current_plan.follow_layout(plan, sharding)
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

        Waits for these if a read could not be seen, or would cut a graph.
        """
        buckets = sharding.buckets_of[self._numbers[id(stepper)]]
        try:
            yield
        except BaseException:  # also Ctrl-C: the other ranks need the half that is updated too
            with contextlib.suppress(Exception):
                self._send(sharding, buckets)
            raise
        is_unseen = sharding.gathers.is_read_unseen()
        self._send(sharding, buckets)
        if is_unseen or self._is_compiled or not self._config.overlap:
            sharding.gathers.wait_for_all()

    def _send(self, sharding: Sharding, buckets: Sequence[int]) -> None:
        if self._groups.num_ranks == 1:
            for bucket in buckets:
                flat = sharding.flats[bucket]
                if flat.exact is not None:
                    flat.publish()
                flat.copy_out()
            return
        try:
            compiled = self._engine.current_plan.compiled
            compiled.group.watch.check()
            for index in sorted(buckets, reverse=True):  # in the order of the next forward
                compiled.run(OpKind.ALL_GATHER, sharding.gathers.launch, compiled.buckets[index])
        except BaseException:
            sharding.gathers.are_cut_off(buckets)
            raise

    def unscaling_begins(self, optimizer: Optimizer) -> None:
        if not self._is_closed and optimizer in self.steppers:
            self.begin(optimizer)  # scalers unscale shards in every step, with the same bits

    def require_open(self, remedy: str) -> None:
        """Raises PhaseError after `close`."""
        if self._is_closed:
            raise PhaseError(
                "the model of this optimizer is closed: its ranks no longer exchange their shards.",
                where=f"ShardedOptimizer, rank {self._groups.rank}",
                remedy=remedy,
            )

    def forward_begins(self, *, is_training: bool, is_compiled: bool) -> None:
        """Called before every forward of the whole module, also of an evaluation."""
        self._is_compiled |= is_compiled
        if self.sharding is not None and (is_compiled or not is_training or not self._hooks):
            self.sharding.gathers.wait_for_all()

    def forward_ends(self) -> None:
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
        self._groups.close()
        self._engine.current_plan.shards = None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _class_name(stepper: Optimizer) -> str:
    return str(getattr(stepper, "optimizer_class", type(stepper)).__name__)
