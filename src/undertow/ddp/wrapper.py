"""The wrapper that replaces torch's DistributedDataParallel."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Never, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh

from undertow.config import SyncConfig, replaced
from undertow.ddp import arguments
from undertow.ddp.attach import checked, synchronized
from undertow.ddp.averaged import require_averaged
from undertow.ddp.join import ShadowHook, UnevenInputs
from undertow.ddp.no_reducer import NoReducer
from undertow.mesh.axes import data_mesh
from undertow.outer.outer_sync import OuterSync
from undertow.plan import Plan
from undertow.sync.gradient_sync import GradientSync
from undertow.sync.ignore import still_there
from undertow.sync.zeroing import ZeroesWithoutReading
from undertow.torch_private import private, tables

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _of_sync(
    method: Callable[Concatenate[GradientSync, _Arguments], _Result],
) -> Callable[Concatenate["DistributedDataParallel", _Arguments], _Result]:
    """Returns the wrapper's method that calls this one of `model.sync`."""

    @functools.wraps(method)
    def call(
        model: "DistributedDataParallel", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        return method(model.sync, *args, **kwargs)

    return call


class DistributedDataParallel(ZeroesWithoutReading, nn.parallel.DistributedDataParallel):
    """Wraps `module` for data-parallel training; replaces torch's class with a change of one
    import.

    The constructor is torch's. The class inherits from torch's in name only, so that trainers and
    checkpointing recognize it. The C++ reducer is never created: `reducer` is an object that only
    answers calls of frameworks. Construction is a collective call.

    Args:
        module: The model.
        device_ids: The device of the inputs, or None to leave them where they are.
        output_device: Accepted as in torch.
        dim: Accepted as in torch.
        broadcast_buffers: Deprecated in torch in favor of `forward_sync_buffers`.
        init_sync: False does not copy rank 0's parameters and buffers.
        process_group: The ranks; the default group if neither it nor `device_mesh` is given.
        bucket_cap_mb: Largest bucket in MiB; None lets the library choose.
        find_unused_parameters: Accepted: buckets carry flags of used parameters in any case.
        check_reduction: Accepted; deprecated in torch.
        gradient_as_bucket_view: Accepted: gradients are views of buckets in any case; clone those
            you keep.
        static_graph: Accepted: nothing depends on it.
        delay_all_reduce_named_params: Accepted: these parameters are sent in turn like all others.
        param_to_hook_all_reduce: Belongs to `delay_all_reduce_named_params`.
        mixed_precision: Not supported, because it is private in torch.
        device_mesh: A mesh of one dimension, such as `mesh["dp"]` of a larger one, or of two with
            `strategy="hybrid"`. Parameters may be DTensors over other dimensions.
        skip_all_reduce_unused_params: Accepted, as `find_unused_parameters`.
        bucket_cap_mb_list: Sizes of the first buckets in MiB; the last one holds for all others.
        batched_grad_copy: Accepted: gradients are copied in batches in any case.
        forward_sync_buffers: False leaves buffers alone before forwards.
        config: Undertow's settings, instead of `bucket_cap_mb` and the arguments about buffers.
        ignore: Parameters, buffers and submodules to leave alone, as names or objects.
        dp_mesh_dims: A torch.distributed.fsdp.DataParallelMeshDims that names the data-parallel
            dimensions of `device_mesh`; None if all are.

    Raises:
        ConfigError: If the module or the arguments cannot work.

    ```python
    from undertow import DistributedDataParallel as DDP
    from undertow import SyncConfig

    model = DDP(model, config=SyncConfig(wire="int8"))
    ```
    """

    require_forward_param_sync = True  # may be turned off on an instance
    broadcast_bucket_size = 250 * 1024 * 1024  # torch's helpers read it
    logger = None
    reducer = NoReducer()  # type: ignore[assignment]
    _overrides: Mapping[str, Any] = {}  # settings that precede the arguments
    _shadow: ShadowHook | None = None

    def __init__(  # noqa: PLR0913  torch's signature
        self,
        module: nn.Module,
        device_ids: arguments.Devices | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, Tensor]] | None = None,
        param_to_hook_all_reduce: Tensor | None = None,
        mixed_precision: object = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        config: SyncConfig | None = None,
        ignore: Iterable[str | nn.Module | Tensor] = (),
        dp_mesh_dims: object | None = None,
        **settings: Never,
    ) -> None:
        arguments.require_none(settings)
        ignored = checked(module, ignore, config, caller="DistributedDataParallel")
        device_indices = arguments.check_devices(module, device_ids, output_device)
        if mixed_precision is not None:
            raise arguments.private_to_torch("mixed_precision")
        chosen = arguments.settings_of(
            config,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            forward_sync=arguments.forward_sync_of(broadcast_buffers, forward_sync_buffers),
        )
        chosen = replaced(chosen, self._overrides) if self._overrides else chosen

        nn.Module.__init__(self)  # skips torch's constructor, which would create its reducer
        Joinable.__init__(self)
        self.module = module
        self.dim = dim
        self.device_mesh = device_mesh
        self.device_ids, self.output_device = device_indices
        self.device = next(
            (param.device for _, param in tables.named_parameters(module)), torch.device("cpu")
        )
        self.device_type = self.device.type
        self.forward_sync_buffers = chosen.buffers != "off"
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        has_local_buffers = broadcast_buffers is False and forward_sync_buffers is None
        shared = ("parameters",) if has_local_buffers else ("parameters", "buffers")
        self.sync = synchronized(
            module,
            process_group=process_group,
            device_mesh=data_mesh(device_mesh, dp_mesh_dims),
            config=chosen,
            ignore=ignored,
            shared=shared if init_sync else (),
        )

    @property
    def process_group(self) -> dist.ProcessGroup:  # type: ignore[override]
        """The process group over which gradients are averaged."""
        return self.sync.process_group

    @property
    def plan(self) -> Plan:
        """The parameters of each bucket, in the order of sending, in the last synchronization."""
        return self.sync.plan

    @property
    def outer(self) -> OuterSync | None:
        """The outer synchronization of `SyncConfig(outer=...)`; None without it."""
        return self.sync.outer

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that got no gradient on this rank, over the micro-batches of the
        last step."""
        return self.sync.unused_parameters

    @property
    def stop_requested(self) -> bool:
        """True from the same step on every rank, after a signal of `stop_on_signal` on any rank."""
        return self.sync.stop_requested

    @property
    def parameters_to_ignore(self) -> set[str]:  # type: ignore[override]
        """Names of the parameters and buffers that are left alone."""
        return set(self.sync.config.ignore)

    @property
    def bucket_bytes_cap(self) -> int:  # type: ignore[override]
        """Bytes of the largest bucket; torch.compile reads it."""
        return max(bucket.num_bytes for bucket in self.plan.buckets)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # torch.compile cuts graphs at the ends of buckets, so that a bucket is sent before the next
        # graph's backward.
        is_cut = self._forward_begins(is_compiled=private.is_compiling())
        if self.device_ids:
            inputs, kwargs = private.moved_to_device(
                inputs, kwargs, torch.device(self.device_type, self.device_ids[0])
            )
        try:
            module: Any = self._modules["module"]  # an attribute would be searched for
            if not is_cut:
                return _call(module, inputs, kwargs)
            with self._inside_ddp_forward():
                return _call(module, inputs, kwargs)
        except RuntimeError as error:
            self.sync._own.raise_reason(error)
            raise
        finally:
            if not torch.compiler.is_compiling():  # nothing is timed between compiled parts
                self.sync._whole.forward_ends()

    @private.untraced
    def finish(self) -> None:
        """Joins the other ranks if this rank's backward reached no parameter, or if it has no data
        at all."""
        self.sync.finish(buffers_follow=0 if self._are_buffers_due else None)

    # returns a context: backwards inside only accumulate
    accumulate = _of_sync(GradientSync.accumulate)
    no_sync = accumulate  # torch's name; the mode at the time of the backward counts
    # starts the mean of a number over ranks
    mean_over_ranks = private.untraced(_of_sync(GradientSync.mean_over_ranks))
    # sends accumulated gradients
    reduce_gradients_async = private.untraced(_of_sync(GradientSync.reduce_gradients_async))
    # waits until every gradient and parameter has its final value
    wait = private.untraced(_of_sync(GradientSync.wait))
    # returns the mean gradient of a parameter
    full_gradient = private.untraced(_of_sync(GradientSync.full_gradient))
    # copies rank 0's parameters and buffers to every rank
    broadcast_parameters = _of_sync(GradientSync.broadcast_parameters)
    # reduces buckets by `hook(state, bucket)`
    register_comm_hook = _of_sync(GradientSync.register_comm_hook)
    # reports where the time of the last steps went on this rank
    report = _of_sync(GradientSync.report)
    traces = _of_sync(GradientSync.traces)  # returns the traces of the recorded steps, oldest first
    # explains the plan, and lists the plans that were tried
    explain = _of_sync(GradientSync.explain)
    # returns the measurements of the model and the network
    profile = _of_sync(GradientSync.profile)
    # measures the network; a collective call between steps
    measure_network = _of_sync(GradientSync.measure_network)
    # writes the recorded steps of this rank for Perfetto
    save_trace = _of_sync(GradientSync.save_trace)
    save_profile = _of_sync(GradientSync.save_profile)  # writes the profile as JSON
    save_plan = _of_sync(GradientSync.save_plan)  # writes the current plan as JSON

    def close(self) -> None:
        """Removes the hooks and destroys Undertow's process group.

        `model.module` trains without averaging from then on. A training forward of the wrapper
        raises PhaseError.
        """
        self.sync.close()

    _remove_autograd_hooks = close  # torch's name

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if a backward synchronizes; evaluated when it runs."""
        return not self.sync.is_accumulating

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, is_required: bool) -> None:
        self.sync.is_accumulating = not is_required

    # The opposite, as in GradientSync: an assignment must not be one to a name that nothing reads.
    is_accumulating = property(
        lambda model: model.sync.is_accumulating,
        lambda model, value: setattr(model.sync, "is_accumulating", value),
        doc="True if a backward that runs now only accumulates; `accumulate()` sets it.",
    )

    def will_sync_module_buffers(self) -> bool:
        """Returns True if the next training forward synchronizes buffers."""
        return self._are_buffers_due and self.sync._own.has_buffers

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> UnevenInputs:
        """Lets ranks run out of data at different times: a rank that has left its loop shadows the
        others.

        At the end every rank has the model of a rank that trained longest. Run one backward for
        each forward.

        Args:
            divide_by_initial_world_size: True divides a gradient by the number of all ranks, False
                by the number of ranks that still have data.
            enable: False makes the context do nothing.
            throw_on_early_termination: True makes all ranks raise as soon as one has run out.

        Returns:
            A context manager around the loop.

        Raises:
            PhaseError: With a ShardedOptimizer, and for a model with experts.
        """
        self.sync._own.require_open("join()")
        return UnevenInputs(
            self,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(
        self,
        *,
        divide_by_initial_world_size: bool = True,
        is_enabled: bool = True,
        **_of_others: Any,
    ) -> ShadowHook:
        """Returns the hook for torch.distributed.algorithms.Join, also together with other
        participants."""
        self._shadow = ShadowHook(self.sync, divide_by_initial_world_size, is_enabled=is_enabled)
        return self._shadow

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives, for torch.distributed.algorithms.Join."""
        return self.sync._group.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group of the model, for torch.distributed.algorithms.Join."""
        return self.process_group

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(self.process_group, arguments.builtin_hook(comm_hook_type))

    def _register_buffer_comm_hook(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise arguments.private_to_torch("_register_buffer_comm_hook")

    def _update_process_group(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise arguments.private_to_torch("_update_process_group")

    def _set_static_graph(self) -> None:
        """Accepts the call; nothing in Undertow depends on it."""
        self.static_graph = True

    def _sync_buffers(self) -> None:
        """Copies rank 0's buffers to every rank.

        Subclasses that run the module without `forward` call it first.
        """
        self._sync_module_buffers(0)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        self.sync._own.synchronize_buffers(source=authoritative_rank)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        # Lightning would advise setting it, and nothing depends on it.
        return {"can_set_static_graph": False}

    @property
    def _are_buffers_due(self) -> bool:
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and self.sync._engine.progress.are_buffers_due
        )

    @private.untraced
    def _forward_begins(self, *, is_compiled: bool) -> bool:
        """Called before each forward; returns True if torch.compile is to cut graphs."""
        sync = self.sync
        is_as_made = self._modules.get("module") is sync._own.module and len(self._modules) == 1
        if not is_as_made or self._parameters or self._buffers:
            require_averaged(self, sync._own.module, rank=sync.rank)
        follows = self._are_buffers_due
        source = 0 if follows else None
        if (
            self._shadow is not None
            and self._join_config.enable
            and sync._whole.is_training_forward
        ):
            # others still wait in a round whose backward has failed here
            sync._engine.rounds.finish()
            source = self._shadow.announce_forward(self, with_buffers=follows)
        sync._whole.forward_begins(buffers_follow=source, is_compiled=is_compiled)
        return sync._whole.cut_bytes() > 0

    def __getstate__(self) -> dict[str, Any]:
        """Returns everything except this process's state.

        A copy makes new buckets and groups when it first trains.
        """
        if self.sync._has_comm_hook:
            warnings.warn(
                "the communication hook is not copied; register it on the copy again.", stacklevel=2
            )
        own = {
            name: value for name, value in self.__dict__.items() if name not in ("sync", "_shadow")
        }
        outer = None if self.outer is None else self.outer.copied_state()
        group = self.sync._all_ranks.user
        return {
            **own,
            "sync_config": self.sync.config,
            "sync_group": group,
            "sync_outer": outer,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        config, group = state.pop("sync_config"), state.pop("sync_group")
        outer = state.pop("sync_outer", None)
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        config = dataclasses.replace(config, ignore=still_there(self.module, config.ignore))
        self.sync = synchronized(self.module, process_group=group, config=config)
        if self.sync.outer is not None:
            self.sync.outer.begin_with(outer)

    def __getattr__(self, name: str) -> Any:
        # Attributes that the wrapper lacks are looked up on the module: ddp.generate(...),
        # ddp.config.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or isinstance(getattr(type(self), name, None), property):
                raise
            return getattr(self.module, name)


def _call(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the module in a separate frame.

    Torch.compile cuts no graph within a context, and starts none in torch's modules.
    """
    return module(*inputs, **kwargs)
