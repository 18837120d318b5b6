"""Runs one rank of the demo.

Trains the same model in several variants, one step of each in turn, and measures all in the same
way.
"""

import contextlib
import copy
import math
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import mean, median, median_high
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from torch import Tensor, nn

from undertow.config import Outer, SyncConfig
from undertow.ddp.wrapper import DistributedDataParallel
from undertow.errors import PhaseError
from undertow.lab.cost import collective_seconds, link_from_text
from undertow.lab.demo.model import CONTEXT, Gpt
from undertow.lab.demo.settings import (
    INT8,
    NUM_WARM_UP_STEPS,
    OURS,
    OUTER,
    RESULTS,
    TORCH_DDP,
    WAYS,
    DemoSettings,
    WayDone,
    load_corpus,
)
from undertow.lab.emulation.link import BACKEND, Carried, EmulatedLink, emulated_backend
from undertow.lab.profile import Profile
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.outer.outer_sync import OuterSync
from undertow.schedule import STRATEGIES
from undertow.trace import Event, Overlap, Trace, overlap_of

_BATCH = 4  # sequences per rank and step

# Torch's fused kernel rounds differently after the last whole vector of a piece. The sizes of this
# model's parameters are multiples of 128, so that with two ranks all pieces consist of whole
# vectors and the result is bit-identical to training without shards.
_ADAMW: dict[str, Any] = {"lr": 1e-3, "fused": True}

# The variants that Undertow synchronizes.
_CONFIGS: Mapping[str, SyncConfig] = {
    "bucketed": SyncConfig(overlap=False, bucket_cap_mb=1.0, order="reverse"),
    "undertow": SyncConfig(),
    INT8: SyncConfig(wire="int8"),
    "zero1": SyncConfig(strategy="zero1", record="full"),
    "zero2": SyncConfig(strategy="zero2", record="full"),
}

# With three or more ranks variants add in different orders. Sums then differ by a few units of the
# last place, and in AdamW's first steps a differing last bit of a gradient that is nearly zero
# changes the update by a whole learning rate.
_GRADIENT_TOLERANCE = 1e-5  # of a parameter's largest element
_LOSS_TOLERANCE = 1e-2
# In int8 an element is off by 1/254 of the largest one of its block, for each rank that adds it and
# once more for the mean. The largest element on one rank may be several times the mean's.
_INT8_TOLERANCE = 0.05


def run_rank(rank: int, settings: DemoSettings, folder: str) -> None:
    """Trains; rank 0 shows the progress and leaves the results in the folder."""
    torch.set_num_threads(1)  # every rank represents a separate machine
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with emulated_backend(link_from_text(settings.link)) as link:
        dist.init_process_group(
            BACKEND,
            init_method=f"file://{folder}/meeting-point",
            rank=rank,
            world_size=settings.num_ranks,
        )
        results = _train_all_ways(settings, link, Console(quiet=rank > 0))
        if rank == 0:
            Path(folder, RESULTS).write_bytes(pickle.dumps(results))
        dist.barrier()
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, which can no longer end it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _train_all_ways(settings: DemoSettings, link: EmulatedLink, console: Console) -> list[WayDone]:
    """Trains one copy of the model per variant, with the same initial weights and the same data.

    It alternates between variants step by step: if the speed of the machine changes (another
    program, heat), it changes equally for all. A bar per variant moves on a terminal and is
    printed once at the end elsewhere.
    """
    torch.manual_seed(0)
    model = Gpt()
    num_bytes = 4 * sum(param.numel() for param in model.parameters())
    wire_s = collective_seconds(
        link.link, "all_reduce", num_bytes=num_bytes, num_ranks=settings.num_ranks
    )
    on_the_wire = f", {wire_s * 1e3:.0f} ms of wire time per step" if wire_s else ""
    console.print(
        f"GPT with {num_bytes / 4e6:.1f} M parameters, {num_bytes / 1e6:.1f} MB of "
        f"gradients{on_the_wire}.\n"
    )
    runs = [WayRun(way, copy.deepcopy(model), settings) for way in settings.ways]
    batches = _batches(settings)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=14),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console) as progress:
        for run in runs:
            progress.add_task(WAYS[run.way], total=len(batches), figures="")
        for batch in batches:
            for run, bar in zip(runs, progress.task_ids, strict=True):
                if run.outer is None:
                    run.step(batch)
                    progress.update(bar, advance=1, figures=run.figures())
        for run, bar in zip(runs, progress.task_ids, strict=True):
            _train_alone(run, batches, progress, bar)
    dist.barrier()  # by now every collective of the steps is in the log
    transfers = link.drain_log()
    for run in runs:
        run.finish(batches[0])
    return [run.result(transfers, runs[0]) for run in runs]


def _train_alone(run: "WayRun", batches: Tensor, progress: Progress, bar: TaskID) -> None:
    """Runs the steps of a variant that takes no turns: its exchanges would be hidden during the
    steps of others, and the others would wait for the link."""
    while len(run.steps) < run.num_steps:
        run.step(batches[len(run.steps) % len(batches)])
        total = max(len(batches), run.num_steps)
        progress.update(bar, completed=len(run.steps), total=total, figures=run.figures())


def _batches(settings: DemoSettings) -> Tensor:
    """Returns this rank's batches, [step, sequence, byte], the same for all variants.

    From random places of the text.
    """
    text = torch.frombuffer(bytearray(load_corpus()), dtype=torch.uint8)
    pieces = text.unfold(0, CONTEXT + 1, 1)  # [position, byte], a view
    random = np.random.default_rng(dist.get_rank())
    num_steps = NUM_WARM_UP_STEPS + settings.num_steps
    return pieces[torch.from_numpy(random.integers(len(pieces), size=(num_steps, _BATCH)))].long()


class WayRun:
    """Training in one variant; creating it is a collective call."""

    def __init__(self, way: str, model: nn.Module, settings: DemoSettings) -> None:
        self.way = way
        self.model = model
        self._settings = settings
        self.steps: list[Trace] = []  # their phases, in microseconds of the clock
        self.loss = 0.0  # of the last step that all variants have
        # Of the first step. Later, with more ranks, rounding makes the weights drift apart, and
        # only losses can be compared.
        self._first_gradients: list[Tensor] = []
        self._last_gradient_us = 0.0
        # before other hooks on the parameters, so that this one runs first
        for param in model.parameters():
            hook = self._note_gradient
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        config = _CONFIGS.get(way)
        if way == OUTER and settings.outer is not None:
            config = SyncConfig(outer=Outer(every=settings.outer))
        self._wrapped = None if config is None else DistributedDataParallel(model, config=config)
        self._called: nn.Module = self._wrapped or model
        if way == TORCH_DDP:
            self._called = nn.parallel.DistributedDataParallel(model)
        self._sharded = self._wrapped if way in STRATEGIES else None
        self._optimizer: torch.optim.Optimizer
        if self._sharded is None:
            self._optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)
        else:
            self._optimizer = ShardedOptimizer(torch.optim.AdamW, self._sharded, **_ADAMW)

    @property
    def outer(self) -> OuterSync | None:
        return self._wrapped.outer if self.way == OUTER and self._wrapped is not None else None

    @property
    def num_steps(self) -> int:
        """The steps to run; with outer synchronization the first exchanges are warm-up too."""
        delay = 0 if self.outer is None else self.outer.report().delay
        return NUM_WARM_UP_STEPS + delay + self._settings.num_measured(self.way)

    @property
    def measured(self) -> list[Trace]:
        return self.steps[-self._settings.num_measured(self.way) :]

    def _gradients(self) -> list[Any]:
        """Returns the mean gradients of the last step; a collective call."""
        if self._sharded is not None:
            return [self._sharded.full_gradient(param) for param in self.model.parameters()]
        if self.outer is not None:
            self._average_gradients()
        return [param.grad for param in self.model.parameters()]

    def _average_gradients(self) -> None:
        for param in self.model.parameters():
            gradient: Any = param.grad
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()

    def _has_gradients_of(self, right: "WayRun") -> bool:
        share = 0.0 if self._settings.is_exact else _GRADIENT_TOLERANCE
        if self.way == INT8:
            share = _INT8_TOLERANCE
        agrees = True
        for mine, expected in zip(self._first_gradients, right._first_gradients, strict=True):
            tolerance = share * expected.abs().max()
            agrees &= bool(((mine - expected).abs() <= tolerance).all())
        return agrees

    def _is_like(self, right: "WayRun") -> bool:
        """Returns True if gradients, loss and, if it is exact, parameters agree on every rank.

        With outer synchronization: if all ranks have the same global parameters.
        """
        is_exact = self._settings.is_exact and self.way != INT8
        tolerance = 0.0 if is_exact else _LOSS_TOLERANCE
        agrees = self._has_gradients_of(right)
        if self.outer is not None:
            agrees &= _has_same_on_all_ranks(self.model, self.outer)
        else:
            agrees &= math.isclose(self.loss, right.loss, rel_tol=tolerance)
            if is_exact:
                params = zip(self.model.parameters(), right.model.parameters(), strict=True)
                agrees &= all(torch.equal(mine, expected) for mine, expected in params)
        on_all_ranks = torch.tensor(agrees, dtype=torch.int32)
        dist.all_reduce(on_all_ranks, op=dist.ReduceOp.MIN)
        return bool(on_all_ranks)

    def step(self, batch: Tensor) -> None:
        """Runs one step of this variant; nothing is in flight before or after it.

        With shards it begins with the update by the previous turn's gradients. The gathers after
        the update then run under this variant's forward, and not in the turn of another variant.
        """
        update = None if self._sharded is None else self._update()
        self._optimizer.zero_grad()
        began_us = _now_us()
        loss = self._called(batch)
        forward_us = _now_us()
        loss.backward()
        if self.way == "per-parameter":  # in a blocking loop, the obvious first version
            self._average_gradients()
        synchronized_us = _now_us()
        phases = (
            _phase("forward", began_us, forward_us),
            _phase("backward", forward_us, self._last_gradient_us),
            # only the network is waited for
            _phase("wait", self._last_gradient_us, synchronized_us),
            self._update() if update is None else update,
        )
        self.steps.append(Trace(rank=dist.get_rank(), step=len(self.steps), events=phases))
        if len(self.steps) <= NUM_WARM_UP_STEPS + self._settings.num_steps:  # as many as all have
            self.loss = loss.item()
        if not self._first_gradients:
            self._first_gradients = [gradient.clone() for gradient in self._gradients()]

    def figures(self) -> str:
        """Returns the step time, as the table has it, and the loss of the last step."""
        # the median of the measured steps, not of those to warm up
        measured = self.steps[NUM_WARM_UP_STEPS:] or self.steps
        middle_us = median_high(step.duration_us for step in measured)
        return f"{middle_us / 1e3:6.1f} ms/step  loss {self.loss:.4f}"

    def finish(self, batch: Tensor) -> None:
        """Makes the update that the last turn has left out.

        The library's record of it is complete in the next forward.
        """
        if self._sharded is not None:
            self._update()
            self._sharded(batch)
            self._sharded.wait()

    def result(self, transfers: Sequence[Carried], right: "WayRun") -> WayDone:
        """Returns the figures, and whether they agree with the variant `right`.

        The typical step is the measured one of median duration; with outer synchronization, where
        few steps exchange anything, one during an exchange whose duration is nearest to the mean.
        """
        recorded: dict[int, Trace] = {}
        if self._sharded is not None:
            recorded = {trace.step: trace for trace in self._sharded.traces()}
        traces = (trace_of(step, transfers, recorded.get(step.step)) for step in self.measured)
        steps = sorted(traces, key=attrgetter("duration_us"))
        typical = steps[len(steps) // 2]
        step_us, overlap = typical.duration_us, overlap_of(typical)
        num_ops = str(len(typical.communication))
        if self.outer is not None:
            step_us = mean(step.duration_us for step in steps)
            exchanging = [step for step in steps if step.communication] or steps
            typical = min(exchanging, key=lambda step: abs(step.duration_us - step_us))
            report = self.outer.report()
            per_step = 1e3 * report.fragments / report.every
            overlap = Overlap(
                total_us=per_step * report.exchange_ms, exposed_us=per_step * report.exposed_ms
            )
            num_ops = f"{report.fragments}/{report.every}"
        return WayDone(
            way=self.way,
            typical=typical,
            loss=self.loss,
            is_right=self._is_like(right),
            profile=self._profile(),
            step_us=step_us,
            overlap=overlap,
            num_ops=num_ops,
        )

    def _profile(self) -> Profile | None:
        """Returns the library's profile; None for other variants, and after too few steps."""
        if self._wrapped is None or self.way not in OURS:
            return None
        # The turns of all other variants lie between two steps, so the times of one step are known
        # only here.
        update_us = median(step.events[-1].duration_us for step in self.steps)
        step_us = median(step.duration_us for step in self.steps)
        with contextlib.suppress(PhaseError):
            return replace(
                self._wrapped.profile(), name="demo", update_us=update_us, step_us=step_us
            )
        return None

    def _note_gradient(self, _param: Tensor) -> None:
        self._last_gradient_us = _now_us()

    def _update(self) -> Event:
        began_us = _now_us()
        self._optimizer.step()
        return _phase("optimizer", began_us, _now_us())


@torch.no_grad()
def _has_same_on_all_ranks(model: nn.Module, outer: OuterSync) -> bool:
    """Returns True if this rank's global parameters are rank 0's; a collective call."""
    agrees = True
    with outer.synchronized():
        for param in model.parameters():
            of_rank_0 = param.detach().clone()
            dist.broadcast(of_rank_0, 0)
            agrees &= torch.equal(param, of_rank_0)
    return agrees


def _now_us() -> float:
    return time.perf_counter() * 1e6


def _phase(kind: str, start_us: float, stop_us: float) -> Event:
    return Event(lane="compute", kind=kind, start_us=start_us, stop_us=stop_us)


def trace_of(phases: Trace, transfers: Sequence[Carried], recorded: Trace | None = None) -> Trace:
    """Returns one step as events, in time since its forward began: its phases, and the parts of
    transfers that lie in it, launched by any step.

    With shards the library has `recorded` how long the forward waited for parameters.
    """
    forward = phases.events[0]
    began_us = min(event.start_us for event in phases.events)
    ended_us = max(event.stop_us for event in phases.events)
    events = list(phases.events)
    for sent in transfers:
        start_us = max(began_us, sent.started_s * 1e6)
        stop_us = min(ended_us, sent.done_s * 1e6)
        if start_us < stop_us:
            events.append(
                Event(
                    lane="comm.dp",
                    kind=sent.kind,
                    start_us=start_us,
                    stop_us=stop_us,
                    num_bytes=sent.num_bytes,
                )
            )
    if recorded is not None:
        # The end of the forward is the moment that both clocks recorded.
        ends_us = next(event.stop_us for event in recorded.events if event.kind == "forward")
        waits = [
            event for event in recorded.events if event.kind == "wait" and event.stop_us <= ends_us
        ]
        events += [_moved(event, forward.stop_us - ends_us) for event in waits]
    return replace(phases, events=tuple(_moved(event, -forward.start_us) for event in events))


def _moved(event: Event, by_us: float) -> Event:
    return replace(event, start_us=event.start_us + by_us, stop_us=event.stop_us + by_us)
