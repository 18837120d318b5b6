"""What a sharded optimizer and the forwards of its model have to do with each other."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, compress, repeat
from operator import itemgetter
from typing import Any, cast

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from undertow.config import SyncConfig
from undertow.errors import ConfigError, NonFiniteGradient, PhaseError
from undertow.runtime.comm.agreement import Agreement
from undertow.runtime.sharded.forward_waits import ForwardWaits
from undertow.runtime.sharded.groups import ShardGroups
from undertow.runtime.sharded.in_backward import BucketStepper, steps_in_backward_over
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.step.checks import Arguments, NonFinite
from undertow.runtime.step.engine import Engine
from undertow.runtime.step.rounds import Phase
from undertow.runtime.torch_private import amp as private_scaling
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.module_hook import OutputHook
from undertow.schedule import ZERO1, strategy_named


class ShardedSteps:
    """Steps of `module` in shards, exchanged over a process group of their own; making one is a collective call.

    What every rank has updated is gathered under the next forward, or at once where the settings ask for no overlap.
    ConfigError where the settings do not go with shards.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: Engine,
        config: SyncConfig,
        *,
        is_compiled: bool,
        steps_in_backward: bool,
    ) -> None:
        current_plan = engine.current_plan
        self.strategy = strategy_named(config.strategy or ZERO1.name)
        if self.strategy.gather is None:
            raise ConfigError(
                f"strategy={self.strategy.name!r} keeps all of the optimizer on every rank.",
                where="ShardedOptimizer",
                remedy='Set strategy="zero1" or "zero2", or use a plain optimizer.',
            )
        if current_plan.now.compiled.reducer.hook is not None:
            raise no_hooks_with_shards()
        if "join" in current_plan.group.borrowers:
            raise no_join_with_shards()
        if current_plan.group.num_ranks == 1 and current_plan.now.compiled.reducer.is_active:
            raise ConfigError(
                "these experts are on one rank only, which has nobody to share an optimizer with.",
                where=f"ShardedOptimizer, ExpertGroup(match={config.experts[0].match!r})",
                remedy="Give them to a plain optimizer.",
            )
        if current_plan.group.num_ranks == 1 and current_plan.is_active:
            raise ConfigError(
                "weights with a ShardedOptimizer are not built for a rank alone.",
                where='ShardedOptimizer, SyncConfig(op="weighted")',
                remedy="Divide the loss by the weight, or use a plain optimizer there.",
            )
        if steps_in_backward and config.nonfinite == "skip":
            raise no_skips_in_backward()
        self._numbers = engine.checks.numbers
        self._module = weakref.ref(module)  # which holds us, by its hooks
        self._current_plan = current_plan
        self._overlap = config.overlap
        self._settings = config.to_dict()
        self._group = current_plan.group
        self._groups = ShardGroups(current_plan.group, config, divisor=current_plan.now.compiled.reducer.divisor)
        self.steps_in_backward = steps_in_backward
        self.in_backward = None
        try:
            if steps_in_backward:
                self.in_backward = steps_in_backward_over(
                    self._groups, overlap=config.overlap, end_backward=engine.end_failed_backward
                )
        except ConfigError:
            self._groups.close()
            raise
        in_backward = self.in_backward
        self._output_hook = (
            None if in_backward is None else module.register_forward_hook(OutputHook(module, in_backward.forward_ends))
        )
        self._stepper: weakref.ref[Optimizer] | None = None
        self._sharding: Sharding | None = None
        self._places: ForwardWaits | None = None
        self._is_compiled = is_compiled
        self._is_closed = False

    def hand_to(self, stepper: Optimizer, settings: dict[str, Any], *, steps_in_backward: bool) -> None:
        """From now on only `stepper` may step. A collective call; PlanMismatch where ranks give different `settings`.

        ConfigError while an earlier one is there.
        """
        if steps_in_backward != self.steps_in_backward:
            raise ConfigError(
                f"an optimizer of this model was made with in_backward={self.steps_in_backward} before.",
                where=f"ShardedOptimizer(..., in_backward={steps_in_backward})",
                remedy="Wrap the model anew, or make both alike.",
            )
        earlier = self._earlier()
        if self._group.num_ranks > 1:
            described = {"there is an earlier ShardedOptimizer": bool(earlier), **settings, **self._settings}
            Agreement(self._group, settings=described, params=[], others=[]).require()
        if earlier:
            raise ConfigError(
                f"this model has a ShardedOptimizer already, of {earlier}: its gradients are cut into shards for one optimizer.",
                where=f"ShardedOptimizer({settings['optimizer'].rpartition('.')[2]}, ...)",
                remedy="Give all parameters to one ShardedOptimizer, in several groups. Wrap networks that step in turns each "
                "on its own. To replace the optimizer, `del` the first one before you make another.",
            )
        self._stepper = weakref.ref(stepper)
        if self.in_backward is not None:
            self.in_backward.hand_to(cast(BucketStepper, stepper))

    def _earlier(self) -> str:
        """The class of the optimizer that is there already; empty where it was dropped."""
        if self._stepper is not None and self._stepper() is not None:
            gc.collect()  # its scheduler makes it refer to itself: whether it is gone must not depend on the rank
        earlier: Any = None if self._stepper is None else self._stepper()
        return "" if earlier is None else str(earlier.optimizer_class.__name__)

    def is_stepper(self, optimizer: Optimizer) -> bool:
        """Whether that is the one to update the parameters."""
        return self._stepper is not None and self._stepper() is optimizer

    def require_stepper(self, optimizer: Optimizer) -> None:
        """PhaseError for an optimizer that is not the one to update the parameters."""
        if self._stepper is not None and not self.is_stepper(optimizer):
            raise PhaseError(
                f"{type(optimizer).__name__} steps on parameters that a ShardedOptimizer updates.",
                where=f"rank {self._group.rank}: each rank has its shards of the gradients only",
                remedy="Give all parameters to the ShardedOptimizer, and step that one.",
            )

    def begin(self) -> Sharding:
        """An optimizer steps: what this rank owns, with nothing in flight. The same object while the layout is the same."""
        self._require_open("Step before close(), or make a new wrapper and a new optimizer.")
        self._current_plan.wait_for_parameters()
        sharding = self._current_plan.shard(self.strategy, self._groups, self.in_backward)
        if sharding is not self._sharding:
            self._sharding = sharding
            self._watch(sharding)
        sharding.follow_parameters()
        sharding.adopt_gradients()
        return sharding

    def begin_clipping(self) -> Sharding:
        """The same, before the optimizer steps; PhaseError in backward, where it has stepped already."""
        if self.steps_in_backward:
            raise PhaseError(
                "clip_grad_norm_ does not go with in_backward=True: the norm is known when parameters are updated already.",
                where=f"clip_grad_norm_, rank {self._group.rank}",
                remedy="Leave in_backward=True out: gathers lie under the next forward, and updates between them and backward.",
            )
        return self.begin()

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Inside, this rank's shards are updated; then they are on their way to the others, whose own come."""
        try:
            yield
        except BaseException:  # Ctrl-C too: the half that is updated the others are to have as well
            with contextlib.suppress(Exception):
                self._send()
            raise
        self._send()

    def _send(self) -> None:
        if self._current_plan.is_active:
            self._current_plan.now.compiled.gather()
        elif self._sharding is not None:
            self._sharding.copy_out()

    def step_ends(self) -> None:
        """The optimizer has stepped. Waits where a read could not be seen, or would cut a graph."""
        if not self._overlap or self._is_compiled or (self._sharding is not None and self._sharding.gathers.is_read_unseen()):
            self._current_plan.wait_for_parameters()

    @property
    def is_stepped(self) -> bool:
        """Whether the last backward has updated the parameters, and `confirm` is due."""
        return self.in_backward is not None and self.in_backward.is_due

    def confirm(self) -> bool:
        """The optimizer steps where `is_stepped`. Returns whether there is more to do: to `begin`, for a plan is to be taken."""
        assert self.in_backward is not None  # else nothing is stepped
        self.in_backward.is_due = False
        return self._current_plan.now.groups is not None

    def skips(self, optimizer: Optimizer) -> bool:
        """Whether the step is to leave everything as it is, on every rank; NonFiniteGradient on every rank."""
        try:
            return self._numbers.skips(optimizer, has_begun=self.is_stepped)
        except NonFiniteGradient:
            if self.in_backward is not None:
                self.in_backward.is_due = False  # there is nothing more to confirm
            raise

    @private.untraced
    def wait(self) -> None:
        """Returns when every parameter is what the optimizer has made of it."""
        self._current_plan.wait_for_parameters()

    def make_whole(self) -> None:
        """Ends a backward that has failed with parameters and state updated in part, before somebody looks at those."""
        if self._sharding is not None:
            self._sharding.gathers.make_whole()

    def make_whole_to_gather(self) -> None:
        """The same, before all ranks gather the state. PhaseError where they cannot any more."""
        if self._sharding is not None and self._group.num_ranks > 1:
            self._require_open("Call state_dict() before close(); save_checkpoint() works afterwards too.")
        self.make_whole()

    def _require_open(self, remedy: str) -> None:
        if self._is_closed:
            raise PhaseError(
                "the model of this optimizer is closed: nobody brings the ranks' shards together.",
                where=f"ShardedOptimizer, rank {self._group.rank}",
                remedy=remedy,
            )

    def full_gradient(self, param: Tensor) -> Tensor | None:
        """The mean gradient of a parameter; a collective call where ranks have shards of it."""
        sharding = self._sharding
        index = None if sharding is None else next((at for at, it in enumerate(sharding.params) if it is param), None)
        return param.grad if sharding is None or index is None else sharding.full_gradient(index)

    def forward_begins(self, *, is_training: bool, is_compiled: bool) -> None:
        """Called before every forward of the whole module, also of an evaluation."""
        self._is_compiled |= is_compiled
        if is_training and self.in_backward is not None:
            self.in_backward.require_confirmed("a training forward begins")
        if self._places is not None:
            self._places.root_begins(is_training=is_training and not is_compiled)

    def forward_ends(self) -> None:
        if self._places is not None:
            self._places.root_ends()

    def close(self) -> None:
        """Takes hooks off and ends threads and the group; nothing may be in flight. Gradients in shards are dropped."""
        self._is_closed = True
        if self._output_hook is not None:
            self._output_hook.remove()
        if self._sharding is not None:
            self._sharding.drop_gradients()
            self._sharding.gathers.let_go()
        if self._places is not None:
            self._places.close()
        self._groups.close()

    def _watch(self, sharding: Sharding) -> None:
        if self._places is not None:
            self._places.close()
            self._places = None
        module = self._module()
        if self._groups.num_ranks == 1 or module is None:
            return
        # Ranks that find different orders still agree on what goes with what: gathers have numbers, where they may differ.
        is_free = self._groups.shard.may_differ_in_order and sharding.in_backward is None  # else the lane's order is planned
        follow = self._current_plan.now.compiled.gather_in if is_free else _leave
        self._places = ForwardWaits(module, sharding.buckets_of(), sharding.gathers, on_order=follow, only_root=self._is_compiled)


def no_hooks_with_shards() -> ConfigError:
    return ConfigError(
        "communication hooks reduce whole gradients, and a ShardedOptimizer needs only shards of them.",
        where="ShardedOptimizer",
        remedy="Use a plain optimizer with the hook, or leave the hook out.",
    )


def no_join_with_shards() -> PhaseError:
    return PhaseError(
        "join() does not go with a ShardedOptimizer: each step needs all shards, and a rank without data does not step.",
        where="join",
        remedy="Give every rank as many batches: drop_last=True of a DataLoader, or a sampler that pads, as DistributedSampler "
        "does.",
    )


def no_skips_in_backward() -> ConfigError:
    return ConfigError(
        'nonfinite="skip" does not go with in_backward=True: buckets are updated before the last one is known to be finite.',
        where="ShardedOptimizer",
        remedy='Leave in_backward=True out, or use nonfinite="raise".',
    )


def no_plain_optimizer(config: SyncConfig, optimizer: Optimizer) -> PhaseError:
    """Returns the error of a plain optimizer if the settings ask for a sharded one."""
    return PhaseError(
        f"strategy={config.strategy!r} needs a sharded optimizer, and {type(optimizer).__name__} is none.",
        where="the first step of the optimizer",
        remedy=f"Make it with undertow.ShardedOptimizer(torch.optim.{type(optimizer).__name__}, model, ...).",
    )


def _leave(_order: object) -> None:
    return None


def finish_before_look(sync: Any, params: Iterable[Tensor]) -> None:
    """Runs a round if one is owed before somebody looks at the gradients of these parameters: other ranks may be in theirs."""
    ids, engine = set(map(id, params)), sync._engine
    if engine.phase < Phase.CLOSED and engine.current_plan.owns_any(ids):
        engine.finish_before_step(ids, steps=False)


def require_synchronized(sync: Any) -> None:
    """PhaseError where gradients were accumulated since the last synchronization: each rank has its own."""
    if sync._engine.current_plan.now.hooks.arrived_before:
        raise PhaseError(
            "gradients were accumulated and are not synchronized: each rank would find another norm.",
            where=f"clip_grad_norm_, rank {sync.rank}",
            remedy="Run the last backward of a step outside of accumulate() and no_sync().",
        )


def full_gradient(sync: Any, param: Tensor) -> Tensor | None:
    """The mean gradient of a parameter; a collective call where ranks have shards of it, or where a round is owed."""
    finish_before_look(sync, [param])
    return param.grad if sync.steps is None else sync.steps.full_gradient(param)


def watch_steps(sync: Any, engine: Any) -> Callable[[], None]:
    """Hooks for all optimizers and gradient scalers; returns what takes them off.

    An optimizer that holds our parameters must not step on gradients that are not synchronized yet, and a scaler that unscales
    before it steps must not look at them.
    """
    needs_shards = strategy_named(sync.config.strategy).gather is not None
    weak_sync, weak_engine = weakref.ref(sync), weakref.ref(engine)  # torch keeps such hooks for the life of the process

    def finish(optimizer: Optimizer, *, steps: bool, has_closure: bool = False) -> NonFinite | None:
        sync, engine = weak_sync(), weak_engine()
        # An optimizer over shards has other tensors than parameters: for those, every model would look through its parameters.
        stepped = list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))
        params = set(compress(map(id, stepped), map(isinstance, stepped, repeat(nn.Parameter))))
        if steps and sync is not None and sync._members.replaced.former:  # hence never in a run without such changes
            is_sharded = sync.steps is not None and sync.steps.is_stepper(optimizer)
            sync._members.replaced.before_step(optimizer, params, sync._members.named_params(), is_sharded=is_sharded)
        if engine is not None and sync is not None and engine.phase < Phase.CLOSED and engine.current_plan.owns_any(params):
            if sync.steps is not None:
                sync.steps.require_stepper(optimizer)
            elif needs_shards:
                raise no_plain_optimizer(sync.config, optimizer)
            engine.finish_before_step(params, steps=steps)
            if engine.earlier is not None and steps and not has_closure:  # a closure's backward is still to come
                engine.earlier.weights.require_backward(f"{type(optimizer).__name__}.step, rank {sync.rank}")
            if sync.steps is None and engine.checks.numbers.is_on:
                numbers: NonFinite = engine.checks.numbers
                return numbers
        return None

    @private.untraced  # where the step is compiled, so would all be that comes before it
    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        numbers = finish(optimizer, steps=True, has_closure=any(map(callable, (*args[1:], *kwargs.values()))))
        return None if numbers is None else numbers.before_step(optimizer, args, kwargs)

    def around_unscaling(optimizer: Optimizer, look: private_scaling.Look) -> private_scaling.Found:
        finish(optimizer, steps=False)
        return look()

    hooks = contextlib.ExitStack()
    hooks.callback(register_optimizer_step_pre_hook(before_step).remove)
    hooks.callback(private_scaling.around_unscaling(around_unscaling))
    return hooks.close
