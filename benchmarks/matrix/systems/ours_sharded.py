"""Undertow's ShardedOptimizer: gradients are reduce-scattered under backward, parameters gathered under the next forward.

Options are those of its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.matrix.systems import LEARNING_RATE, MOMENTUM, Setting, System, megabytes
from benchmarks.matrix.systems.ours import Ours
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig


class OursSharded(Ours):
    def finish(self) -> None:
        self.wrapped.wait()

    def facts(self) -> Mapping[str, Any]:
        pieces = [piece for state in self.optimizer.state.values() for piece in state.values()]
        return {**super().facts(), "state_mb": megabytes(pieces)}


def build(setting: Setting) -> System:
    wrapped = DistributedDataParallel(setting.model, process_group=setting.group, config=SyncConfig(**setting.options))
    system = OursSharded(wrapped, setting.model)
    system.optimizer = ShardedOptimizer(torch.optim.SGD, wrapped, lr=LEARNING_RATE, momentum=MOMENTUM)
    return system
