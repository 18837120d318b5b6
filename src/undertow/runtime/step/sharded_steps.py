"""Orders the steps of a sharded optimizer and the forwards of its model."""

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from undertow.config import SyncConfig, refused
from undertow.errors import ConfigError, PhaseError, UndertowError, require
from undertow.runtime.comm.agreement import Agreement
from undertow.runtime.sharded.gathers import ForwardWaits
from undertow.runtime.sharded.layout import ShardGroups, Sharding
from undertow.runtime.step.engine import Engine
from undertow.runtime.step.rounds import Phase
from undertow.runtime.torch_private import private
from undertow.schedule import ZERO1, strategy_named


class ShardedSteps:
    """Steps of `module` in shards, exchanged over separate process groups; making one is a collective call.

    Updated parameters are gathered during the next forward, or at once if the settings ask for no overlap. Raises ConfigError if
    the settings do not go with shards.
    """

    def __init__(self, module: nn.Module, engine: Engine, config: SyncConfig, *, is_compiled: bool) -> None:
        for is_refused, error in _refusals(engine, config):
            if is_refused:
                raise error
        self._strategy = strategy_named(config.strategy or ZERO1.name)
        self._engine, self._config, self._is_compiled = engine, config, is_compiled
        self._module = weakref.ref(module)  # which holds this object, by its hooks
        self._groups = ShardGroups(engine.current_plan.group, config)
        engine.progress.steps_in_shards = True
        self._stepper: weakref.ref[Optimizer] | None = None
        self._stepper_class = ""
        self.sharding: Sharding | None = None
        self._waits: ForwardWaits | None = None
        self._is_closed = False

    def hand_to(self, stepper: Optimizer, settings: dict[str, Any]) -> None:
        """Lets only `stepper` step from now on. A collective call; raises PlanMismatch if ranks give different `settings`.

        Raises ConfigError while an earlier one exists.
        """
        if self.stepper is not None:
            gc.collect()  # its scheduler makes it refer to itself: whether it is gone must not depend on the rank
        earlier: Any = self.stepper
        stepper_class = settings["optimizer"].rpartition(".")[2]
        group = self._engine.current_plan.group
        if group.num_ranks > 1:
            described = {"there is an earlier ShardedOptimizer": earlier is not None, **settings, **self._config.to_dict()}
            Agreement(group, settings=described, params=[], others=[]).require()
        if earlier is not None:
            raise ConfigError(
                f"this model has a ShardedOptimizer already, of {self._stepper_class}: its gradients are cut into "
                "shards for one optimizer.",
                where=f"ShardedOptimizer({stepper_class}, ...)",
                remedy="Give all parameters to one ShardedOptimizer, in several groups. Wrap networks that step in turns each "
                "on its own. To replace the optimizer, `del` the first one before you make another.",
            )
        self._stepper = weakref.ref(stepper)
        self._stepper_class = stepper_class

    @property
    def stepper(self) -> Optimizer | None:
        """The ShardedOptimizer, while it exists."""
        return None if self._stepper is None else self._stepper()

    def require_stepper(self, optimizer: Optimizer) -> None:
        if self._stepper is not None and self._stepper() is not optimizer:
            raise PhaseError(
                f"{type(optimizer).__name__} steps on parameters that a ShardedOptimizer updates.",
                where=f"rank {self._groups.rank}: each rank has its shards of the gradients only",
                remedy="Give all parameters to the ShardedOptimizer, and step that one.",
            )

    def begin(self) -> Sharding:
        """Returns this rank's shards, with nothing in flight, to be stepped: the same object while the layout is the same."""
        if self._is_closed:
            raise self._closed("Step before close(), or make a new wrapper and a new optimizer.")
        current_plan = self._engine.current_plan
        current_plan.wait_for_parameters()
        sharding = current_plan.shard(self._strategy, self._groups)
        if sharding is not self.sharding:
            self.sharding = sharding
            if self._waits is not None:
                self._waits.close()
            self._waits, module = None, self._module()
            if self._groups.num_ranks > 1 and module is not None:
                # Ranks may find different orders. If they may start gathers in different orders, gathers have numbers.
                follow = current_plan.now.compiled.gather_in if self._groups.shard.may_differ_in_order else None
                self._waits = ForwardWaits(module, sharding.gathers, on_order=follow, only_root=self._is_compiled)
        sharding.follow_parameters()
        sharding.adopt_gradients()
        return sharding

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Context for updating this rank's shards; at its end they are sent, and the other ranks' shards received.

        Waits for these if a read could not be seen, or would cut a graph.
        """
        try:
            yield
        except BaseException:  # also Ctrl-C: the other ranks need the half that is updated too
            with contextlib.suppress(Exception):
                self._send()
            raise
        assert self.sharding is not None  # `begin` has made it
        is_unseen = self.sharding.gathers.is_read_unseen()
        self._send()
        if is_unseen or self._is_compiled or not self._config.overlap:
            self._engine.current_plan.wait_for_parameters()

    def _send(self) -> None:
        assert self.sharding is not None  # `begin` has made it
        if not self._engine.current_plan.is_active:  # a single rank gathers nothing
            for flat in self.sharding.flats:
                flat.copy_out()
            return
        try:
            self._engine.current_plan.now.compiled.gather()
        except BaseException:
            self.sharding.gathers.are_cut_off()
            raise

    def skips(self, optimizer: Optimizer) -> bool:
        """Returns True if the step is to change nothing, on every rank; may raise NonFiniteGradient on every rank."""
        numbers = self._engine.checks.numbers
        return numbers.is_on and numbers.skips(optimizer)

    @private.untraced
    def wait(self) -> None:
        self._engine.current_plan.wait_for_parameters()

    def require_gatherable(self) -> None:
        """Raises PhaseError if the ranks cannot gather the state any more."""
        if self._is_closed and self.sharding is not None and self._groups.num_ranks > 1:
            raise self._closed("Call state_dict() before close(); save_checkpoint() works afterwards too.")

    def _closed(self, remedy: str) -> PhaseError:
        return PhaseError(
            "the model of this optimizer is closed: nobody brings the ranks' shards together.",
            where=f"ShardedOptimizer, rank {self._groups.rank}",
            remedy=remedy,
        )

    def forward_begins(self, *, is_training: bool, is_compiled: bool) -> None:
        """Called before every forward of the whole module, also of an evaluation."""
        self._is_compiled |= is_compiled
        if self._waits is not None:
            self._waits.root_begins(is_training=is_training and not is_compiled)

    def forward_ends(self) -> None:
        if self._waits is not None:
            self._waits.root_ends()

    def close(self) -> None:
        """Takes hooks off and ends threads and the groups; nothing may be in flight. Gradients in shards are dropped."""
        self._is_closed = True
        if self.sharding is not None:
            self.sharding.drop_gradients()
            self.sharding.gathers.let_go()
        if self._waits is not None:
            self._waits.close()
        self._groups.close()


def _refusals(engine: Engine, config: SyncConfig) -> tuple[tuple[bool, UndertowError], ...]:
    """Returns the reasons why no optimizer of these parameters can be sharded, each with True if it applies."""
    strategy = strategy_named(config.strategy or ZERO1.name)
    return (
        (
            strategy.gather is None,
            ConfigError(
                f"strategy={strategy.name!r} keeps all of the optimizer on every rank.",
                where="ShardedOptimizer",
                remedy='Set strategy="zero1" or "zero2", or use a plain optimizer.',
            ),
        ),
        (engine.current_plan.comm_hook is not None, refused("hook", "shards", where="ShardedOptimizer")),
        ("join" in engine.current_plan.group.borrowers, refused("join", "shards", where="join")),
    )


def finish_before_look(engine: Engine, params: Iterable[Tensor]) -> None:
    """Runs a synchronization if one is owed, before gradients of these parameters are read: other ranks may be in theirs."""
    ids = set(map(id, params))
    if engine.phase < Phase.CLOSED and engine.current_plan.owns_any(ids):
        engine.finish_before_step(ids)


def require_synchronized(engine: Engine) -> None:
    """Raises PhaseError if gradients were accumulated since the last synchronization: each rank has different ones."""
    require(
        not engine.current_plan.now.hooks.arrived_before,
        "gradients were accumulated and are not synchronized: each rank would compute a different norm.",
        where=f"clip_grad_norm_, rank {engine.current_plan.group.rank}",
        remedy="Run the last backward of a step outside of accumulate() and no_sync().",
        error=PhaseError,
    )


def full_gradient(engine: Engine, steps: ShardedSteps | None, param: Tensor) -> Tensor | None:
    """Returns the mean gradient of a parameter; a collective call if ranks have shards of it or owe a synchronization."""
    finish_before_look(engine, [param])
    sharding = None if steps is None else steps.sharding
    return param.grad if sharding is None else sharding.full_gradient(param)
