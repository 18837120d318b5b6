"""The simplest way: after backward, one blocking all-reduce per parameter."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from benchmarks.matrix.systems import Setting, System
from benchmarks.matrix.systems.plain import PlainSystem


class PerParameter(PlainSystem):
    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.model, setting.model, collectives=sum(1 for _ in setting.model.parameters()))
        self._group = setting.group

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        super().backward(batch)
        for param in self.bare.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad, group=self._group)
                param.grad /= self._group.size()


def build(setting: Setting) -> System:
    return PerParameter(setting)
