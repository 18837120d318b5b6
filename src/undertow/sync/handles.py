"""Handles that user code asks for and waits for: a reduction of accumulated gradients, and the mean
of a number over ranks, which is on its way while the forward runs."""

import asyncio
import contextlib
import math
from collections.abc import Generator, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.config import refused
from undertow.device import Device, device_of
from undertow.engine.agreed_errors import require_outside_of_backward
from undertow.engine.engine import Engine
from undertow.errors import UndertowError, WrongType, all_of, require
from undertow.ranks.handle import Handle
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import private

_WHERE = "mean_over_ranks(number)"
_ASK = "Give the number of tokens, or samples, that the loss of this rank is summed over."
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
        all_of(*(engine.rounds.finish for engine in self._engines))

    def is_completed(self) -> bool:
        """Returns True if `wait` would not wait for other ranks."""
        # Under a new plan buckets leave in `wait`, after the ranks have left the old one.
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


class MeanOverRanks:
    """The mean of a number over ranks, as `GradientSync.mean_over_ranks` returns it."""

    def __init__(self, group: OwnGroup, number: Tensor) -> None:
        """Starts to replace `number` by its mean; a collective call.

        [] float64, on the group's device
        """
        self._group, self._mean = group, number
        self._handle: Handle | None = None  # one rank has its mean already
        if group.num_ranks > 1:
            self._start()

    def _start(self) -> None:
        divide = partial(self._mean.div_, self._group.num_ranks)
        self._handle = self._group.all_reduce(self._mean, "the mean over ranks", finish=divide)

    @private.untraced
    def wait(self) -> Tensor:
        """Returns the mean, the same tensor each time.

        On an accelerator, the host does not wait for it.
        """
        if self._handle is not None:
            self._handle.wait()
        return self._mean


def start_mean(engines: Sequence[Engine], number: object) -> MeanOverRanks:
    """Starts GradientSync.mean_over_ranks, over the ranks of the first engine.

    The others are of its experts.
    """
    current_plan = engines[0].current_plan
    group = current_plan.group
    mean = _checked(number, group.hardware)
    require_outside_of_backward(
        "mean_over_ranks()",
        where=f"{_WHERE}, rank {group.rank}",
        remedy="Call it before the forward: during a backward, ranks may run in different orders.",
    )
    if "join" in group.borrowers:
        raise refused("join", "mean_over_ranks", where=f"{_WHERE}, rank {group.rank}")
    # if a backward has failed here, the others still wait in its round
    all_of(*(engine.rounds.finish for engine in engines))
    current_plan.open_group()
    return MeanOverRanks(group, mean)


def _checked(number: object, device: Device) -> Tensor:
    """Returns the number as a new tensor. [] float64"""
    is_tensor = isinstance(number, Tensor) and number.numel() == 1 and not number.is_complex()
    found = (
        (f"a tensor of shape {tuple(number.shape)}")
        if isinstance(number, Tensor)
        else type(number).__name__
    )
    require(
        is_tensor or (isinstance(number, Real) and not isinstance(number, bool)),
        f"number must be a real number, got {found}.",
        where=_WHERE,
        remedy=_ASK,
        error=WrongType,
    )
    number = number.detach().reshape(()) if isinstance(number, Tensor) else number
    # Reading it would make the host wait. A copy to the host must be waited for.
    if isinstance(number, Tensor) and not (device.is_host or device_of(number.device).is_host):
        return number.to(device.place, torch.float64, non_blocking=True, copy=True)
    value = float(number)  # type: ignore[arg-type]  # checked above
    require(math.isfinite(value), f"number must be finite, got {value}.", where=_WHERE, remedy=_ASK)
    # a new tensor, also on the host
    return device.to_device(torch.tensor(value, dtype=torch.float64), torch.float64)
