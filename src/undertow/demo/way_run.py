"""One copy of the model, trained in one way, and what was measured."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from undertow.demo.measure import LastGradient, StepTimes
from undertow.demo.reference import Reference, gradients_of
from undertow.demo.settings import Way
from undertow.demo.ways import BUILDERS

__all__ = ["StepRun", "WayRun"]

_LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """A step that was run."""

    times: StepTimes
    loss: float


class WayRun:
    """Training in one way; making one is a collective call."""

    def __init__(self, way: Way, model: nn.Module) -> None:
        self.way = way
        self.steps: list[StepRun] = []
        self.agrees = True
        self._model = model
        self._last_gradient = LastGradient(model)
        self._synchronised = BUILDERS[way](model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)

    @property
    def gradients(self) -> list[Tensor]:
        """Those of the last step."""
        return gradients_of(self._model)

    def step(self, batch: Tensor) -> None:
        self._optimizer.zero_grad()
        began_s = time.perf_counter()
        loss = self._synchronised.module(batch)
        forward_s = time.perf_counter()
        loss.backward()
        self._synchronised.after_backward()
        synchronised_s = time.perf_counter()
        self._optimizer.step()
        times = StepTimes(
            began_s=began_s,
            forward_s=forward_s,
            last_gradient_s=self._last_gradient.arrived_s,
            synchronised_s=synchronised_s,
            ended_s=time.perf_counter(),
        )
        self.steps.append(StepRun(times=times, loss=loss.item()))

    def compare(self, reference: Reference) -> None:
        """Notes whether the last step's gradients are the reference's."""
        self.agrees = self.agrees and reference.agrees_with(self.gradients)

    def close(self) -> None:
        self._synchronised.close()
