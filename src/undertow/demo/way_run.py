"""Trains one copy of the model in one variant, and measures every step in the same way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.config import SyncConfig
from undertow.ddp.wrapper import DistributedDataParallel
from undertow.demo.results import WayDone, way_done
from undertow.demo.settings import NUM_WARM_UP_STEPS, OURS, Way
from undertow.emulation.link import Transfer
from undertow.errors import PhaseError
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.profile import Profile
from undertow.trace import Event, Trace

# Torch's fused kernel rounds differently after the last whole vector of a piece. The sizes of this model's parameters are
# multiples of 256, so that with two ranks all pieces consist of whole vectors and the result is bit-identical to training without
# shards.
_ADAMW: dict[str, Any] = {"lr": 1e-3, "fused": True}

# The variants that Undertow synchronizes. With shards it records every step: the times of the other variants are complete too.
_CONFIGS: Mapping[Way, SyncConfig] = {
    Way.BUCKETED: SyncConfig(overlap=False, bucket_cap_mb=4.0, order="reverse"),
    Way.OVERLAPPED: SyncConfig(bucket_cap_mb=4.0, order="reverse"),
    Way.UNDERTOW: SyncConfig(),
    Way.ZERO1: SyncConfig(strategy="zero1", record="full"),
    Way.ZERO2: SyncConfig(strategy="zero2", record="full"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Mean gradients over ranks, one per parameter, and the tolerance for other variants."""

    gradients: Sequence[Tensor]
    tolerances: Sequence[Tensor] | None = None  # None: bit-identical

    def agrees_with(self, gradients: Sequence[Tensor]) -> bool:
        if self.tolerances is None:
            return all(map(torch.equal, self.gradients, gradients))
        rows = zip(self.gradients, gradients, self.tolerances, strict=True)
        return all(bool(((mine - theirs).abs() <= tolerance).all()) for mine, theirs, tolerance in rows)


def reference_of_first_step(model: nn.Module, batch: Tensor) -> Reference:
    """Returns the mean over ranks of the gradients of `model`, which nothing synchronizes, for this rank's `batch`."""
    num_ranks = dist.get_world_size()
    model(batch).backward()
    gradients = _gradients_of(model)
    magnitudes = [gradient.abs() for gradient in gradients]
    for tensor in (*gradients, *magnitudes):
        dist.all_reduce(tensor)
        tensor /= num_ranks
    if num_ranks <= 2:  # a + b is b + a
        return Reference(gradients=gradients)
    # A bucket is split into chunks at other places than a parameter, and the chunk determines in which order ranks are added. Any
    # order of n - 1 additions and a division is off by at most n eps mean(|g|) (Higham, "Accuracy and Stability of Numerical
    # Algorithms", 2002, 4.2), two orders by twice that.
    scale = 2 * num_ranks * torch.finfo(torch.float32).eps
    return Reference(gradients=gradients, tolerances=[scale * magnitude for magnitude in magnitudes])


def _gradients_of(model: nn.Module) -> list[Tensor]:
    """Returns copies of the gradients, because buckets reuse their storage."""
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


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

    def event(self, lane: str, kind: str, start_s: float, stop_s: float, **payload: int) -> Event:
        """Returns an event in microseconds since the forward began."""
        start_us, stop_us = ((moment_s - self.forward_began_s) * 1e6 for moment_s in (start_s, stop_s))
        return Event(lane=lane, kind=kind, start_us=start_us, stop_us=stop_us, **payload)


class WayRun:
    """Training in one variant; creating it is a collective call."""

    def __init__(self, way: Way, model: nn.Module) -> None:
        self.way = way
        self.steps: list[StepTimes] = []
        self.loss = 0.0  # of the last step
        self._model = model
        self._gradients_agree = self._parameters_agree = True
        self._gradient_s = 0.0  # when the last gradient arrived
        for param in model.parameters():  # before other hooks on the parameters, so that this one runs first
            param.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
        wrapped = DistributedDataParallel(model, config=_CONFIGS[way]) if way in _CONFIGS else None
        self._wrapped = wrapped
        self._called: nn.Module = nn.parallel.DistributedDataParallel(model) if way is Way.TORCH_DDP else wrapped or model
        self._sharded = wrapped if way in (Way.ZERO1, Way.ZERO2) else None
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(model.parameters(), **_ADAMW)
            if self._sharded is None
            else ShardedOptimizer(torch.optim.AdamW, self._sharded, **_ADAMW)
        )

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients of the last step; a collective call."""
        if self._sharded is None:
            return _gradients_of(self._model)
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
        loss = self._called(batch)
        forward_s = time.perf_counter()
        loss.backward()
        if self.way is Way.PER_PARAMETER:  # in a blocking loop, the obvious first version
            for param in self._model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
        synchronized_s = time.perf_counter()
        times = StepTimes(
            forward_began_s=forward_began_s,
            forward_s=forward_s,
            last_gradient_s=self._gradient_s,
            synchronized_s=synchronized_s,
            update=self._update(is_due=True) if update is None else update,
        )
        self.steps.append(times)
        self.loss = loss.item()

    def finish(self, batch: Tensor) -> None:
        """Makes the update that the last turn has left out; the library's record of it is complete in the next forward."""
        if self._sharded is not None:
            self._update(is_due=True)
            self._sharded(batch)
            self._sharded.wait()

    def compare(self, reference: Reference) -> None:
        """Records whether the last step's gradients agree with the reference; a collective call."""
        self._gradients_agree = self._gradients_agree and reference.agrees_with(self.gradients)

    def compare_parameters(self, other: WayRun) -> None:
        """Records whether the parameters are bit-identical to another variant's."""
        self._parameters_agree = all(map(torch.equal, self._model.parameters(), other._model.parameters()))

    def result(self, transfers: Sequence[Transfer], *, rank: int) -> WayDone:
        """Summarizes the measured steps; with shards the traffic comes from the library's record."""
        recorded = {} if self._sharded is None else {trace.step: trace for trace in self._sharded.traces()}
        traces = [
            trace_of(times, transfers, rank=rank, step=step, recorded=recorded.get(step)) for step, times in enumerate(self.steps)
        ]
        return way_done(
            self.way,
            traces[NUM_WARM_UP_STEPS:],
            loss=self.loss,
            gradients_agree=self._gradients_agree,
            parameters_agree=self._parameters_agree,
            profile=self._profile(),
        )

    def close(self) -> None:
        if self._wrapped is not None:
            self._wrapped.close()

    def _note_gradient(self, _param: Tensor) -> None:
        self._gradient_s = time.perf_counter()

    def _update(self, *, is_due: bool) -> tuple[float, float]:
        """Returns when the optimizer began and ended."""
        began_s = time.perf_counter()
        if is_due:
            self._optimizer.step()
        return began_s, time.perf_counter()

    def _profile(self) -> Profile | None:
        """Returns the library's profile; None for other variants, and after too few steps."""
        if self._wrapped is None or self.way not in OURS:
            return None
        try:
            measured = self._wrapped.profile()
        except PhaseError:
            return None
        # The turns of all other variants lie between two steps, so the times of one step are known only here.
        update_us = median(stop_s - start_s for start_s, stop_s in (times.update for times in self.steps)) * 1e6
        return replace(measured, name="demo", update_us=update_us, step_us=median(times.step_ms for times in self.steps) * 1e3)


def trace_of(times: StepTimes, transfers: Sequence[Transfer], *, rank: int, step: int, recorded: Trace | None = None) -> Trace:
    """Returns one step as events, from the start of its forward on: its phases, and the traffic of the network.

    The traffic consists of the transfers launched between forward and optimizer. If collectives consist of messages it is the
    library's `recorded` trace: only the library knows which messages belong together, and how long the forward waited for
    parameters.
    """
    phases = (
        times.event("compute", "forward", times.forward_began_s, times.forward_s),
        times.event("compute", "backward", times.forward_s, times.last_gradient_s),
        times.event("compute", "wait", times.last_gradient_s, times.synchronized_s),
        times.event("compute", "optimizer", *times.update),
    )
    carried = _collectives(times, transfers) if recorded is None else _ops_and_waits(times, transfers, recorded)
    return Trace(rank=rank, step=step, events=(*phases, *carried))


def _collectives(times: StepTimes, transfers: Sequence[Transfer]) -> Iterator[Event]:
    of_gradients = (sent for sent in transfers if times.forward_s <= sent.launched_s < times.synchronized_s)
    for index, sent in enumerate(of_gradients):
        yield times.event("comm.dp", sent.kind, sent.started_s, sent.done_s, bucket=index, num_bytes=sent.num_bytes)


def _ops_and_waits(times: StepTimes, transfers: Sequence[Transfer], recorded: Trace) -> Iterator[Event]:
    """Yields the waits of the forward, then the ops without the time they waited for another rank to send.

    A message belongs to the first op that did not end before the message arrived. Ops without a message stay unchanged.
    """
    forward_us = (times.forward_s - times.forward_began_s) * 1e6
    # The end of the forward is the moment that both clocks recorded.
    shift_us = forward_us - next(event.stop_us for event in recorded.events if event.kind == "forward")
    shifted = [replace(event, start_us=event.start_us + shift_us, stop_us=event.stop_us + shift_us) for event in recorded.events]
    yield from (event for event in shifted if event.kind == "wait" and event.stop_us <= forward_us)
    messages = [
        times.event("comm.dp", sent.kind, sent.started_s, sent.done_s)
        for sent in transfers
        if sent.kind == "send" and sent.launched_s >= times.update[0]
    ]
    ended_us = float("-inf")
    for op in (event for event in shifted if event.lane != "compute"):  # in the order in which they end
        own = [message for message in messages if ended_us < message.stop_us <= op.stop_us]
        ended_us = op.stop_us
        yield replace(op, start_us=min(it.start_us for it in own), stop_us=max(it.stop_us for it in own)) if own else op
