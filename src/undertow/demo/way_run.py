"""Trains one copy of the model in one variant, and measures it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from undertow.demo.measure import LastGradient, StepTimes, trace_of
from undertow.demo.reference import Reference, gradients_of
from undertow.demo.settings import BUILDERS, Way
from undertow.emulation.link import Transfer
from undertow.errors import PhaseError
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.profile import Profile
from undertow.trace import Trace

__all__ = ["StepRun", "WayRun"]

# Torch's fused kernel rounds differently after the last whole vector of a piece. The sizes of this model's parameters are
# multiples of 256, so that with two ranks all pieces consist of whole vectors and the result is bit-identical to training without
# shards.
_ADAMW: dict[str, Any] = {"lr": 1e-3, "fused": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """One finished step."""

    times: StepTimes
    loss: float


class WayRun:
    """Training in one variant; creating it is a collective call."""

    def __init__(self, way: Way, model: nn.Module) -> None:
        self.way = way
        self.steps: list[StepRun] = []
        self.gradients_agree = True
        self.parameters_agree = True
        self._model = model
        self._last_gradient = LastGradient(model)
        self._synchronized = BUILDERS[way](model)
        self._sharded = sharded = self._synchronized.sharded
        self._optimizer: torch.optim.Optimizer
        if sharded is None:
            self._optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)
        else:
            self._optimizer = ShardedOptimizer(torch.optim.AdamW, sharded, **_ADAMW)

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients of the last step; a collective call."""
        if self._sharded is None:
            return gradients_of(self._model)
        whole = [self._sharded.full_gradient(param) for param in self._model.parameters()]
        return [gradient.clone() for gradient in whole if gradient is not None]

    def step(self, batch: Tensor) -> None:
        """Runs one step of this variant; nothing is in flight before or after it.

        With shards it begins with the update by the previous turn's gradients. The gathers after the update then run under this
        variant's forward, and not in the turn of another variant.
        """
        update = None if self._sharded is None else self._update(is_due=bool(self.steps))
        self._optimizer.zero_grad()
        forward_began_s = time.perf_counter()
        loss = self._synchronized.module(batch)
        forward_s = time.perf_counter()
        loss.backward()
        self._synchronized.after_backward()
        synchronized_s = time.perf_counter()
        times = StepTimes(
            forward_began_s=forward_began_s,
            forward_s=forward_s,
            last_gradient_s=self._last_gradient.arrived_s,
            synchronized_s=synchronized_s,
            update=self._update(is_due=True) if update is None else update,
        )
        self.steps.append(StepRun(times=times, loss=loss.item()))

    def finish(self, batch: Tensor) -> None:
        """Makes the update that the last turn has left out; the library's record of it is complete in the next forward."""
        if self._sharded is not None:
            self._update(is_due=True)
            self._sharded(batch)
            self._sharded.wait()

    def compare(self, reference: Reference) -> None:
        """Records whether the last step's gradients agree with the reference; a collective call."""
        self.gradients_agree = self.gradients_agree and reference.agrees_with(self.gradients)

    def compare_parameters(self, other: WayRun) -> None:
        """Records whether the parameters are bit-identical to another variant's."""
        self.parameters_agree = all(map(torch.equal, self._model.parameters(), other._model.parameters()))

    def traces(self, transfers: Sequence[Transfer], *, rank: int) -> list[Trace]:
        """Returns all steps as events; with shards the traffic comes from the library's record."""
        recorded = {} if self._sharded is None else {trace.step: trace for trace in self._sharded.traces()}
        return [
            trace_of(run.times, transfers, rank=rank, step=step, recorded=recorded.get(step))
            for step, run in enumerate(self.steps)
        ]

    def profile(self) -> Profile | None:
        """Returns the library's profile; None for other variants, and after too few steps."""
        try:
            measured = None if self._synchronized.measured is None else self._synchronized.measured.profile()
        except PhaseError:
            return None
        # The turns of all other variants lie between two steps, so the times of one step are known only here.
        update_us = median(stop_s - start_s for start_s, stop_s in (run.times.update for run in self.steps)) * 1e6
        step_us = median(run.times.step_ms for run in self.steps) * 1e3
        return None if measured is None else replace(measured, update_us=update_us, step_us=step_us)

    def close(self) -> None:
        self._synchronized.close()

    def _update(self, *, is_due: bool) -> tuple[float, float]:
        """Returns when the optimizer began and ended."""
        began_s = time.perf_counter()
        if is_due:
            self._optimizer.step()
        return began_s, time.perf_counter()
