"""Orders the steps of a sharded optimizer and the forwards of its model."""

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from undertow.buckets.bucket import LiveBucket
from undertow.config import SyncConfig, refused
from undertow.engine.engine import Engine
from undertow.errors import PhaseError, require
from undertow.ranks.facts import Agreement
from undertow.schedule import ZERO1, OpKind, strategy_named
from undertow.sharded.gathers import Gathers, wait_before_forwards
from undertow.sharded.groups import ShardGroups
from undertow.sharded.layout import Sharding


class ShardedSteps:
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
        engine.progress.steps_in_shards = True
        self._stepper: weakref.ref[Optimizer] | None = None
        self._stepper_class = ""
        self.sharding: Sharding | None = None
        self._hooks: list[RemovableHandle] = []  # before the forwards of modules
        self._is_closed = False

    def hand_to(self, stepper: Optimizer, settings: dict[str, Any]) -> None:
        """Lets only `stepper` step from now on. A collective call; raises PlanMismatch if ranks
        give different `settings`.

        Raises ConfigError while an earlier one exists.
        """
        if self.stepper is not None:
            # its scheduler makes it refer to itself: whether it is gone must not depend on the rank
            gc.collect()
        has_earlier = self.stepper is not None
        stepper_class = settings["optimizer"].rpartition(".")[2]
        group = self._engine.current_plan.group
        if group.num_ranks > 1:
            described = {
                "there is an earlier ShardedOptimizer": has_earlier,
                **settings,
                **self._config.to_dict(),
            }
            Agreement(group, settings=described).require()
        require(
            not has_earlier,
            f"this model has a ShardedOptimizer already, of {self._stepper_class}: "
            "its gradients are cut into shards for one optimizer.",
            where=f"ShardedOptimizer({stepper_class}, ...)",
            remedy="Give all parameters to one ShardedOptimizer, in several groups. "
            "Wrap networks that step in turns each on its own. "
            "To replace the optimizer, `del` the first one before you make another.",
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
        """Returns this rank's shards, with nothing in flight, to be stepped.

        The same object while the layout is the same.
        """
        self.require_open("Step before close(), or make a new wrapper and a new optimizer.")
        current_plan = self._engine.current_plan
        current_plan.wait_for_parameters()
        sharding = self.sharding
        is_same = sharding is current_plan.compiled.layout and current_plan.change is None
        if sharding is None or not is_same:
            sharding = self._lay_out()
            self._remove_hooks()
            self.sharding, module = sharding, self._module()
            if self._groups.num_ranks > 1 and module is not None and not self._is_compiled:
                self._hooks = wait_before_forwards(module, sharding.gathers)
        sharding.follow_parameters()
        sharding.adopt_gradients()
        return sharding

    def _lay_out(self) -> Sharding:
        """Cuts the parameters, and the gradients that were reduced whole, into shards."""
        current_plan = self._engine.current_plan
        compiled, plan = current_plan.compiled, current_plan.shard_plan()
        own = compiled.own_gradients() if current_plan.is_active else {}
        sharding = Sharding(plan, compiled.params, self._strategy, self._groups, compiled.recorder)
        current_plan.follow_layout(plan, sharding)
        sharding.adopt_gradients()
        sharding.reduce_again(own)
        return sharding

    @contextlib.contextmanager
    def update(self, sharding: Sharding) -> Iterator[None]:
        """Context for updating this rank's shards; at its end they are sent, and the other ranks'
        shards received.

        Waits for these if a read could not be seen, or would cut a graph.
        """
        try:
            yield
        except BaseException:  # also Ctrl-C: the other ranks need the half that is updated too
            with contextlib.suppress(Exception):
                self._send(sharding)
            raise
        is_unseen = sharding.gathers.is_read_unseen()
        self._send(sharding)
        if is_unseen or self._is_compiled or not self._config.overlap:
            sharding.gathers.wait_for_all()

    def _send(self, sharding: Sharding) -> None:
        if self._groups.num_ranks == 1:
            for flat in sharding.flats:
                flat.copy_out()
            return
        try:
            compiled = self._engine.current_plan.compiled
            compiled.issue(compiled.gathers, {OpKind.ALL_GATHER: _gather}, sharding.gathers)
        except BaseException:
            sharding.gathers.are_cut_off()
            raise

    def require_open(self, remedy: str) -> None:
        """Raises PhaseError after `close`."""
        if self._is_closed:
            raise PhaseError(
                "the model of this optimizer is closed: nobody brings the ranks' shards together.",
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

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _gather(gathers: Gathers, bucket: LiveBucket) -> None:
    gathers.launch(bucket.layout.index)


def finish_before_look(engine: Engine, params: Iterable[Tensor]) -> None:
    """Runs a synchronization if one is owed, before gradients of these parameters are read.

    Other ranks may be in theirs.
    """
    ids = set(map(id, params))
    if not engine.is_closed and engine.current_plan.owns_any(ids):
        engine.finish_before_step(ids)


def full_gradient(engine: Engine, steps: ShardedSteps | None, param: Tensor) -> Tensor | None:
    """Returns the mean gradient of a parameter.

    A collective call if ranks have shards of it or owe a synchronization.
    """
    finish_before_look(engine, [param])
    sharding = None if steps is None else steps.sharding
    return param.grad if sharding is None else sharding.full_gradient(param)
