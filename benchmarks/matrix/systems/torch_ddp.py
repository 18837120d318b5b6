"""torch's DistributedDataParallel; options are `bucket_cap_mb`, and the `hook` of torch's with its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.matrix.systems import Setting, System
from benchmarks.matrix.systems.plain import PlainSystem


class TorchDdp(PlainSystem):
    def facts(self) -> Mapping[str, Any]:
        sizes = str(self.wrapped._get_ddp_logging_data().get("rebuilt_bucket_sizes", ""))
        num_buckets = sum(1 for size in sizes.split(",") if size.strip())
        return {**super().facts(), "collectives": num_buckets or None, "version": torch.__version__}


def with_hook(wrapped: nn.parallel.DistributedDataParallel, hook: str, **options: Any) -> nn.Module:
    """Registers torch's hook, "bf16", "fp16" or "powersgd"; `options` are arguments of PowerSGD's state."""
    compress_hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    if hook in compress_hooks:
        wrapped.register_comm_hook(None, compress_hooks[hook])
    else:
        state = powerSGD_hook.PowerSGDState(wrapped.process_group, **options)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def build(setting: Setting) -> System:
    of_hook = dict(setting.options)
    of_ddp = {name: of_hook.pop(name) for name in ("bucket_cap_mb",) if name in of_hook}
    wrapped = nn.parallel.DistributedDataParallel(setting.model, process_group=setting.group, **of_ddp)
    if of_hook:
        with_hook(wrapped, **of_hook)
    return TorchDdp(wrapped, setting.model)
