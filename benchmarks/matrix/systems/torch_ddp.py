"""torch's DistributedDataParallel; options are its constructor's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.matrix.systems import Setting, System
from benchmarks.matrix.systems.plain import PlainSystem


class TorchDdp(PlainSystem):
    def facts(self) -> Mapping[str, Any]:
        sizes = str(self.wrapped._get_ddp_logging_data().get("rebuilt_bucket_sizes", ""))
        num_buckets = sum(1 for size in sizes.split(",") if size.strip())
        return {**super().facts(), "collectives": num_buckets or None, "version": torch.__version__}


def build(setting: Setting) -> System:
    wrapped = nn.parallel.DistributedDataParallel(setting.model, process_group=setting.group, **setting.options)
    return TorchDdp(wrapped, setting.model)
