"""What one rank of the demo does: train the same model five times."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from undertow.demo.measure import LastGradient, StepTimes, trace_of
from undertow.demo.model import Gpt, GptShape
from undertow.demo.reference import Reference, gradients_of, reference_of_first_step
from undertow.demo.results import Message, ModelBuilt, RankFailed, StepDone, WayDone
from undertow.demo.settings import NUM_WARM_UP_STEPS, REFERENCE, DemoSettings, Way
from undertow.demo.ways import BUILDERS, Synchronised
from undertow.runtime.emulated_link import BACKEND, EmulatedLink, emulated_backend

__all__ = ["run_rank"]

_LEARNING_RATE = 1e-3


def run_rank(rank: int, settings: DemoSettings, corpus: Path, meeting_point: Path, connection: Connection) -> None:
    """Entry point of a rank's process; sends messages and ends, with exit code 1 after a failure."""
    # Ctrl-C reaches the whole group of processes; the parent ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _meet_and_train(rank, settings, corpus, meeting_point, connection.send)
    except BaseException:
        connection.send(RankFailed(rank=rank, failed_s=time.perf_counter(), traceback=traceback.format_exc()))
        connection.close()
        # At once: destructors of groups with a collective in flight would wait for ranks that may be gone.
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _meet_and_train(
    rank: int, settings: DemoSettings, corpus: Path, meeting_point: Path, send: Callable[[Message], None]
) -> None:
    torch.set_num_threads(1)  # every rank stands for a machine of its own
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with emulated_backend(settings.emulated_link) as link:
        store = FileStore(str(meeting_point), settings.num_ranks)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=settings.num_ranks)
        text = torch.frombuffer(bytearray(corpus.read_bytes()), dtype=torch.uint8)
        _Trainer(rank, settings, text, link, send).train_all_ways()
        dist.barrier()
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    times: StepTimes
    loss: float


class _Trainer:
    """Trains the model once per way: same weights at the start, same data."""

    def __init__(
        self, rank: int, settings: DemoSettings, text: Tensor, link: EmulatedLink, send: Callable[[Message], None]
    ) -> None:
        self._rank = rank
        self._settings = settings
        self._text = text  # [bytes] uint8
        self._link = link
        self._send = send
        self._shape = GptShape()
        self._last_reference: Reference | None = None

    def train_all_ways(self) -> None:
        model = self._new_model()
        num_parameters = sum(param.numel() for param in model.parameters())
        first_reference = reference_of_first_step(model, next(self._batches()))
        if self._rank == 0:
            self._send(ModelBuilt(num_parameters=num_parameters, gradient_bytes=4 * num_parameters))
        for way in Way:
            self._send(self._train(way, first_reference))
            gc.collect()  # torch's wrapper is a cycle; nobody's gradients should stay around

    def _train(self, way: Way, first_reference: Reference) -> WayDone:
        model = self._new_model()
        last_gradient = LastGradient(model)
        synchronised = BUILDERS[way](model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
        self._link.take_log()
        dist.barrier()
        steps: list[_Step] = []
        agree = True
        num_steps = NUM_WARM_UP_STEPS + self._settings.num_steps
        for index, batch in zip(range(num_steps), self._batches(), strict=False):
            steps.append(_run_step(synchronised, optimizer, last_gradient, batch))
            if index == 0:
                agree &= first_reference.agrees_with(gradients_of(model))
            if self._rank == 0:
                self._send(StepDone(way=way, step=index, step_ms=steps[-1].times.step_ms, loss=steps[-1].loss))
        agree &= self._agrees_at_the_end(way, gradients_of(model))
        dist.barrier()  # by now every collective of the steps is in the log
        synchronised.close()
        return self._result(way, steps, gradients_agree=agree)

    def _agrees_at_the_end(self, way: Way, gradients: list[Tensor]) -> bool:
        """With more than two ranks the weights have drifted apart by rounding, and only losses can be compared."""
        if way is REFERENCE:
            self._last_reference = Reference(gradients=gradients, tolerances=None)
        if self._last_reference is None or self._settings.num_ranks > 2:
            return True
        return self._last_reference.agrees_with(gradients)

    def _result(self, way: Way, steps: list[_Step], *, gradients_agree: bool) -> WayDone:
        transfers = self._link.take_log()
        measured = range(NUM_WARM_UP_STEPS, len(steps))
        by_time = sorted(measured, key=lambda index: steps[index].times.step_ms)
        middle = by_time[(len(by_time) - 1) // 2]
        return WayDone(
            way=way,
            rank=self._rank,
            step_ms=steps[middle].times.step_ms,
            trace=trace_of(steps[middle].times, transfers, rank=self._rank, step=middle),
            loss=steps[-1].loss,
            gradients_agree=gradients_agree,
        )

    def _new_model(self) -> Gpt:
        torch.manual_seed(self._settings.seed)
        return Gpt(self._shape)

    def _batches(self) -> Iterator[Tensor]:
        """This rank's batches, the same for every way: pieces of the text from random places."""
        random = np.random.default_rng([self._settings.seed, self._rank])
        length = self._shape.context + 1
        while True:
            starts = random.integers(0, self._text.numel() - length, size=self._shape.batch)
            yield torch.stack([self._text[start : start + length] for start in starts]).long()


def _run_step(synchronised: Synchronised, optimizer: torch.optim.Optimizer, last_gradient: LastGradient, batch: Tensor) -> _Step:
    optimizer.zero_grad()
    began_s = time.perf_counter()
    loss = synchronised.module(batch)
    forward_s = time.perf_counter()
    loss.backward()
    synchronised.after_backward()
    synchronised_s = time.perf_counter()
    optimizer.step()
    times = StepTimes(
        began_s=began_s,
        forward_s=forward_s,
        last_gradient_s=last_gradient.arrived_s,
        synchronised_s=synchronised_s,
        ended_s=time.perf_counter(),
    )
    return _Step(times=times, loss=loss.item())
