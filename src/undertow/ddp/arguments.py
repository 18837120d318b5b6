"""The arguments of torch's DistributedDataParallel: checks, with torch's wording in errors."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from undertow.config import SyncConfig
from undertow.errors import ConfigError, require
from undertow.torch_private import tables

_WHERE = "DistributedDataParallel(...)"
_ONE_BYTE_MIB = 1 / 1024**2
# Arguments and methods that are private in torch, each with another way.
_PRIVATE = {
    "mixed_precision": "Use torch.autocast around the forward; SyncConfig(wire=...) sends "
    "gradients in 16 bits.",
    "_register_buffer_comm_hook": 'Set SyncConfig(buffers="off"), and change buffers in a hook of '
    "the module.",
    "_update_process_group": "Wrap the module again, with the other group: the newest wrapper "
    "closes the older one.",
}
Devices = Sequence[int | str | torch.device]


def require_none(settings: Iterable[str]) -> None:
    """Raises ConfigError for settings that are given as arguments, and for unknown arguments."""
    name = next(iter(settings), None)
    require(
        name is None,
        f"DistributedDataParallel has no argument {name!r}.",
        where=_WHERE,
        remedy="Write settings of Undertow as config=SyncConfig(...). The other arguments have "
        "torch's names.",
    )


def check_devices(
    module: nn.Module, device_ids: Devices | None, output_device: int | str | torch.device | None
) -> tuple[list[int] | None, int | None]:
    """Returns the device indices of the module and of its outputs.

    None if inputs stay where they are.
    """
    is_config = isinstance(device_ids, SyncConfig)
    require(
        not isinstance(device_ids, dist.ProcessGroup) and not is_config,
        f"device_ids must not be a {'SyncConfig' if is_config else 'process group'}.",
        where="DistributedDataParallel, second argument",
        remedy="Write DistributedDataParallel(module, "
        f"{'config=config' if is_config else 'process_group=group'}).",
    )
    require(
        device_ids is None or len(device_ids) <= 1,
        f"device_ids can only be None or contain a single element, got {list(device_ids or ())}.",
        where=_WHERE,
        remedy="Start one process per device, and move the module to its device before wrapping "
        "it.",
    )
    devices = {param.device for _, param in tables.named_parameters(module)}
    is_on_one_gpu = len(devices) == 1 and all(device.type != "cpu" for device in devices)
    require(
        is_on_one_gpu if device_ids else not output_device,  # torch accepts output_device=0 here
        "DistributedDataParallel device_ids and output_device arguments only work with "
        f"single-device GPU modules, but got device_ids {device_ids}, output_device "
        f"{output_device}, and module parameters {sorted(map(str, devices))}.",
        where=_WHERE,
        remedy="Move the module to its GPU first: module.cuda(local_rank). On CPU, and for modules "
        "on several devices, leave both out.",
    )
    if not device_ids:
        return None, None
    index = _device_index(device_ids[0])
    return [index], index if output_device is None else _device_index(output_device)


def _device_index(device: int | str | torch.device) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def forward_sync_of(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Returns True if buffers are synchronized before forwards.

    Warns of the deprecated argument, as torch does.
    """
    if broadcast_buffers is None:
        return forward_sync_buffers is not False
    is_replaced = forward_sync_buffers is not None
    advice = (
        (" and ignored when `forward_sync_buffers` is provided.")
        if is_replaced
        else ". Use `forward_sync_buffers` instead."
    )
    warnings.warn(
        f"`broadcast_buffers` is deprecated{advice}"
        " Unlike `broadcast_buffers=False`, `forward_sync_buffers=False` still makes buffers "
        "equal at the start.",
        FutureWarning,
        stacklevel=3,
    )
    return bool(forward_sync_buffers) if is_replaced else broadcast_buffers


def settings_of(
    config: SyncConfig | None,
    *,
    bucket_cap_mb: float | None,
    bucket_cap_mb_list: Sequence[float] | None,
    forward_sync: bool,
) -> SyncConfig:
    """Returns `config`, or settings from torch's arguments; raises ConfigError if both are given.

    torch's cap of 0 gives every parameter its own bucket.
    """
    sizes: Sequence[float | None] = bucket_cap_mb_list or [bucket_cap_mb]
    caps = tuple(_ONE_BYTE_MIB if cap == 0 else cap for cap in sizes)
    given: dict[str, Any] = {}
    if caps != (None,):
        given["bucket_cap_mb"] = caps if bucket_cap_mb_list else caps[0]
    if not forward_sync:
        given["buffers"] = "off"
    require(
        config is None or not given,
        f"settings are given twice: {', '.join(given)} by arguments of torch's, and config.",
        where=_WHERE,
        remedy=f"Put {', '.join(given)} into config=SyncConfig(...).",
    )
    return config or SyncConfig(**given)


def builtin_hook(comm_hook_type: Any) -> Any:
    """Returns the function of one of torch's built-in communication hooks."""
    # loads all of torch's optimizers
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {
        "ALLREDUCE": default_hooks.allreduce_hook,
        "FP16_COMPRESS": default_hooks.fp16_compress_hook,
    }
    return hooks[comm_hook_type.name]


def private_to_torch(name: str) -> ConfigError:
    """Returns the error of an argument or a method that is private in torch."""
    return ConfigError(
        f"{name} is private in torch, and not supported.", where=_WHERE, remedy=_PRIVATE[name]
    )
