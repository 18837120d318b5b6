"""The reduction of accumulated gradients, as user code asks for it."""

import asyncio
import contextlib
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from undertow.config import refused
from undertow.engine.agreed_errors import require_outside_of_backward
from undertow.engine.engine import Engine
from undertow.errors import UndertowError, all_of, require
from undertow.torch_private import private

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
        all_of(*(engine.finish_round for engine in self._engines))

    def is_completed(self) -> bool:
        """Returns True if `wait` would not wait for other ranks."""
        # Under a new plan buckets leave in `wait`, after the ranks have met under the old one.
        are_launched = all(
            engine.current_plan.change is None for engine in self._engines if engine.is_busy
        )
        return are_launched and all(engine.has_arrived for engine in self._engines)

    def __await__(self) -> Generator[Any, None, None]:
        while not all(engine.has_arrived for engine in self._engines):
            yield from asyncio.sleep(_POLL_S).__await__()
        self.wait()


def start_reduction(engines: Sequence[Engine], *, op: str | None, has_hook: bool) -> Reduction:
    """Starts GradientSync.reduce_gradients_async.

    `op=None` is the mean, or the result of a communication hook.
    """
    require_outside_of_backward(
        "reduce_gradients_async()",
        where="GradientSync.reduce_gradients_async",
        remedy="Call it after the last backward of the step.",
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
