"""Synchronizes parameters of one module over one process group: what that needs, from construction
to `close`."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from undertow.buckets.recorder import Recorder
from undertow.config import SyncConfig
from undertow.engine.agreed_errors import CHANGE_ALIKE, require_outside_of_backward
from undertow.engine.alike_findings import AlikeFindings
from undertow.engine.before_steps import BeforeSteps
from undertow.engine.engine import Engine
from undertow.engine.hooks import earlier_watchers, is_watched
from undertow.engine.params import ModuleParams
from undertow.engine.progress import Forward
from undertow.engine.step_events import StepEvents, is_outermost_forward
from undertow.engine.stop import StopRequest
from undertow.errors import PhaseError, require
from undertow.mesh.axes import everyone, other_groups, replica_of, require_fits_replicas
from undertow.outer.outer_sync import OuterSync
from undertow.ranks.buffers import broadcast_in_place, synchronize_buffers
from undertow.ranks.group import GroupRef
from undertow.ranks.transport import OwnGroup
from undertow.sharded.steps import ShardedSteps
from undertow.sync.late_backward import warn_of_late_backward
from undertow.sync.tracing import trace_at_end
from undertow.torch_private import private

# Names of Undertow's threads, and of threads that Python has not started.
_NOT_THE_USERS = ("undertow-", "Dummy-")


class GroupSync:
    """The engine, the groups and the hooks of `members`, which are parameters of `module`.

    A GradientSync has one for its own parameters, and its experts have others. Making one does not
    communicate. Faults of `within` are faults here too.
    """

    def __init__(
        self,
        module: nn.Module,
        members: ModuleParams,
        group: GroupRef,
        config: SyncConfig,
        *,
        within: OwnGroup | None = None,
    ) -> None:
        self.module, self.members, self.config = module, members, config
        self.outer: OuterSync | None = None  # with SyncConfig(outer=...)
        self.sharded_steps: ShardedSteps | None = None  # of sharded optimizers
        self.is_closed = self.is_compiled = False
        device = members.device
        if members.named_params():
            group.require_device(device)
        self.all_ranks: OwnGroup  # that train the model; with `outer`, of all replicas
        self.attached = contextlib.ExitStack()  # ends by `close`
        own = self.group = self._opened_with(group, device, within)
        if config.outer is None:
            self.all_ranks = own
        own.here.module = weakref.ref(module)
        engine = self.engine = Engine(members, own, config, Recorder(own, level=config.record))
        if getattr(module.forward, "__func__", None) is nn.Module.forward:
            # a container: it has no forward to wait for
            engine.progress.forward = Forward.RUNNING
        self.attached.callback(own.close)
        self.attached.callback(members.close)
        self.attached.callback(engine.close)
        self.events = StepEvents()
        self.attached.callback(self.events.close)
        self.before_steps = BeforeSteps(engine, config)
        self.events.subscribe(self.before_steps)
        if config.nonfinite == "skip":
            self.events.follow_ends()
        if own.is_on_mesh:
            # Torch asks the other places only if the first gradient is cut.
            self.events.subscribe(AlikeFindings(own.everyone, [members]))
        if config.outer is not None:
            self.all_ranks.here.module = own.here.module
            self.outer = OuterSync(module, self.all_ranks, engine, config)
            self.attached.callback(self.outer.close)
            self.events.subscribe(self.outer)
            self.events.subscribe(self.outer.loads)
            self.events.follow_ends()
        if engine.current_plan.is_active or config.outer is not None:
            self.events.follow_loads(module)
        write_trace = trace_at_end(engine)
        if write_trace is not None:
            self.attached.callback(write_trace)
        self._finalizer: weakref.finalize[..., Any] | None = None

    def _opened_with(
        self, group: GroupRef, device: torch.device, within: OwnGroup | None
    ) -> OwnGroup:
        """Returns the group that the engine synchronizes. Makes the groups around it, which it
        opens: of all replicas, and of the ranks at all places of a mesh."""
        params = [param for _, param in self.members.named_params()]
        mesh = mesh_group(self.members, group, self.config)
        make = partial(OwnGroup, device=device, limits=self.config)
        if mesh is not None:
            within = mesh
            self.attached.callback(mesh.close)
        if self.config.outer is not None:  # the engine synchronizes within a replica
            named_params = self.members.named_params()
            require_fits_replicas(self.module, named_params, group.ranks, has_rows=bool(group.rows))
            within = self.all_ranks = make(group, within=mesh, is_axis=mesh is not None)
            self.attached.callback(within.close)
            if mesh is not None:
                # at all places: these ranks must agree in each step
                ranks = replica_of(params, group.ranks, group.ranks[group.rank])
                replica = GroupRef(ranks, group.backend, group.timeout)
                within = make(replica, within=mesh)
                self.attached.callback(within.close)
            group = group.replica()
        return make(group, within=within, is_axis=mesh is not None)

    def close_with(self, owner: object) -> None:
        """Closes this when the last reference to `owner` is gone, if not before.

        The garbage collector does not see through a parameter's hooks: without this, a dropped
        model is never freed.
        """
        self._finalizer = weakref.finalize(
            owner, _close_dropped, self.engine, self.attached.close, os.getpid()
        )
        self._finalizer.atexit = False  # other ranks may have ended

    @property
    def rank(self) -> int:
        return self.all_ranks.rank

    @property
    def stop(self) -> StopRequest:
        """The request to stop; a rank without others follows its own."""
        stop = self.engine.checks.stop
        if self.all_ranks.num_ranks == 1:
            stop.follow_alone()
        return stop

    def require_open(self, call: str) -> None:
        """Raises PhaseError after `close()`, when `call` would average nothing."""
        require(
            not self.is_closed,
            "this model is closed, by close() or by a newer wrapper of its parameters: its "
            "gradients are no longer averaged.",
            where=f"{call}, rank {self.rank}",
            remedy="Use the newer wrapper. If there is none, wrap `model.module` again, or train "
            "it without averaging.",
            error=PhaseError,
        )

    # Waits.

    def wait(self) -> None:
        """Waits until every gradient and every parameter has its final value."""
        # In a backward, a hook or a signal handler calls this: its end waits for the gradients.
        if private.graph_task_id() == -1:
            self.engine.rounds.finish()
        self.engine.current_plan.wait_for_parameters()

    def wait_for_parameters(self) -> None:
        """Waits for all parameters that a sharded optimizer updates."""
        self.engine.current_plan.wait_for_parameters()

    def raise_reason(self, error: RuntimeError) -> None:
        """Called with an error of a forward. Raises the reason if it is a lost rank: on a mesh the
        forward waits for ranks of other axes, and the transport's error names none."""
        if self.group.is_on_mesh:
            with self.group.waiting():
                raise error

    # The parameters.

    def has(self, param: Tensor) -> bool:
        """Returns True if this synchronizes the parameter."""
        return any(param is own for _, own in self.members.named_params())

    def full_gradient(self, param: Tensor) -> Tensor | None:
        """Returns the mean gradient of a parameter, whole on this rank, or None if it has none."""
        self.before_steps.finish_before_look([param], reader="full_gradient", is_by_all=False)
        steps = self.sharded_steps
        return param.grad if steps is None else steps.full_gradient(param)

    # Copies of a rank's tensors.

    def open_group(self) -> None:
        """Opens the groups of all ranks; a collective call the first time."""
        if self.outer is None:
            self.engine.current_plan.open_group()
        else:
            self.outer.open_group()

    def share(self, kinds: Collection[str], *, source: int = 0) -> None:
        """Copies the "parameters" or "buffers" of rank `source`; nothing is on its way.

        Raises PlanMismatch, on every rank, if ranks have different parameters.
        """
        group = self.all_ranks
        if "parameters" in kinds:
            # gloo ends processes, or mixes parameters up, if messages are of different sizes
            self.members.require_described_alike(group, remedy=CHANGE_ALIKE)
            broadcast_in_place(
                [param for _, param in self.members.named_params()], group, source=source
            )
            self.engine.checks.loads.settle()
        if "buffers" in kinds:
            tensors = [buffer.values for buffer in self.members.common_buffers.now()]
            broadcast_in_place(tensors, group, source=source)
        if self.outer is not None:
            self.outer.reset()

    @property
    def has_buffers(self) -> bool:
        """True if the module has buffers that are synchronized."""
        return bool(self.members.common_buffers.buffers)

    def synchronize_buffers(self, *, source: int = 0) -> None:
        """Copies the buffers of rank `source`; a collective call."""
        if self.group.num_ranks == 1:
            return
        self.engine.current_plan.open_group()
        if self.has_buffers:
            synchronize_buffers(self.members.common_buffers, self.group, source=source)

    def shadow(self) -> None:
        """Takes part in one synchronization of the other ranks without contributing gradients."""
        self.engine.shadow()
        self.engine.checks.require_alike()  # no later call on this rank checks

    def synchronize_buffers_without_forward(self, *, source: int) -> None:
        """Copies the buffers of rank `source` if no forward ran here: the other ranks' forwards
        copied them."""
        engine = self.engine
        is_due = engine.synchronizes and engine.is_step_empty and engine.progress.are_buffers_due
        if is_due and self.config.buffers != "off" and self.module.training:
            self.synchronize_buffers(source=source)

    # Shards.

    def hand_to(self, stepper: Optimizer, settings: dict[str, Any], *, whole: bool) -> ShardedSteps:
        """Hands the parameters to `stepper`: only it updates them, and each rank updates one shard.

        A collective call, which lays the parameters out. Raises ConfigError if the settings do not
        support shards or an earlier stepper is still in use, and PlanMismatch on every rank if
        ranks give different `settings`.
        """
        self.require_open("ShardedOptimizer")
        require_outside_of_backward(
            "ShardedOptimizer()",
            where=f"rank {self.rank}",
            remedy="Make the optimizer before or after it.",
        )
        self.wait()
        if self.sharded_steps is None:
            self.engine.current_plan.open_group()
            self.sharded_steps = ShardedSteps(
                self.module, self.engine, self.config, is_compiled=self.is_compiled
            )
            self.attached.callback(self.sharded_steps.close)
            self.events.subscribe(self.sharded_steps)
        self.sharded_steps.hand_to(stepper, settings, is_whole=whole)
        return self.sharded_steps

    # A forward.

    def forward_begins(self, buffers_follow: int | None, *, is_compiled: bool) -> None:
        """Called before each forward of the module.

        Starts a step and, unless `buffers_follow` is None, copies the buffers of that rank.
        """
        self.is_compiled |= is_compiled
        engine, is_outermost = self.engine, is_outermost_forward()
        is_training = is_outermost and self.module.training
        if engine.is_closed:
            if is_training and not self._is_averaged_elsewhere():
                self.require_open("a training forward")
            return
        is_active = engine.current_plan.is_active
        if is_training and is_active and private.is_rpc_running() and private.is_in_rpc_context():
            raise PhaseError(
                "gradients of torch.distributed.rpc are not averaged: a context of distributed "
                "autograd keeps them instead of `.grad`.",
                where=f"a training forward in dist_autograd.context(), rank {self.rank}",
                remedy="Run the forward outside of the context, or use torch's "
                "DistributedDataParallel.",
            )
        if is_outermost and is_active:
            engine.forward_begins(is_training=is_training, is_compiled=is_compiled)
        if self.outer is not None and is_training:
            self.outer.forward_begins()
        if self.sharded_steps is not None:
            self.sharded_steps.forward_begins(is_training=is_training, is_compiled=is_compiled)
        if not is_training or buffers_follow is None:
            return
        if self.has_buffers or not self.group.is_open:
            self.synchronize_buffers(source=buffers_follow)

    def forward_ends(self) -> None:
        """Called after each forward of the module, also if it has raised."""
        if self.sharded_steps is not None:
            self.sharded_steps.forward_ends()
        if is_outermost_forward() and not self.engine.is_closed:
            self.engine.forward_ends()

    def _is_averaged_elsewhere(self) -> bool:
        """Returns True in a step that a forward of a newer wrapper of all trained parameters has
        begun."""
        trained = self.members.trained_now()
        newer = earlier_watchers(trained).values()
        has_begun = all(engine.progress.forward is not Forward.NONE for engine in newer)
        return has_begun and all(is_watched(param) for _, param in trained)

    def close(self) -> None:
        """Removes all hooks except the hooks of forwards, and destroys the groups.

        Later calls do nothing.

        A backward whose forward has already run will warn.
        """
        if self.is_closed:  # by a call that was interrupted before it closed the experts
            return
        self.is_closed = self.engine.checks.stop.is_closed = True
        is_backward_due = self.engine.is_backward_due
        try:
            if self.group.is_alive:
                self.wait()  # gradients in flight would otherwise end up None
            elif self.group.existing() is None:
                # Without the group: gathers hold theirs.
                self.engine.current_plan.wait_for_parameters()
        finally:
            if self._finalizer is not None:
                # It would wait again for a round that has failed or was interrupted.
                self._finalizer.detach()
            self.attached.close()
        if is_backward_due:
            warn_of_late_backward(self.module, [param for _, param in self.members.trained_now()])


def mesh_group(members: ModuleParams, group: GroupRef, config: SyncConfig) -> OwnGroup | None:
    """Returns the group of all ranks of the data axis and of the other axes of a mesh; None if no
    parameter is distributed over another axis."""
    params = [param for _, param in members.named_params()]
    ranks = everyone(params, group.ranks)
    if ranks == group.ranks:
        return None
    whole = GroupRef(ranks, group.backend, group.timeout)
    made = OwnGroup(whole, device=members.device, limits=config)
    made.torch_group.others = [weakref.ref(other) for other in other_groups(params)]
    return made


def _close_dropped(engine: Engine, close: Callable[[], object], process: int) -> None:
    """Closes a model that nothing refers to; drops errors of waits.

    It waits for gradients and parameters on their way, because other ranks wait for them too. It
    does not wait in a child process, or if the garbage collector runs in one of Undertow's threads,
    which may be the one that gathers.
    """
    try:
        thread = threading.current_thread().name
        if os.getpid() == process and not thread.startswith(_NOT_THE_USERS):
            if private.graph_task_id() == -1:
                engine.siblings.wait_for_reductions()
            engine.siblings.wait_for_parameters()
    finally:
        close()
