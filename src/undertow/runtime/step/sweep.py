"""What collectives take on the process group, found out by sending nothing useful."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from undertow.config import SyncConfig
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.replan.planning import no_profile
from undertow.runtime.step.engine import Engine

_SIZES = tuple(4096 * 4**power for power in range(8))  # bytes: 4 KiB to 64 MiB
_NUM_TIMES = 5


def sweep(engine: Engine, config: SyncConfig) -> None:
    """Has the tuner learn what all-reduces of many sizes take; a collective call. PhaseError where nothing learns."""
    engine.complete()
    tuner = engine.current_plan.watch.tuner
    if tuner is None:
        raise no_profile(config)
    if engine.current_plan.group.num_ranks > 1:
        engine.open()
        with engine.current_plan.group.waiting("the measurement of the network"):
            tuner.learn_costs("all_reduce", _swept_costs(engine.current_plan.compiled.reducer))


def _swept_costs(reducer: Reducer) -> tuple[tuple[float, float], ...]:
    """Pairs of bytes and microseconds of all-reduces, one after another, the same on every rank; a collective call.

    The median of some, on the rank that had to wait longest for each.
    """
    group = reducer.group
    tensor = torch.zeros(_SIZES[-1] // 4, device=group.device)
    times = torch.zeros(len(_SIZES), _NUM_TIMES, dtype=torch.float64)
    for row, num_bytes in zip(times, _SIZES, strict=True):
        part = tensor[: num_bytes // 4]
        for at in range(-1, _NUM_TIMES):  # the first one makes what the others find
            group.complete(dist.barrier(group=group.process_group, async_op=True))
            began_s = time.perf_counter()
            reducer.reduce(part, numel=part.numel()).wait()
            if group.device.type == "cuda":
                torch.cuda.synchronize(group.device)  # what is measured is the end, not the launch
            if at >= 0:
                row[at] = (time.perf_counter() - began_s) * 1e6
    latest = times.to(group.device)
    group.all_reduce(latest, dist.ReduceOp.MAX)
    return tuple((float(num_bytes), median(row)) for num_bytes, row in zip(_SIZES, latest.tolist(), strict=True))
