"""Gradient synchronisation of a module that keeps its class and its keys."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from undertow.config import SyncConfig
from undertow.errors import ConfigError, PhaseError
from undertow.plan import Plan
from undertow.report.terminal import print_report
from undertow.runtime import private
from undertow.runtime.buffers import broadcast_buffers, broadcast_in_place, buffer_owners
from undertow.runtime.engine import Engine
from undertow.runtime.group import own_group, require_agreement, user_group
from undertow.runtime.hooks import require_unwatched
from undertow.runtime.manager import spec_of
from undertow.runtime.recorder import Recorder, clock_for
from undertow.trace import StepReport, Trace, summarize


class Sync:
    """Synchronises the gradients of one module; made by `attach` and by `DistributedDataParallel`.

    Making one is a collective call. Raises ConfigError, and PlanMismatch on every rank if ranks hold different
    parameters or settings.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        config: SyncConfig | None = None,
        broadcast: bool = True,
    ) -> None:
        self._config = SyncConfig() if config is None else config
        named_params = _trainable(module, self._config.ignore)
        require_unwatched(named_params)
        self._module = module
        self._is_closed = False
        # All that a forward may train, and what of it is synchronised or ignored; parameters of ours live as long as we.
        self._owned_params = [owner._parameters for owner in module.modules()]
        self._planned = {id(param): param.dtype for _, param in named_params}
        self._group = own_group(_chosen_group(process_group, mesh), device=_exchange_device(named_params))
        try:
            require_agreement(
                self._group,
                settings={
                    "torch": str(torch.__version__),
                    "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),  # they freeze the plan
                    **self._config.to_dict(),
                },
                params=[_description(name, param) for name, param in named_params],
                others=[_description(name, tensor) for name, tensor in self._left_alone()],
            )
            self._recorder = Recorder(
                clock_for(self._group.device, self._group.backend), rank=self._group.rank, level=self._config.record
            )
            if broadcast:
                self.broadcast_parameters()
            self._engine = Engine(named_params, self._group, self._config, self._recorder)
        except BaseException:
            self._group.close()
            raise
        self._hooks = [register_optimizer_step_pre_hook(_finish_before_step(self._engine, named_params))]
        # The garbage collector does not see through a parameter's hooks: without this a dropped model stays for ever.
        self._let_go = weakref.finalize(self, _let_go, self._engine, self._hooks)
        self._let_go.atexit = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of our own over which gradients travel."""
        return self._group.process_group

    @property
    def config(self) -> SyncConfig:
        return self._config

    @property
    def plan(self) -> Plan:
        """The plan of the last round; a re-plan takes effect when the next one begins."""
        return self._engine.plan

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that got no gradient on this rank, over the micro-batches of the last step."""
        return self._engine.unused_parameters

    @property
    def is_accumulating(self) -> bool:
        """Whether a backward that runs now would only accumulate; `accumulate()` sets it for a while."""
        return self._engine.is_accumulating

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        self._engine.is_accumulating = value

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside only accumulate; the next one outside synchronises the sum."""
        before, self._engine.is_accumulating = self._engine.is_accumulating, True
        try:
            yield
        finally:
            self._engine.is_accumulating = before

    no_sync = accumulate

    def finish(self) -> None:
        """Joins the other ranks where this rank's backward reached no parameter at all.

        Runs a round if none has run since this rank's last training forward, else does nothing. Called by itself
        before an optimizer steps that holds one of the parameters.
        """
        self._engine.finish()

    def reduce_gradients_async(self) -> Reduction:
        """Sends the gradients that were accumulated; wait for the result before the optimizer steps.

        PhaseError inside a backward and while an earlier reduction is not waited for.
        """
        if private.graph_task_id() != -1:
            raise PhaseError(
                "reduce_gradients_async() was called inside a backward.",
                where="Sync.reduce_gradients_async",
                remedy="Call it after the last backward of the step.",
            )
        if self._group.num_ranks > 1:
            self._engine.launch()
        return Reduction(self._engine)

    def wait(self) -> None:
        """Returns when nothing is in flight."""
        self._engine.complete()

    def broadcast_parameters(self) -> None:
        """Gives every rank rank 0's parameters and buffers; a collective call."""
        if self._group.num_ranks == 1:
            return
        ignored = set(self._config.ignore)
        broadcast_in_place([param for name, param in self._module.named_parameters() if name not in ignored], self._group)
        broadcast_in_place([buffer for name, buffer in self._module.named_buffers() if name not in ignored], self._group)

    def _left_alone(self) -> list[tuple[str, Tensor]]:
        """What is broadcast and never reduced: parameters that are frozen, and buffers."""
        frozen = [(name, param) for name, param in self._module.named_parameters() if not param.requires_grad]
        tensors = [*frozen, *self._module.named_buffers()]
        return [(name, tensor) for name, tensor in tensors if name not in self._config.ignore]

    def watch_forwards(self) -> None:
        """Has every forward of the module report its begin and end, until `close`."""
        module = self._module

        # A deep copy of the module has these hooks too, and is none of ours.
        def begins(called: nn.Module, *_: Any) -> None:
            if called is module:
                self.forward_begins()

        def ends(called: nn.Module, *_: Any) -> None:
            if called is module:
                self.forward_ends()

        self._hooks.append(module.register_forward_pre_hook(begins))
        self._hooks.append(module.register_forward_hook(ends, always_call=True))

    def forward_begins(self) -> None:
        """Called before each forward of the module: buffers follow rank 0, and a step begins."""
        if self._is_closed:
            return
        if private.graph_task_id() != -1 or not torch.is_grad_enabled():
            return  # recomputation inside a backward, or an evaluation, for which no other rank waits
        is_training = self._module.training
        if is_training:
            self._require_planned()
        self._engine.forward_begins(is_training=is_training)
        if is_training and self._group.num_ranks > 1 and self._config.buffers == "rank0" and not self._engine.is_accumulating:
            broadcast_buffers(buffer_owners(self._module, self._config.ignore), self._group)

    def _require_planned(self) -> None:
        """ConfigError where a parameter is trained for which no bucket has a place: it would not be synchronised."""
        planned = self._planned
        for owned in self._owned_params:
            for param in owned.values():
                if param is not None and param.requires_grad and planned.get(id(param)) is not param.dtype:
                    self._require_ignored(param)

    def _require_ignored(self, param: Tensor) -> None:
        name = next(name for name, known in self._module.named_parameters() if known is param)
        if name in self._config.ignore:
            return
        was = self._planned.get(id(param))
        change = "belongs to no bucket" if was is None else f"was {was} and is {param.dtype}"
        raise ConfigError(
            f"parameter {name!r} is trained but {change}: its gradient would not be synchronised.",
            where=f"rank {self._group.rank}; it has changed since the module was wrapped",
            remedy="Wrap the module when its parameters are final, or close() and wrap it again.",
        )

    def forward_ends(self) -> None:
        """Called after each forward of the module."""
        if private.graph_task_id() == -1 and torch.is_grad_enabled():
            self._recorder.forward_ends()

    def report(self, *, show: bool = True) -> StepReport:
        """Where the time of the last steps went on this rank; prints it as tables unless `show` is false.

        Never communicates: a single rank may ask.
        """
        records = self._recorder.records(generation=self._engine.generation)
        report = summarize(records, self._engine.plan, rank=self._group.rank)
        if show:
            print_report(report)
        return report

    def traces(self) -> tuple[Trace, ...]:
        """What happened in the recorded steps, oldest first, as far as they ran under the present plan."""
        return tuple(record.trace() for record in self._recorder.records(generation=self._engine.generation))

    def save_plan(self, path: str | Path) -> None:
        """Writes the present plan as JSON; `SyncConfig(plan=Path(path).read_text())` pins it."""
        Path(path).write_text(self.plan.to_json() + "\n", encoding="utf-8")

    def close(self) -> None:
        """Takes everything off the module and destroys our process group; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._group.is_alive:
            self._engine.complete()  # else what is in flight would leave its gradients None
        self._let_go()
        self._group.close()


class Reduction:
    """Gradients on their way, from `Sync.reduce_gradients_async`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def wait(self) -> None:
        """Returns when every `.grad` is the mean over ranks."""
        self._engine.complete()


def attach(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    config: SyncConfig | None = None,
) -> Sync:
    """Synchronises `module`'s gradients from now on: after a backward every `.grad` is the mean over ranks.

    The module keeps its class and its `state_dict` keys. All ranks take over rank 0's parameters and buffers. The
    ranks are those of `process_group`, of the one-dimensional `mesh`, or of the default group.
    """
    sync = Sync(module, mesh=mesh, process_group=process_group, config=config)
    sync.watch_forwards()
    return sync


class BucketedDDPHooks:
    """Attaches the overlapped mean reduction to a bare model, with buckets of `bucket_size_mb` MiB, until `close()`."""

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None = None, bucket_size_mb: float = 25.0) -> None:
        self.sync = attach(model, process_group=process_group, config=SyncConfig(bucket_cap_mb=bucket_size_mb))

    def close(self) -> None:
        self.sync.close()


def _trainable(module: nn.Module, ignore: tuple[str, ...]) -> list[tuple[str, Tensor]]:
    known = dict(module.named_parameters())
    known_buffers = dict(module.named_buffers())
    for name in ignore:
        if name not in known and name not in known_buffers:
            raise ConfigError(
                f"there is no parameter or buffer {name!r} to ignore.",
                where=f"a module of {len(known)} parameters: {', '.join([*list(known)[:5], *['...'][: len(known) > 5]])}",
                remedy="Use the names that module.named_parameters() gives.",
            )
    return [(name, param) for name, param in known.items() if param.requires_grad and name not in ignore]


def _let_go(engine: Engine, hooks: list[RemovableHandle]) -> None:
    engine.close()
    for hook in hooks:
        hook.remove()


def _description(name: str, tensor: Tensor) -> dict[str, Any]:
    """What must be the same on every rank."""
    axes = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    return {
        **spec_of(name, tensor).to_dict(),
        "device": tensor.device.type,  # its index may well differ
        "axes in memory": sorted(axes, key=lambda axis: -tensor.stride()[axis]),
    }


def _chosen_group(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup:
    if mesh is None:
        return user_group(process_group)
    if process_group is not None or mesh.ndim != 1:
        raise ConfigError(
            "give either process_group= or a mesh with one dimension."
            if process_group is not None
            else f"a mesh with {mesh.ndim} dimensions is not supported yet.",
            where=f"mesh {mesh}",
            remedy='Pass one dimension of it, such as mesh["dp"].',
        )
    return mesh.get_group()


def _exchange_device(named_params: list[tuple[str, Tensor]]) -> torch.device:
    return named_params[0][1].device if named_params else torch.device("cpu")


def _finish_before_step(engine: Engine, named_params: list[tuple[str, Tensor]]) -> Any:
    """A hook for all optimizers: one that holds our parameters must not step on gradients that are not synchronised."""
    # Weak: torch keeps such hooks for the life of the process.
    weak_engine = weakref.ref(engine)
    ours = {id(param) for _, param in named_params}

    def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        engine = weak_engine()
        if engine is None:
            return
        if any(id(param) in ours for group in optimizer.param_groups for param in group["params"]):
            engine.finish_before_step()

    return hook
