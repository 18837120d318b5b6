"""The arguments of torch's DistributedDataParallel: checks, with torch's wording in errors, and mixed precision."""

import dataclasses
import warnings
import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from undertow.config import SyncConfig
from undertow.errors import PhaseError, require
from undertow.runtime.model.module_params import sparse_params
from undertow.runtime.torch_private import private, tables
from undertow.runtime.torch_private.module_hook import ModuleHook

_WHERE = "DistributedDataParallel(...)"
_ONE_BYTE_MIB = 1 / 1024**2
Devices = Sequence[int | str | torch.device]


def check_devices(
    module: nn.Module, device_ids: Devices | None, output_device: int | str | torch.device | None
) -> tuple[list[int] | None, int | None]:
    """Returns the device indices of the module and of its outputs; None if inputs stay where they are."""
    is_config = isinstance(device_ids, SyncConfig)
    require(
        not isinstance(device_ids, dist.ProcessGroup) and not is_config,
        f"device_ids must not be a {'SyncConfig' if is_config else 'process group'}.",
        where="DistributedDataParallel, second argument",
        remedy=f"Write DistributedDataParallel(module, {'config=config' if is_config else 'process_group=group'}).",
    )
    require(
        device_ids is None or len(device_ids) <= 1,
        f"device_ids can only be None or contain a single element, got {list(device_ids or ())}.",
        where=_WHERE,
        remedy="Start one process per device, and move the module to its device before wrapping it.",
    )
    devices = {param.device for _, param in tables.named_parameters(module)}
    is_on_one_gpu = len(devices) == 1 and all(device.type != "cpu" for device in devices)
    require(
        is_on_one_gpu if device_ids else not output_device,  # torch accepts output_device=0 here
        "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU modules, "
        f"but got device_ids {device_ids}, output_device {output_device}, and module parameters "
        f"{sorted(map(str, devices))}.",
        where=_WHERE,
        remedy="Leave both out on CPU and for modules on several devices.",
    )
    if not device_ids:
        return None, None
    index = _device_index(device_ids[0])
    return [index], index if output_device is None else _device_index(output_device)


def _device_index(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def check_delayed(module: nn.Module, named_params: Iterable[tuple[str, Tensor]] | None, hooked: Tensor | None) -> None:
    """Checks the delayed parameters, which are reduced like all others: the result is the same, and earlier."""
    require(
        (named_params is None) == (hooked is None),
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.",
        where=_WHERE,
        remedy="Leave both out: Undertow sends every bucket as soon as it can.",
    )
    known = {id(param) for _, param in tables.named_parameters(module)}
    for name, param in named_params or ():
        require(
            id(param) in known,
            f"delay_all_reduce_named_params: {name!r} is not a parameter of the module.",
            where=_WHERE,
            remedy="Give what module.named_parameters() gives, or leave the argument out.",
        )


def forward_sync_of(broadcast_buffers: bool | None, forward_sync_buffers: bool | None, *, check_reduction: bool) -> bool:
    """Returns True if buffers are synchronized before forwards; warns of deprecated arguments, as torch does."""
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using it.",
            FutureWarning,
            stacklevel=3,
        )
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated"
            + (
                ". Use `forward_sync_buffers` instead."
                if forward_sync_buffers is None
                else " and ignored when `forward_sync_buffers` is provided."
            )
            + " Unlike `broadcast_buffers=False`, `forward_sync_buffers=False` still makes buffers equal at the start.",
            FutureWarning,
            stacklevel=3,
        )
    return broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers


def settings_of(
    config: SyncConfig | None,
    mixed_precision: object,
    *,
    bucket_cap_mb: float | None,
    bucket_cap_mb_list: Sequence[float] | None,
    forward_sync: bool,
) -> SyncConfig:
    """Returns `config`, or settings from torch's arguments; raises ConfigError if both are given.

    torch's cap of 0 gives every parameter its own bucket. With torch's mixed precision gradients are sent in its `reduce_dtype`,
    or else in its `param_dtype`, unless `config` sets `wire_dtype`.
    """
    caps: tuple[Any, ...] = tuple(_ONE_BYTE_MIB if cap == 0 else cap for cap in bucket_cap_mb_list or (bucket_cap_mb,))
    given = ["bucket_cap_mb"] * (caps != (None,)) + ["buffers"] * (not forward_sync)
    require(
        config is None or not given,
        f"settings are given twice: {', '.join(given)} by arguments of torch's, and config.",
        where=_WHERE,
        remedy=f"Put {', '.join(given)} into config=SyncConfig(...).",
    )
    chosen = config or SyncConfig(
        bucket_cap_mb=caps if bucket_cap_mb_list else caps[0], buffers="rank0" if forward_sync else "off"
    )
    wire = getattr(mixed_precision, "reduce_dtype", None) or getattr(mixed_precision, "param_dtype", None)
    is_narrow = isinstance(wire, torch.dtype) and wire.is_floating_point and wire.itemsize == 2
    return dataclasses.replace(chosen, wire_dtype=wire) if is_narrow and chosen.wire_dtype is None else chosen


@dataclasses.dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Runs a module's forward in `dtype`; None keeps the dtypes of its parameters.

    Parameters are cast when a forward begins, by an operation that autograd knows: its backward gives each gradient the dtype of
    its parameter. After the forward modules have their parameters back. A module that computes again, in a checkpoint's backward,
    would do so in another dtype, so it raises an error.
    """

    dtype: torch.dtype | None
    ignored: frozenset[str]  # names of parameters that keep their dtype
    hooks: tuple[RemovableHandle, ...]  # raise if a forward runs again in a backward

    def call(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.dtype is None:
            return module(*inputs, **kwargs)
        narrow = {
            name: param.to(self.dtype)
            for name, param in tables.named_parameters(module)
            if param.is_floating_point() and name not in self.ignored
        }
        return functional_call(module, narrow, *private.cast_floating(inputs, kwargs, self.dtype))

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


def mixed_precision_of(given: object, module: nn.Module, ignored: Collection[str]) -> MixedPrecision | None:
    """Applies the argument of torch's constructor to `module`, whose buffers are cast permanently, as torch does.

    Raises ConfigError if it is not a `_MixedPrecision`, and for layers with sparse gradients, which autograd cannot cast back.
    """
    if given is None:
        return None
    dtypes: list[Any] = [getattr(given, name, given) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")]
    require(
        all(dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point) for dtype in dtypes),
        f"mixed_precision has no dtypes: {given!r}.",
        where="DistributedDataParallel(...)",
        remedy="Pass torch's _MixedPrecision(param_dtype=torch.bfloat16), or use torch.autocast around the forward.",
    )
    dtype, _, buffer_dtype = dtypes
    sparse = set() if dtype is None else sparse_params(module)
    for name, param in tables.named_parameters(module):
        require(
            id(param) not in sparse or param.dtype == dtype or name in ignored,
            f"mixed_precision casts parameter {name!r}, whose gradient is sparse, and autograd cannot cast that back.",
            where="DistributedDataParallel(mixed_precision=...)",
            remedy="Make the embedding with sparse=False, or use torch.autocast around the forward.",
        )
    for name, buffer in tables.named_buffers(module):
        if buffer_dtype is not None and buffer.is_floating_point() and name not in ignored:
            buffer.data = buffer.to(buffer_dtype)
    hooks = [
        part.register_forward_pre_hook(ModuleHook(part, partial(_require_first_forward, weakref.ref(part))))
        for _, part in tables.named_modules(module)
        if part._parameters and dtype is not None
    ]
    return MixedPrecision(dtype, frozenset(ignored), tuple(hooks))


def _require_first_forward(called: weakref.ref[nn.Module]) -> None:
    """Raises PhaseError if the module runs again in a backward, when its parameters are not cast any more."""
    if torch.compiler.is_compiling():  # checking would cut the graph; recomputation there is narrow as well
        return
    module = called()
    is_narrow = module is None or any(type(param) is Tensor for param in module._parameters.values())
    if private.graph_task_id() != -1 and not is_narrow:
        raise PhaseError(
            f"{type(module).__name__} runs its forward again during backward, when its parameters have their own dtype again.",
            where="DistributedDataParallel(mixed_precision=...), with activation checkpoints",
            remedy="Use torch.autocast around the forward instead of mixed_precision, or leave checkpoints out.",
        )
