"""The synchronization of one module, as its wrapper, optimizers and checkpoints use it."""

import contextlib
import dataclasses
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, compress, repeat
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from undertow.config import SyncConfig
from undertow.errors import PhaseError, require
from undertow.plan import Plan
from undertow.runtime.comm.broadcast import broadcast_in_place, synchronize_buffers
from undertow.runtime.comm.group import GroupRef, OwnGroup, chosen_group
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.hooks import earlier_watchers, is_outermost_forward, is_watched, warn_of_late_backward
from undertow.runtime.execute.round import Settings
from undertow.runtime.model.ignore import names_to_ignore
from undertow.runtime.model.module_params import ModuleParams
from undertow.runtime.step.checks import Arguments, NonFinite
from undertow.runtime.step.engine import Engine
from undertow.runtime.step.progress import Forward
from undertow.runtime.step.rounds import Phase
from undertow.runtime.step.sharded_steps import ShardedSteps
from undertow.runtime.step.siblings import SiblingEngines, all_of
from undertow.runtime.step.tracing import trace_at_end
from undertow.runtime.torch_private import private, tables
from undertow.runtime.torch_private.module_hook import ModuleHook, before_loads, cut_graphs
from undertow.schedule import DDP

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}  # settings of torch's optimizers
_PLAIN = {bool, int, float, str, type(None)}
_NOT_THE_USERS = ("undertow-", "Dummy-")  # names of Undertow's threads, and of threads that Python has not started


class ModelSync:
    """Owns the engine of one module, its process group and its hooks, from construction to `close`; users see GradientSync.

    `elsewhere` has the names that another GradientSync handles; ranks may differ in it. Faults of `within` are faults here too.
    """

    experts: tuple[Any, ...] = ()  # one for each group of experts, in the order of the settings
    _is_attached = False  # True if the module's own forwards are watched

    def __init__(  # noqa: PLR0913  settings of users, and the parts that the caller synchronizes elsewhere
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | GroupRef | None = None,
        device_mesh: DeviceMesh | None = None,
        config: SyncConfig | None = None,
        ignore: Iterable[str | nn.Module | Tensor] = (),
        shared: Collection[str] = ("parameters", "buffers"),
        elsewhere: Container[str] = (),
        within: OwnGroup | None = None,
    ) -> None:
        config = SyncConfig() if config is None else config
        ignored = {*names_to_ignore(module, config.ignore), *names_to_ignore(module, ignore)}
        self._config = dataclasses.replace(config, ignore=tuple(ignored))
        self._module = module
        self._members = ModuleParams(module, ignored, elsewhere=elsewhere, reduce_dtype=config.reduce_dtype)
        self._forward_hooks: list[RemovableHandle] = []  # of an attached module; a wrapper's are in ddp/rpc.py
        self._is_closed = self._is_compiled = False
        self._steps: ShardedSteps | None = None
        self._set_up(chosen_group(process_group, device_mesh, config.strategy), within)
        if isinstance(process_group, GroupRef):
            return  # a copied or unpickled model: its ranks open the group when they first use it
        try:
            self._engine.current_plan.open()
            self._share(shared)
        except BaseException:
            self.close()
            raise

    def _set_up(self, group: GroupRef, within: OwnGroup | None = None) -> None:
        """Creates everything that belongs to one process group, without communication."""
        own = self._group = OwnGroup(group, device=self._members.device, limits=self._config, within=within)
        own.here.module = weakref.ref(self._module)
        members, attached = self._members, contextlib.ExitStack()
        engine = self._engine = Engine(members, own, self._config, Recorder(own, level=self._config.record))
        if getattr(self._module.forward, "__func__", None) is nn.Module.forward:
            engine.progress.forward = Forward.RUNNING  # a container: there is no forward to wait for
        engine.siblings = SiblingEngines([engine], close=weakref.WeakMethod(self.close))
        attached.callback(own.close)
        attached.callback(members.close)
        attached.callback(engine.close)
        attached.callback(_watch_steps(self, engine))
        if engine.current_plan.is_active:
            attached.callback(before_loads(self._module, engine.checks.loads.begins))
        write_trace = trace_at_end(engine, self._config)
        if write_trace is not None:
            attached.callback(write_trace)
        self._attached = attached
        # The garbage collector does not see through a parameter's hooks: without this, a dropped model is never freed.
        self._let_go = weakref.finalize(self, _let_go, engine, attached.close, os.getpid(), weakref.ref(self._module))
        self._let_go.atexit = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The user's process group. Gradients are averaged over its ranks; Undertow itself communicates over a clone of it."""
        group = self._group.user.group
        return self._group.process_group if group is None else group

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def num_ranks(self) -> int:
        return self._group.num_ranks

    @property
    def _parts(self) -> tuple[Any, ...]:
        """The synchronization of the dense parameters, and one of each group of experts."""
        return (self, *self.experts)

    @property
    def _has_comm_hook(self) -> bool:
        return self._engine.current_plan.comm_hook is not None

    @property
    def _is_training_forward(self) -> bool:
        """True if a forward that starts now is a training forward: the module is in training mode and gradients are enabled."""
        return self._module.training and is_outermost_forward()

    @property
    def config(self) -> SyncConfig:
        groups = tuple(group for part in self._parts for group in part._config.experts)
        return dataclasses.replace(self._config, experts=groups) if self.experts else self._config

    @property
    def plan(self) -> Plan:
        """The plan of the last synchronization; a new plan takes effect when the next one begins."""
        return self._engine.current_plan.now.compiled.plan

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Returns all parameters of the module except ignored ones, frozen parameters included."""
        return self._members.named_params()

    def _take_part_with_experts(self) -> None:
        """Makes a backward that reaches a parameter of any part a synchronization of all parts."""
        engines = [part._engine for part in self._parts]
        for engine in engines:
            engine.siblings = SiblingEngines(engines, close=weakref.WeakMethod(self.close))

    @property
    def is_accumulating(self) -> bool:
        """True if a backward that runs now only accumulates; `accumulate()` sets it temporarily."""
        return self._engine.is_accumulating

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        for part in self._parts:
            part._engine.is_accumulating = value

    def _wait(self) -> None:
        # In a backward, a hook or a signal handler calls this: its end waits for the gradients.
        if private.graph_task_id() == -1:
            self._engine.complete()
        self._engine.current_plan.wait_for_parameters()

    @private.untraced
    def _wait_for_parameters(self) -> None:
        """Waits for all parameters that a sharded optimizer updates."""
        all_of(*(part._engine.current_plan.wait_for_parameters for part in self._parts))

    def _shard(self, stepper: Optimizer, settings: dict[str, Any]) -> ShardedSteps:
        """Hands the parameters to `stepper`: from its first step on, only it updates them, and each rank updates one shard.

        A collective call. Raises ConfigError if the settings do not support shards or an earlier stepper is still in use, and
        PlanMismatch on every rank if ranks give different `settings`.
        """
        self._require_open("ShardedOptimizer")
        if self._steps is None:
            self._engine.current_plan.open()
            self._steps = ShardedSteps(self._module, self._engine, self._config, is_compiled=self._is_compiled)
            self._attached.callback(self._steps.close)
        self._steps.hand_to(stepper, settings)
        return self._steps

    def _share(self, kinds: Collection[str], *, source: int = 0) -> None:
        """Copies the "parameters" or "buffers" of rank `source`, and of the first rank of experts' groups; a collective call."""
        if self._group.num_ranks == 1:
            return
        self._engine.current_plan.open()
        self._wait_for_parameters()
        if "parameters" in kinds:
            broadcast_in_place([param for _, param in self.named_parameters()], self._group, source=source)
            self._engine.checks.loads.settle()
        if "buffers" in kinds:
            tensors = [buffer.tensor for buffer in self._members.common_buffers.now()]
            broadcast_in_place(tensors, self._group, source=source)
        for expert in self.experts:
            expert._share(kinds)

    def _synchronize_buffers(self, *, source: int = 0) -> None:
        """Copies buffers from rank `source` or averages them, depending on the settings; a collective call."""
        if self._group.num_ranks == 1:
            return
        self._engine.current_plan.open()
        if self._members.common_buffers.buffers:
            averages = self._config.buffers == "mean"
            synchronize_buffers(self._members.common_buffers, self._group, source=source, averages=averages)

    def _shadow(self) -> None:
        """Takes part in one synchronization of the other ranks without contributing gradients."""
        self._engine.shadow()
        self._engine.checks.require_alike()  # no later call on this rank checks

    def _watch_forwards(self) -> None:
        """Registers hooks at the start and the end of every forward of an attached module, until `close`.

        A single rank has none until a communication hook needs them.
        """
        is_active = any(part._engine.current_plan.is_active for part in self._parts)
        if not is_active or not self._is_attached or self._forward_hooks:
            return
        begins, ends = (ModuleHook(self._module, then) for then in (self._attached_forward_begins, self._forward_ends))
        self._forward_hooks = [
            self._module.register_forward_pre_hook(begins, prepend=True),
            self._module.register_forward_hook(ends, always_call=True),
            *cut_graphs(self._module, self._cut_bytes),
        ]

    def _cut_bytes(self) -> int:
        """Returns the bucket size at which torch.compile cuts graphs of the module, or 0 if they stay whole."""
        return self._engine.current_plan.now.compiled.cut_bytes

    def _attached_forward_begins(self) -> None:
        follows = self._config.buffers != "off" and self._engine.progress.are_buffers_due
        self._forward_begins(buffers_follow=0 if follows else None, is_compiled=torch.compiler.is_compiling())

    @private.untraced
    def _forward_begins(self, *, buffers_follow: int | None = 0, is_compiled: bool = False) -> None:
        """Called before each forward of the module: starts a step and, unless `buffers_follow` is None, synchronizes buffers."""
        if self.experts:
            all_of(*(partial(part._one_forward_begins, buffers_follow, is_compiled) for part in self._parts))
        else:
            self._one_forward_begins(buffers_follow, is_compiled)

    def _one_forward_begins(self, buffers_follow: int | None, is_compiled: bool) -> None:
        self._is_compiled |= is_compiled
        is_outermost = is_outermost_forward()
        is_training = is_outermost and self._module.training
        if self._engine.phase is Phase.CLOSED:
            if is_training and not self._is_averaged_elsewhere():
                self._require_open("a training forward")
            return
        if not self._engine.current_plan.is_active:
            return
        if is_outermost:
            self._engine.forward_begins(is_training=is_training, is_compiled=is_compiled)
        if self._steps is not None:  # after the mark of the forward, which this wait belongs to
            self._steps.forward_begins(is_training=is_training, is_compiled=is_compiled)
        if not is_training:
            return
        if buffers_follow is not None and (self._members.common_buffers.buffers or not self._group.is_open):
            self._synchronize_buffers(source=buffers_follow)
        # Last: ranks that have not changed go on to their backward now.
        has_buffers = self._config.buffers != "off" and bool(self._members.common_buffers.buffers)
        self._engine.meet_before_forward(has_buffers=has_buffers)

    def _is_averaged_elsewhere(self) -> bool:
        """Returns True in a step that a forward of a newer wrapper of all trained parameters has begun."""
        trained = self._members.trained_now()
        newer = earlier_watchers(trained).values()
        has_begun = all(engine.progress.forward is not Forward.NONE for engine in newer)
        return has_begun and all(is_watched(param) for _, param in trained)

    @private.untraced
    def _forward_ends(self) -> None:
        if self._steps is not None:
            self._steps.forward_ends()
        if self._engine.phase < Phase.CLOSED and is_outermost_forward():
            self._engine.forward_ends()
        for expert in self.experts:
            expert._forward_ends()

    def _require_open(self, call: str) -> None:
        """Raises PhaseError after `close()`, when `call` would average nothing."""
        require(
            not self._is_closed,
            "this model is closed: its gradients are not averaged any more.",
            where=f"{call}, rank {self.rank}",
            remedy="Train `model.module`, the module itself, without averaging, or wrap it anew.",
            error=PhaseError,
        )

    def close(self) -> None:
        """Removes all hooks from the module and destroys Undertow's process group; later calls do nothing.

        A backward whose forward has already run will warn. Raises PhaseError inside a backward.
        """
        if all(part._is_closed for part in self._parts):
            return
        require(
            private.graph_task_id() == -1,
            "close() was called inside a backward.",
            where=f"rank {self._group.rank}",
            remedy="Call it after backward: gradients of this one may be on their way.",
            error=PhaseError,
        )
        all_of(*(expert.close for expert in self.experts), self._close)  # whose group watches the ranks for all

    def _close(self) -> None:
        if self._is_closed:  # by a call that was interrupted before it closed the experts
            return
        self._is_closed = True
        is_backward_due = self._engine.is_backward_due
        try:
            if self._group.is_alive:
                self._wait()  # gradients in flight would otherwise end up None
            elif self._group.existing() is None:
                self._engine.current_plan.wait_for_parameters()  # gathers hold the groups that they are sent over
        finally:
            self._let_go.detach()  # it would wait again for a synchronization that has failed or was interrupted
            self._attached.close()
            for hook in self._forward_hooks:
                hook.remove()
        if is_backward_due:
            warn_of_late_backward(self._module, [param for _, param in self._members.trained_now()])


def _let_go(engine: Engine, close: Callable[[], object], process: int, module: weakref.ref[nn.Module]) -> None:
    """Calls `close` for a model that user code has dropped, and warns if its `module` is trained without averaging from then on.

    It waits for the parameters of the engine's last step, and of its siblings' last steps, because other ranks wait for this
    rank's shards. Errors are dropped. It does not wait if the garbage collector runs in one of Undertow's threads, which may
    be the one that gathers parameters, or in a child process, which has no such threads.
    """
    try:
        if os.getpid() == process and not threading.current_thread().name.startswith(_NOT_THE_USERS):
            engine.siblings.wait_for_parameters()
        there = module()
        if os.getpid() == process and there is not None and engine.phase < Phase.CLOSED and engine.current_plan.trains:
            _warn_of_dropped(there, set(engine.current_plan.now.hooks.ids))
    finally:
        close()


def _warn_of_dropped(module: nn.Module, ids: set[int]) -> None:
    """Warns once, when an optimizer steps on one of these parameters, by id, unless `module` is gone or wrapped anew."""
    weak_module = weakref.ref(module)

    @private.untraced
    def before_step(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        module = weak_module()
        if module is None or not ids or ids.isdisjoint(map(id, _params_of(optimizer))):
            return
        is_left = any(id(param) in ids and not is_watched(param) for _, param in tables.named_parameters(module))
        ids.clear()  # torch's loop over hooks forbids to remove one
        if is_left:
            warnings.warn(
                f"{type(optimizer).__name__} steps on gradients that are not averaged any more: nothing refers to the wrapper "
                f"of their module, so it is gone.\n  {type(module).__name__}\n"
                "  Keep the wrapper, and call it: model = DistributedDataParallel(model). To train without it, close() it first.",
                stacklevel=2,
            )

    ends = weakref.finalize(module, register_optimizer_step_pre_hook(before_step).remove)
    ends.atexit = False


def _params_of(optimizer: Optimizer) -> Iterator[Any]:
    return chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))


def _watch_steps(sync: ModelSync, engine: Engine) -> Callable[[], None]:
    """Puts hooks on all optimizers and gradient scalers; returns a function that removes them.

    An optimizer that holds a synchronized parameter must not step on gradients that are not synchronized yet, and a scaler that
    unscales before it steps must not read them.
    """
    # Weak, because torch keeps such hooks for the life of the process.
    before_step = partial(_before_step, weakref.ref(sync), weakref.ref(engine))

    def around_unscaling(optimizer: Optimizer, look: private.Look) -> private.Found:
        before_step(optimizer, (), {}, steps=False)
        return look()

    hooks = contextlib.ExitStack()
    hooks.callback(register_optimizer_step_pre_hook(before_step).remove)
    hooks.callback(private.around_unscaling(around_unscaling))
    return hooks.close


def settings_of(optimizer: Optimizer, names: Mapping[int, str], trained: frozenset[int] | set[int]) -> Settings:
    """Returns the settings of each group with `trained` parameters, by id; ranks that step alike have the same.

    A group is named by its number and by the first of its parameters in alphabetical order: another optimizer may have a group of
    the same number, and the ranks may step the two in another order.

    Left out are tensors on devices, for which the host would wait, and settings that only choose an implementation.
    """
    kind = getattr(optimizer, "optimizer_class", type(optimizer)).__name__
    settings: list[tuple[str, tuple[tuple[str, Any], ...]]] = []
    for group in optimizer.param_groups:
        here = trained.intersection(map(id, group["params"]))
        if not here:
            continue
        first = min(map(names.__getitem__, here))
        of_group = []
        for name in getattr(optimizer, "defaults", ()):
            value = group.get(name)
            if type(value) not in _PLAIN:
                value = _plain(value)
            if value is not None and name not in _IMPLEMENTATION:
                of_group.append((name, value))
        settings.append((f"group {len(settings)} of {kind} with {first!r}", tuple(of_group)))
    return tuple(settings)


def _plain(value: object) -> object:
    """Returns a number of numpy's or on the host, or a sequence of plain values, as Python has it; None for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.dim() == 0 else None
    if isinstance(value, tuple | list):
        return tuple(value) if _PLAIN.issuperset(map(type, value)) else None
    return float(value) if isinstance(value, float) else None


def _require_stepper(sync: ModelSync, optimizer: Optimizer) -> None:
    """Raises PhaseError if another optimizer is to step the model."""
    if sync._steps is not None:
        sync._steps.require_stepper(optimizer)
    elif sync._config.strategy not in (None, DDP.name):
        raise PhaseError(
            f"strategy={sync.config.strategy!r} needs a sharded optimizer, and {type(optimizer).__name__} is not one.",
            where="the first step of the optimizer",
            remedy=f"Make it with undertow.ShardedOptimizer(torch.optim.{type(optimizer).__name__}, model, ...).",
        )


@private.untraced  # if the step is compiled, so would be everything before it
def _before_step(
    weak_sync: Callable[[], ModelSync | None],
    weak_engine: Callable[[], Engine | None],
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    steps: bool = True,
) -> Arguments | None:
    sync, engine = weak_sync(), weak_engine()
    if sync is None or engine is None:
        return None
    # An optimizer over shards has other tensors: if it were asked about those, every model would search its parameters.
    stepped = list(_params_of(optimizer))
    params = set(compress(map(id, stepped), map(isinstance, stepped, repeat(nn.Parameter))))
    if len(params) < len(stepped):  # TorchScript may have parameters that are plain tensors
        params |= sync._members.ids & set(map(id, stepped))
    if engine.phase >= Phase.CLOSED or not engine.current_plan.owns_any(params):
        return None
    _require_stepper(sync, optimizer)
    engine.finish_before_step(params)
    if sync._steps is not None and not steps:
        sync._steps.begin()  # a scaler is to unscale shards in every step, with the same bits
    has_closure = any(map(callable, (*args[1:], *kwargs.values())))
    if not has_closure:  # whose backward is still to come
        engine.require_sound_gradients(params, reader=type(optimizer).__name__)
    if not steps:
        return None
    current_plan = engine.current_plan
    settings = settings_of(optimizer, current_plan.members.names, current_plan.now.hooks.ids)
    engine.optimizer_steps(params, settings, has_closure=has_closure)
    numbers: NonFinite = engine.checks.numbers
    return numbers.before_step(optimizer, args, kwargs) if numbers.is_on and sync._steps is None else None
