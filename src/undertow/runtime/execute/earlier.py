"""Keeps results of earlier synchronizations of a step apart while a later one runs.

The mean of a mean and of something new is the mean of their sum; a sum over ranks would count what is there once for
every rank. So before the first gradient of a backward is added to `.grad`, what that holds is taken out:

.grad   sum ── first gradient of a backward ──> None ── autograd ──> new ── reduced ──> sum of new  (+ sum)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from undertow.errors import PhaseError
from undertow.runtime.execute.executor import Round
from undertow.runtime.gradients.written import has_values
from undertow.runtime.sharded.binding import GradientPlaceholder
from undertow.runtime.torch_private import private

_THROWN_AWAY = 0, 0


class Apart:
    """Holds what was in `.grad` from the start of a synchronization to its end.

    A backward that only accumulates takes it out too, and it stays out until the next one that synchronizes: between the
    two `.grad` is what is new. Placeholders keep the two apart themselves.
    """

    def __init__(self) -> None:
        # Parameters, by id, whose `.grad` is what a synchronization has brought: that one's id, and how often it was written.
        self._reduced: dict[int, tuple[int, int]] = {}
        self._earlier: dict[int, tuple[Tensor, Tensor]] = {}  # by id, a parameter and what was in its `.grad`
        self._task: int | None = None  # the backward for which it was taken out

    @property
    def is_taken(self) -> bool:
        """Whether the backward that this thread is in has begun before."""
        return self._task is not None and self._task == private.graph_task_id()

    def look(self, params: Sequence[Tensor]) -> None:
        """A forward begins: what the user has made of earlier results so far is no gradient of the backward that comes."""
        if self._reduced:
            marks = _marks(params)
            self._reduced = {key: marks.get(key, _THROWN_AWAY) for key in self._reduced}

    def take(self, named_params: Sequence[tuple[str, Tensor]], *, has_result: Callable[[], bool]) -> bool:
        """A round begins. Returns False where the user has thrown everything away since the last one.

        PhaseError where something else than autograd has added to what is to be taken out.
        """
        self._task = None if private.graph_task_id() == -1 else private.graph_task_id()
        if not has_result():
            self._reduced.clear()
            self._earlier.clear()
            return False
        had_some, has_shards = bool(self._reduced or self._earlier), False
        for name, param in named_params:
            key, grad = id(param), param.grad
            if isinstance(grad, GradientPlaceholder):
                has_shards |= not grad.is_cleared
            elif key in self._earlier:
                if grad is None:  # thrown away, and the new part that was there with it
                    del self._earlier[key]
            elif key in self._reduced and grad is not None:
                known, version = self._reduced[key]
                if known != id(grad):
                    continue  # thrown away, and written anew since by something that autograd does not know of
                if version != grad._version and has_values(grad):
                    raise _added_to(name)
                self._earlier[key] = param, grad
                param.grad = None
        self._reduced.clear()
        return bool(self._earlier) or has_shards or not had_some

    def round_ends(self, params: Sequence[Tensor], this_round: Round) -> None:
        """What was there before comes back to what is new, if that has been reduced, or where nothing new has come."""
        if not this_round.is_synchronized:
            self._accumulated()
            return
        this_round.keeps_earlier |= bool(self._earlier)
        self.give_back(scale=1.0 if this_round.weighing is None else this_round.weighing.sums().keep)
        self._reduced = _marks(params)

    def _accumulated(self) -> None:
        self._task = None
        for key, (param, earlier) in list(self._earlier.items()):
            if param.grad is None:
                param.grad = earlier
                self._reduced[key] = id(earlier), earlier._version
                del self._earlier[key]

    @torch.no_grad()
    def give_back(self, *, scale: float = 1.0) -> None:
        """Everything that was taken out is added to what is there now."""
        self._task = None
        for param, earlier in self._earlier.values():
            part = earlier if scale == 1.0 else earlier * scale
            if param.grad is None:
                param.grad = part
            elif param.grad.is_sparse:
                param.grad = param.grad + part
            else:
                param.grad.add_(part)
        self._earlier.clear()


def _marks(params: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
    return {id(param): (id(grad), grad._version) for param in params if (grad := param.grad) is not None}


def _added_to(name: str) -> PhaseError:
    return PhaseError(
        "something else than autograd has added to a gradient that holds an earlier result, and the two cannot be told apart.",
        where=f"parameter {name!r}, before the first gradient of a backward arrived",
        remedy="Clear gradients with zero_grad(set_to_none=True) before each backward, and change them before the forward only.",
    )
