"""torch's DistributedDataParallel; options are `bucket_cap_mb`, and the `hook` of torch's with its options."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.shaped.systems import Setting, System
from benchmarks.shaped.systems.plain import PlainSystem


def with_powersgd(wrapped: nn.parallel.DistributedDataParallel, **options: Any) -> nn.Module:
    """Registers torch's PowerSGD; `options` are arguments of its state."""
    state = powerSGD_hook.PowerSGDState(wrapped.process_group, **options)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def build(setting: Setting) -> System:
    options = dict(setting.options)
    hook = options.pop("hook", None)
    of_ddp = {"bucket_cap_mb": options.pop("bucket_cap_mb")} if "bucket_cap_mb" in options else {}
    wrapped = nn.parallel.DistributedDataParallel(setting.model, process_group=setting.group, **of_ddp)
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        with_powersgd(wrapped, **options)
    return PlainSystem(wrapped, setting.model)
