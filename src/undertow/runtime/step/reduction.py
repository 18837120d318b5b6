"""Reductions that user code asks for: of accumulated gradients, and of messages of many sizes to measure their cost."""

import asyncio
import contextlib
import time
from collections.abc import Generator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from undertow.config import SyncConfig, refused
from undertow.errors import PhaseError, UndertowError, require
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.replan.planning import no_profile
from undertow.runtime.step.engine import Engine
from undertow.runtime.step.siblings import all_of
from undertow.runtime.torch_private import private

_SIZES = tuple(4096 * 4**power for power in range(8))  # bytes: 4 KiB to 64 MiB
_NUM_TIMES = 5
_POLL_S = 0.001
_NAMES = ((dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "mean"))


def name_of_op(op: Any) -> Any:
    """Returns the name of one of torch's operations, and every other value as it is."""
    return next((name for each, name in _NAMES if op == each), op)


class Reduction:
    """Gradients in flight, as `GradientSync.reduce_gradients_async` returns them."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    @private.untraced
    def wait(self) -> None:
        """Waits until every `.grad` is the mean over ranks, or the result of another `op`."""
        all_of(*(engine.complete for engine in self._engines))

    def is_completed(self) -> bool:
        """Returns True if `wait` would not wait for other ranks."""
        # Under a new plan buckets leave in `wait`, after the ranks have met under the old one.
        are_launched = all(engine.current_plan.change is None for engine in self._engines if engine.is_busy)
        return are_launched and all(engine.has_arrived for engine in self._engines)

    def __await__(self) -> Generator[Any, None, None]:
        while not all(engine.has_arrived for engine in self._engines):
            yield from asyncio.sleep(_POLL_S).__await__()
        self.wait()


def start_reduction(engines: Sequence[Engine], *, op: str | None, has_hook: bool) -> Reduction:
    """Starts GradientSync.reduce_gradients_async; `op=None` is the mean, or the result of a communication hook."""
    require(
        private.graph_task_id() == -1,
        "reduce_gradients_async() was called inside a backward.",
        where="GradientSync.reduce_gradients_async",
        remedy="Call it after the last backward of the step.",
        error=PhaseError,
    )
    where = "reduce_gradients_async(op)"
    require(
        op in (None, "mean", "sum"),
        f'op must be "mean" or "sum", got {op!r}.',
        where=where,
        remedy="Leave it out for the mean.",
    )
    if op is not None and has_hook:
        raise refused("hook", "op", where=where)
    reduction = Reduction(engines)
    try:
        other_op = None if op == "mean" else op
        all_of(*(partial(engine.reduce_accumulated, other_op) for engine in engines))
    except UndertowError:
        with contextlib.suppress(UndertowError):
            reduction.wait()  # for reductions over other groups of ranks
        raise
    return reduction


def sweep(engine: Engine, config: SyncConfig) -> None:
    """Teaches the tuner the cost of all-reduces of many sizes; a collective call. Raises PhaseError if nothing is measured."""
    engine.complete()
    tuner, group = engine.current_plan.now.hooks.tuner, engine.current_plan.group
    if tuner is None:
        raise no_profile(config, group)
    engine.current_plan.open()
    with group.waiting("the measurement of the network"):
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
            group.barrier()
            began_s = time.perf_counter()
            reducer.reduce(part).wait()
            if group.device.type == "cuda":
                torch.cuda.synchronize(group.device)  # measures the end, not the launch
            if at >= 0:
                row[at] = (time.perf_counter() - began_s) * 1e6
    latest = times.to(group.device)
    group.all_reduce(latest, dist.ReduceOp.MAX)
    return tuple((float(num_bytes), median(row)) for num_bytes, row in zip(_SIZES, latest.tolist(), strict=True))
