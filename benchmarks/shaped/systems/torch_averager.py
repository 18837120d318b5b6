"""torch's PeriodicModelAverager: ranks train alone, and average their parameters every `period` steps, in the step itself."""

from __future__ import annotations

from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from benchmarks.shaped.systems import Setting, System
from benchmarks.shaped.systems.plain import PlainSystem


class TorchAverager(PlainSystem):
    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.model, setting.model)
        self._averager = PeriodicModelAverager(process_group=setting.group, **setting.options)

    def update(self) -> None:
        super().update()
        self._averager.average_parameters(self.bare.parameters())


def build(setting: Setting) -> System:
    return TorchAverager(setting)
