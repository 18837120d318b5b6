"""torch's ZeroRedundancyOptimizer: torch DDP, each rank steps its share of the parameters and broadcasts it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.shaped.systems import LEARNING_RATE, MOMENTUM, Setting, System
from benchmarks.shaped.systems.plain import PlainSystem


def build(setting: Setting) -> System:
    wrapped = nn.parallel.DistributedDataParallel(setting.model, process_group=setting.group)
    system = PlainSystem(wrapped, setting.model)
    system.optimizer = ZeroRedundancyOptimizer(
        setting.model.parameters(),
        torch.optim.SGD,
        process_group=setting.group,
        lr=LEARNING_RATE,
        momentum=MOMENTUM,
    )
    return system
