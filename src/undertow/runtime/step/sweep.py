"""Measures the cost of collectives by sending messages of many sizes."""

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
    """Teaches the tuner the cost of all-reduces of many sizes; a collective call. Raises PhaseError if nothing is measured."""
    engine.complete()
    tuner = engine.current_plan.now.hooks.tuner
    if tuner is None:
        raise no_profile(config)
    if engine.current_plan.group.num_ranks > 1:
        engine.current_plan.open()
        with engine.current_plan.group.waiting("the measurement of the network"):
            tuner.learn_costs("all_reduce", _swept_costs(engine.current_plan.now.compiled.reducer))


def _swept_costs(reducer: Reducer) -> tuple[tuple[float, float], ...]:
    """Returns pairs of bytes and microseconds of all-reduces, the same on every rank; a collective call.

    Each time is the median of some, on the rank that waited longest.
    """
    group = reducer.group
    tensor = torch.zeros(_SIZES[-1] // 4, device=group.device)
    times = torch.zeros(len(_SIZES), _NUM_TIMES, dtype=torch.float64)
    for row, num_bytes in zip(times, _SIZES, strict=True):
        part = tensor[: num_bytes // 4]
        for at in range(-1, _NUM_TIMES):  # the first one allocates memory for the others
            group.complete(dist.barrier(group=group.process_group, async_op=True))
            began_s = time.perf_counter()
            reducer.reduce(part, numel=part.numel()).wait()
            if group.device.type == "cuda":
                torch.cuda.synchronize(group.device)  # measures the end, not the launch
            if at >= 0:
                row[at] = (time.perf_counter() - began_s) * 1e6
    latest = times.to(group.device)
    group.all_reduce(latest, dist.ReduceOp.MAX)
    return tuple((float(num_bytes), median(row)) for num_bytes, row in zip(_SIZES, latest.tolist(), strict=True))
