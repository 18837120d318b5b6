"""The bare model: compute alone, nothing is sent. It also tells when each parameter is read and its gradient is ready."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.matrix.clock import Moment, clock_of
from benchmarks.matrix.systems import Setting
from benchmarks.matrix.systems.plain import PlainSystem


class Bare(PlainSystem):
    """Times are seconds since the step began, by parameter."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.model, setting.model, collectives=0)
        indices = {param: index for index, param in enumerate(setting.model.parameters())}
        self._clock = clock_of(next(iter(indices)).device)
        self._began = self._clock.now()
        self._ready: list[Moment] = [self._began] * len(indices)
        self._used: list[Moment | None] = [None] * len(indices)
        for param, index in indices.items():
            param.register_post_accumulate_grad_hook(partial(self._arrive, index))
        for module in setting.model.modules():
            own = [indices[param] for part in (module, *_never_called(module)) for param in part.parameters(recurse=False)]
            if own:
                module.register_forward_pre_hook(partial(self._use, own))

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        self.optimizer.zero_grad()
        self._used = [None] * len(self._used)
        self._began = self._clock.now()
        loss = self.wrapped(*batch)
        after_forward = self._clock.now()
        # What is read in no module's forward is read before its end.
        self._used = [after_forward if used is None else used for used in self._used]
        loss.backward()

    @property
    def ready_s(self) -> list[float]:
        """By parameter; once the clock has settled."""
        return [self._clock.seconds(self._began, ready) for ready in self._ready]

    @property
    def used_s(self) -> list[float]:
        """As `ready_s`."""
        return [self._clock.seconds(self._began, used) for used in self._used]

    def _use(self, indices: list[int], _module: nn.Module, _args: Any) -> None:
        now = self._clock.now()
        for index in indices:
            if self._used[index] is None:
                self._used[index] = now

    def _arrive(self, index: int, _param: Tensor) -> None:
        self._ready[index] = self._clock.now()


def _never_called(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if isinstance(child, nn.ParameterList)]


def build(setting: Setting) -> Bare:
    return Bare(setting)
