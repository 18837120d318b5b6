"""The bare model: compute alone, nothing is sent. It also tells when each parameter is read and its gradient is ready."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.matrix.systems import Setting
from benchmarks.matrix.systems.plain import PlainSystem


class Bare(PlainSystem):
    """Times are seconds since the step began, by parameter."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.model, setting.model, collectives=0)
        indices = {param: index for index, param in enumerate(setting.model.parameters())}
        self.ready_s = [0.0] * len(indices)
        self.used_s: list[float | None] = [None] * len(indices)
        self._began_s = 0.0
        for param, index in indices.items():
            param.register_post_accumulate_grad_hook(partial(self._arrive, index))
        for module in setting.model.modules():
            own = [indices[param] for part in (module, *_never_called(module)) for param in part.parameters(recurse=False)]
            if own:
                module.register_forward_pre_hook(partial(self._use, own))

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        self.optimizer.zero_grad()
        self.used_s = [None] * len(self.used_s)
        self._began_s = time.perf_counter()
        loss = self.wrapped(*batch)
        forward_s = time.perf_counter() - self._began_s
        # What is read in no module's forward is read before its end.
        self.used_s = [forward_s if used is None else used for used in self.used_s]
        loss.backward()

    def _use(self, indices: list[int], _module: nn.Module, _args: Any) -> None:
        now_s = time.perf_counter() - self._began_s
        for index in indices:
            if self.used_s[index] is None:
                self.used_s[index] = now_s

    def _arrive(self, index: int, _param: Tensor) -> None:
        self.ready_s[index] = time.perf_counter() - self._began_s


def _never_called(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if isinstance(child, nn.ParameterList)]


def build(setting: Setting) -> Bare:
    return Bare(setting)
