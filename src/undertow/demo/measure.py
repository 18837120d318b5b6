"""The times of one step, measured in the same way for every variant, and the trace built from them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from undertow.emulation.link import Transfer
from undertow.trace import Event, Trace

__all__ = ["LastGradient", "StepTimes", "trace_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When the phases of a step ended; seconds of `time.perf_counter`."""

    forward_began_s: float
    forward_s: float
    last_gradient_s: float  # the last gradient of this rank arrived: from here on only the network is waited for
    synchronized_s: float
    update: tuple[float, float]  # start and end of the optimizer: after all that, or before it with the last step's gradients

    @property
    def step_ms(self) -> float:
        return (max(self.synchronized_s, self.update[1]) - min(self.forward_began_s, self.update[0])) * 1e3


class LastGradient:
    """Notes when a gradient of `model` arrives; created before other hooks on the parameters, so that it runs first."""

    def __init__(self, model: nn.Module) -> None:
        self.arrived_s = 0.0
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]

    def _arrive(self, _param: Tensor) -> None:
        self.arrived_s = time.perf_counter()


def trace_of(times: StepTimes, transfers: Sequence[Transfer], *, rank: int, step: int, recorded: Trace | None = None) -> Trace:
    """Returns one step as events, from the start of its forward on: its phases, and the traffic of the network.

    The traffic consists of the transfers launched between forward and optimizer. If collectives consist of messages it is the
    library's `recorded` trace: only the library knows which messages belong together, and how long the forward waited for
    parameters.
    """
    carried = _collectives(times, transfers) if recorded is None else _ops_and_waits(times, transfers, recorded)
    return Trace(rank=rank, step=step, events=(*_phases(times), *carried))


def _phases(times: StepTimes) -> tuple[Event, ...]:
    spans = {
        "forward": (times.forward_began_s, times.forward_s),
        "backward": (times.forward_s, times.last_gradient_s),
        "wait": (times.last_gradient_s, times.synchronized_s),
        "optimizer": times.update,
    }
    return tuple(
        Event(lane="compute", kind=kind, start_us=_us(times, start_s), stop_us=_us(times, stop_s))
        for kind, (start_s, stop_s) in spans.items()
    )


def _collectives(times: StepTimes, transfers: Sequence[Transfer]) -> tuple[Event, ...]:
    of_gradients = [sent for sent in transfers if times.forward_s <= sent.launched_s < times.synchronized_s]
    return tuple(
        Event(
            lane="comm.dp",
            kind=sent.kind,
            start_us=_us(times, sent.started_s),
            stop_us=_us(times, sent.done_s),
            bucket=index,
            num_bytes=sent.num_bytes,
        )
        for index, sent in enumerate(of_gradients)
    )


def _ops_and_waits(times: StepTimes, transfers: Sequence[Transfer], recorded: Trace) -> tuple[Event, ...]:
    forward_us = _us(times, times.forward_s)
    # The end of the forward is the moment that both clocks recorded.
    shift_us = forward_us - next(event.stop_us for event in recorded.events if event.kind == "forward")
    shifted = [replace(event, start_us=event.start_us + shift_us, stop_us=event.stop_us + shift_us) for event in recorded.events]
    waits = [event for event in shifted if event.kind == "wait" and event.stop_us <= forward_us]
    messages = [
        (_us(times, sent.started_s), _us(times, sent.done_s))
        for sent in transfers
        if sent.kind == "send" and sent.launched_s >= times.update[0]
    ]
    return (*waits, *_on_the_link([event for event in shifted if event.lane != "compute"], messages))


def _on_the_link(ops: Sequence[Event], messages: Sequence[tuple[float, float]]) -> Iterator[Event]:
    """Yields `ops`, given in the order in which they end, without the time they waited for another rank to send.

    A message belongs to the first op that did not end before the message arrived. Ops without a message stay unchanged.
    """
    ended_us = float("-inf")
    for op in ops:
        own = [(start, stop) for start, stop in messages if ended_us < stop <= op.stop_us]
        ended_us = op.stop_us
        yield replace(op, start_us=min(start for start, _ in own), stop_us=max(stop for _, stop in own)) if own else op


def _us(times: StepTimes, moment_s: float) -> float:
    """Returns microseconds since the forward began."""
    return (moment_s - times.forward_began_s) * 1e6
