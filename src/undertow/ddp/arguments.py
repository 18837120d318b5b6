"""Checks the arguments of torch's DistributedDataParallel, with torch's wording in errors."""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from undertow.config import SyncConfig, require_settings
from undertow.errors import WrongType, require
from undertow.runtime.model.ignore import names_to_ignore

_WHERE = "DistributedDataParallel(...)"
_ONE_BYTE_MIB = 1 / 1024**2
Devices = Sequence[int | str | torch.device]


def checked(
    module: nn.Module, ignore: Iterable[str | nn.Module | Tensor], config: SyncConfig | None, *, caller: str
) -> tuple[str, ...]:
    """Returns the names that the argument, the settings and torch's helper exclude from synchronization.

    Warns if no other parameter requires a gradient. Raises WrongType or ConfigError, which names `caller`, if `module` cannot be
    synchronized or `config` is not a SyncConfig.
    """
    require(
        isinstance(module, nn.Module),
        f"module must be a torch.nn.Module, got {type(module).__name__}.",
        where=f"{caller}, first argument",
        remedy="Pass the model itself.",
        error=WrongType,
    )
    require(
        type(module) is not TorchDistributedDataParallel,
        "this module is wrapped already, by torch's own DistributedDataParallel.",
        where=f"{caller}(torch.nn.parallel.DistributedDataParallel(...))",
        remedy="Give the bare module.",
    )
    require_settings(config)
    ignored = [*names_to_ignore(module, ignore), *names_to_ignore(module, () if config is None else config.ignore)]
    if caller == "DistributedDataParallel":  # what _set_params_and_buffers_to_ignore_for_model has set
        known = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        ignored += known.intersection(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    params = {name: param for name, param in module.named_parameters() if name not in ignored}
    _check_parameters(module, params, caller)
    if not any(param.requires_grad for param in params.values()):
        warnings.warn(
            f"{type(module).__name__} has no parameter that requires a gradient: nothing is averaged until it has one.\n"
            f"  {caller}(...)\n"
            "  Look at requires_grad, and at what `ignore` names. If parameters are unfrozen later, filter this warning.",
            stacklevel=3,
        )
    return tuple(ignored)


def _check_parameters(module: nn.Module, params: dict[str, nn.Parameter], caller: str) -> None:
    for name, param in params.items():
        require(
            not isinstance(param, nn.parameter.UninitializedParameter),
            f"Modules with uninitialized parameters can't be used with `{caller}`.",
            where=f"parameter {name!r} has no shape yet",
            remedy="Run a dummy forward pass to correctly initialize the modules.",
        )
        require(
            type(param.data).__name__ != "DTensor",
            f"parameter {name!r} is sharded already, by torch's fully_shard or by tensor parallelism.",
            where=f"{caller}(...)",
            remedy="Leave fully_shard out, or use it alone; with tensor parallelism it goes on the data-parallel dimension.",
        )
    types = sorted({param.device.type for param in params.values()})
    require(
        len(types) <= 1,
        f"{caller}'s input module must be on the same type of devices, but input module parameters locate in {types}.",
        where=f"{caller}(...)",
        remedy="Move the whole module with module.to(device) before.",
    )
    require(
        types != ["cpu"] or not any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()),
        "SyncBatchNorm layers only work with GPU modules.",
        where=f"{caller}(...)",
        remedy="Keep the BatchNorm layers on CPU: their running statistics follow rank 0.",
    )


def check_devices(
    module: nn.Module, device_ids: Devices | None, output_device: int | str | torch.device | None
) -> tuple[list[int] | None, int | None]:
    """Returns the device indices of the module and of its outputs; None if inputs stay where they are."""
    require(
        not isinstance(device_ids, dist.ProcessGroup),
        "a process group stands where device_ids belongs.",
        where="DistributedDataParallel, second argument",
        remedy="Write DistributedDataParallel(module, process_group=group).",
    )
    require(
        device_ids is None or len(device_ids) <= 1,
        f"device_ids can only be None or contain a single element, got {list(device_ids or ())}.",
        where=_WHERE,
        remedy="Start one process per device, and move the module to its device before wrapping it.",
    )
    devices = {param.device for param in module.parameters()}
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
    known = set(map(id, module.parameters()))
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
        is_ignored = forward_sync_buffers is not None
        warnings.warn(
            "`broadcast_buffers` is deprecated"
            + (" and ignored when `forward_sync_buffers` is provided." if is_ignored else ". Use `forward_sync_buffers` instead.")
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
