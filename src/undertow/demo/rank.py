"""Runs one rank of the demo: trains the same model in several variants, one step of each in turn."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from undertow.demo.model import Gpt, GptShape
from undertow.demo.results import Message, ModelBuilt, RankFailed, StepDone
from undertow.demo.settings import NUM_WARM_UP_STEPS, REFERENCE, DemoSettings
from undertow.demo.way_run import Reference, WayRun, reference_of_first_step
from undertow.emulation.link import BACKEND, EmulatedLink, emulated_backend

_SHAPE = GptShape()


def run_rank(rank: int, settings: DemoSettings, corpus: Path, meeting_point: Path, connection: Connection) -> None:
    """Entry point of a rank's process; sends messages and ends, with exit code 1 after a failure."""
    # Ctrl-C reaches the whole group of processes; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(1)  # every rank represents a separate machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        text = torch.frombuffer(bytearray(corpus.read_bytes()), dtype=torch.uint8)
        with emulated_backend(settings.emulated_link) as link:
            store = FileStore(str(meeting_point), settings.num_ranks)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=settings.num_ranks)
            _train_all_ways(rank, settings, text, link, connection.send)
            dist.barrier()
            dist.destroy_process_group()
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


def _train_all_ways(rank: int, settings: DemoSettings, text: Tensor, link: EmulatedLink, send: Callable[[Message], None]) -> None:
    """Trains one copy of the model per variant, with the same initial weights and the same data.

    It alternates between variants step by step: if the speed of the machine changes (another program, heat), it changes equally
    for all.
    """
    model, first_batch = _new_model(settings), next(_batches(rank, settings, text))
    first_reference = reference_of_first_step(model, first_batch)
    runs = [WayRun(way, _new_model(settings)) for way in settings.ways]
    if rank == 0:
        num_parameters = sum(param.numel() for param in model.parameters())
        send(ModelBuilt(num_parameters=num_parameters, gradient_bytes=4 * num_parameters))
    link.take_log()
    for step, batch in zip(range(NUM_WARM_UP_STEPS + settings.num_steps), _batches(rank, settings, text), strict=False):
        for run in runs:
            run.step(batch)
            if step == 0:
                run.compare(first_reference)
            if rank == 0:
                send(StepDone(way=run.way, step=step, step_ms=run.steps[-1].step_ms, loss=run.loss))
    dist.barrier()  # by now every collective of the steps is in the log
    transfers = link.take_log()
    right = next(run for run in runs if run.way is REFERENCE)
    last_reference = Reference(gradients=right.gradients)
    for run in runs:
        if settings.is_exact:  # with more ranks rounding makes the weights drift apart, and only losses can be compared
            run.compare(last_reference)
        run.finish(first_batch)
        if settings.is_exact:
            run.compare_parameters(right)
        send(run.result(transfers, rank=rank))
    for run in runs:
        run.close()


def _new_model(settings: DemoSettings) -> Gpt:
    torch.manual_seed(settings.seed)
    return Gpt(_SHAPE)


def _batches(rank: int, settings: DemoSettings, text: Tensor) -> Iterator[Tensor]:
    """Yields this rank's batches, the same for every variant: pieces of the text, [bytes] uint8, from random positions."""
    random = np.random.default_rng([settings.seed, rank])
    length = _SHAPE.context + 1
    while True:
        starts = random.integers(0, text.numel() - length, size=_SHAPE.batch)
        yield torch.stack([text[start : start + length] for start in starts]).long()
