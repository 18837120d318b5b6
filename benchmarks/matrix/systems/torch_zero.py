"""torch's ZeroRedundancyOptimizer: torch DDP, each rank steps its share of the parameters and broadcasts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.matrix.systems import LEARNING_RATE, MOMENTUM, Setting, System, megabytes
from benchmarks.matrix.systems.plain import PlainSystem


class TorchZero(PlainSystem):
    optimizer: ZeroRedundancyOptimizer

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "state_mb": megabytes(self.optimizer.optim.state)}


def build(setting: Setting) -> System:
    wrapped = nn.parallel.DistributedDataParallel(setting.model, process_group=setting.group)
    system = TorchZero(wrapped, setting.model, version=torch.__version__)
    system.optimizer = ZeroRedundancyOptimizer(
        setting.model.parameters(),
        torch.optim.SGD,
        process_group=setting.group,
        lr=LEARNING_RATE,
        momentum=MOMENTUM,
        **setting.options,
    )
    return system
