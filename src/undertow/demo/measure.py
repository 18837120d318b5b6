"""The times of one step, taken alike for every way, and the trace they make."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from undertow.runtime.emulated_link import Transfer
from undertow.trace import Event, Trace

__all__ = ["LastGradient", "StepTimes", "trace_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When the phases of a step ended; seconds of `time.perf_counter`."""

    began_s: float
    forward_s: float
    last_gradient_s: float  # the last gradient of this rank had arrived: from here on only the network is waited for
    synchronised_s: float
    ended_s: float

    @property
    def step_ms(self) -> float:
        return (self.ended_s - self.began_s) * 1e3


class LastGradient:
    """Notes when a gradient of `model` arrives; made before anything else hooks the parameters, so as to come first."""

    def __init__(self, model: nn.Module) -> None:
        self.arrived_s = 0.0
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]

    def _arrive(self, _param: Tensor) -> None:
        self.arrived_s = time.perf_counter()


def trace_of(times: StepTimes, transfers: Sequence[Transfer], *, rank: int, step: int) -> Trace:
    """One step as events: its phases, and the collectives that were launched between forward and optimizer."""
    began_s = times.began_s

    def event(lane: str, kind: str, start_s: float, stop_s: float, *, bucket: int | None = None, num_bytes: int = 0) -> Event:
        start_us, stop_us = (start_s - began_s) * 1e6, (stop_s - began_s) * 1e6
        return Event(lane=lane, kind=kind, start_us=start_us, stop_us=stop_us, bucket=bucket, num_bytes=num_bytes)

    phases = (
        event("compute", "forward", began_s, times.forward_s),
        event("compute", "backward", times.forward_s, times.last_gradient_s),
        event("compute", "wait", times.last_gradient_s, times.synchronised_s),
        event("compute", "optimizer", times.synchronised_s, times.ended_s),
    )
    of_gradients = [sent for sent in transfers if times.forward_s <= sent.launched_s < times.synchronised_s]
    collectives = tuple(
        event("comm.dp", sent.kind, sent.started_s, sent.done_s, bucket=index, num_bytes=sent.num_bytes)
        for index, sent in enumerate(of_gradients)
    )
    return Trace(rank=rank, step=step, events=(*phases, *collectives))
