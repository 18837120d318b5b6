"""The bare model: compute alone, nothing is sent. It also tells when each parameter is read and its gradient is ready."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.matrix.clock import Clock, Moment, clock_of
from benchmarks.matrix.systems import Setting
from benchmarks.matrix.systems.plain import PlainSystem


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Of one step, by parameter: when it is first read, and when its gradient is there."""

    clock: Clock
    began: Moment
    used: list[Moment | None]
    ready: list[Moment | None]

    @property
    def ready_s(self) -> list[float]:
        """Seconds since the step began; once the clock has settled. ValueError where a gradient never came: there is no limit."""
        if any(ready is None for ready in self.ready):
            raise ValueError(f"{self.ready.count(None)} parameters of the bare model have got no gradient")
        return [self.clock.seconds(self.began, ready) for ready in self.ready]

    @property
    def used_s(self) -> list[float]:
        """As `ready_s`."""
        return [self.clock.seconds(self.began, used) for used in self.used]


class Bare(PlainSystem):
    """Tells the arrivals of its last step."""

    arrivals: Arrivals

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.model, setting.model, collectives=0)
        indices = {param: index for index, param in enumerate(setting.model.parameters())}
        self._clock, self._num_params = clock_of(next(iter(indices)).device), len(indices)
        for param, index in indices.items():
            param.register_post_accumulate_grad_hook(partial(self._arrive, index))
        for module in setting.model.modules():
            own = [indices[param] for part in (module, *_never_called(module)) for param in part.parameters(recurse=False)]
            if own:
                module.register_forward_pre_hook(partial(self._use, own))

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        self.optimizer.zero_grad()
        began, nowhere = self._clock.now(), [None] * self._num_params
        self.arrivals = Arrivals(clock=self._clock, began=began, used=nowhere.copy(), ready=nowhere.copy())
        loss = self.wrapped(*batch)
        after_forward, used = self._clock.now(), self.arrivals.used
        # What is read in no module's forward is read before its end.
        used[:] = [after_forward if one is None else one for one in used]
        loss.backward()

    def _use(self, indices: list[int], _module: nn.Module, _args: Any) -> None:
        now, used = self._clock.now(), self.arrivals.used
        for index in indices:
            if used[index] is None:
                used[index] = now

    def _arrive(self, index: int, _param: Tensor) -> None:
        self.arrivals.ready[index] = self._clock.now()


def _never_called(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if isinstance(child, nn.ParameterList)]


def build(setting: Setting) -> Bare:
    return Bare(setting)
