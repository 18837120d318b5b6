"""Undertow's ShardedOptimizer: gradients are reduce-scattered under backward, parameters gathered under the next forward.

Options are those of its config.
"""

from __future__ import annotations

import torch

from benchmarks.shaped.systems import LEARNING_RATE, MOMENTUM, Setting, System
from benchmarks.shaped.systems.ours import Ours
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig


class OursSharded(Ours):
    def finish(self) -> None:
        self.wrapped.wait()


def build(setting: Setting) -> System:
    wrapped = DistributedDataParallel(setting.model, process_group=setting.group, config=SyncConfig(**setting.options))
    system = OursSharded(wrapped, setting.model)
    system.optimizer = ShardedOptimizer(torch.optim.SGD, wrapped, lr=LEARNING_RATE, momentum=MOMENTUM)
    return system
