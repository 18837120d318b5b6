"""Runs one rank of the demo: trains the same model in several variants, one step of each in turn."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from undertow.demo.model import Gpt, GptShape
from undertow.demo.reference import Reference, reference_of_first_step
from undertow.demo.results import Message, ModelBuilt, RankFailed, StepDone, WayDone, way_done
from undertow.demo.settings import NUM_WARM_UP_STEPS, REFERENCE, DemoSettings
from undertow.demo.way_run import WayRun
from undertow.emulation.link import BACKEND, EmulatedLink, Transfer, emulated_backend

__all__ = ["run_rank"]


def run_rank(rank: int, settings: DemoSettings, corpus: Path, meeting_point: Path, connection: Connection) -> None:
    """Entry point of a rank's process; sends messages and ends, with exit code 1 after a failure."""
    # Ctrl-C reaches the whole group of processes; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _meet_and_train(rank, settings, corpus, meeting_point, connection.send)
    except BaseException:
        connection.send(RankFailed(rank=rank, failed_s=time.perf_counter(), traceback=traceback.format_exc()))
        connection.close()
        # Immediately: destructors of groups with a collective in flight would wait for ranks that may be gone.
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _meet_and_train(
    rank: int, settings: DemoSettings, corpus: Path, meeting_point: Path, send: Callable[[Message], None]
) -> None:
    torch.set_num_threads(1)  # every rank represents a separate machine
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with emulated_backend(settings.emulated_link) as link:
        store = FileStore(str(meeting_point), settings.num_ranks)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=settings.num_ranks)
        text = torch.frombuffer(bytearray(corpus.read_bytes()), dtype=torch.uint8)
        _Trainer(rank, settings, text, link, send).train_all_ways()
        dist.barrier()
        dist.destroy_process_group()


class _Trainer:
    """Trains one copy of the model per variant, with the same initial weights and the same data.

    It alternates between variants step by step: if the speed of the machine changes (another program, heat), it changes equally
    for all.
    """

    def __init__(
        self, rank: int, settings: DemoSettings, text: Tensor, link: EmulatedLink, send: Callable[[Message], None]
    ) -> None:
        self._rank = rank
        self._settings = settings
        self._text = text  # [bytes] uint8
        self._link = link
        self._send = send
        self._shape = GptShape()

    def train_all_ways(self) -> None:
        model = self._new_model()
        num_parameters = sum(param.numel() for param in model.parameters())
        first_reference = reference_of_first_step(model, next(self._batches()))
        runs = [WayRun(way, self._new_model()) for way in self._settings.ways]
        if self._rank == 0:
            self._send(ModelBuilt(num_parameters=num_parameters, gradient_bytes=4 * num_parameters))
        self._link.take_log()
        self._train(runs, first_reference)
        dist.barrier()  # by now every collective of the steps is in the log
        self._conclude(runs, self._link.take_log())
        for run in runs:
            run.close()

    def _train(self, runs: Sequence[WayRun], first_reference: Reference) -> None:
        num_steps = NUM_WARM_UP_STEPS + self._settings.num_steps
        for index, batch in zip(range(num_steps), self._batches(), strict=False):
            for run in runs:
                run.step(batch)
                if index == 0:
                    run.compare(first_reference)
                if self._rank == 0:
                    done = run.steps[-1]
                    self._send(StepDone(way=run.way, step=index, step_ms=done.times.step_ms, loss=done.loss))

    def _conclude(self, runs: Sequence[WayRun], transfers: Sequence[Transfer]) -> None:
        right = next(run for run in runs if run.way is REFERENCE)
        last_reference = Reference(gradients=right.gradients, tolerances=None)
        for run in runs:
            if self._settings.is_exact:  # with more ranks rounding makes the weights drift apart, and only losses can be compared
                run.compare(last_reference)
            run.finish(next(self._batches()))
            if self._settings.is_exact:
                run.compare_parameters(right)
            self._send(self._result(run, transfers))

    def _result(self, run: WayRun, transfers: Sequence[Transfer]) -> WayDone:
        done = way_done(
            run.way,
            run.traces(transfers, rank=self._rank)[NUM_WARM_UP_STEPS:],
            loss=run.steps[-1].loss,
            gradients_agree=run.gradients_agree,
            parameters_agree=run.parameters_agree,
        )
        profile = run.profile()
        return done if profile is None else replace(done, profile=replace(profile, name="demo"))

    def _new_model(self) -> Gpt:
        torch.manual_seed(self._settings.seed)
        return Gpt(self._shape)

    def _batches(self) -> Iterator[Tensor]:
        """Yields this rank's batches, the same for every variant: pieces of the text from random positions."""
        random = np.random.default_rng([self._settings.seed, self._rank])
        length = self._shape.context + 1
        while True:
            starts = random.integers(0, self._text.numel() - length, size=self._shape.batch)
            yield torch.stack([self._text[start : start + length] for start in starts]).long()
