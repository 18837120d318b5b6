"""Keeps results of earlier synchronizations of a step apart while a later one runs.

The mean of a mean and of new gradients is the mean of their sum. A sum over ranks would count earlier results once for every
rank. So before the first gradient of a backward is added to `.grad`, its contents are taken out:

.grad   sum ── first gradient of a backward ──> None ── autograd ──> new ── reduced ──> sum of new  (+ sum)
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from undertow.errors import PhaseError, require
from undertow.runtime.execute.round import RoundKind, RoundResult
from undertow.runtime.gradients.binding import has_values
from undertow.runtime.gradients.weights import RoundWeights, Weights
from undertow.runtime.replan.current_plan import CurrentPlan
from undertow.runtime.sharded.binding import GradientPlaceholder
from undertow.runtime.torch_private import private

_CLEARED = 0, 0


class EarlierGradients:
    """Earlier results of a step, and the weights of its losses, for an engine that computes sums or weighted means.

    It holds the contents of `.grad` from the start of a synchronization to its end. A backward that only accumulates takes them
    out too, and they stay out until the next one that synchronizes: in between, `.grad` has new gradients only. Placeholders
    keep the two apart themselves. `is_between` returns True if no round is under way, and ends one that failed.
    """

    def __init__(self, current_plan: CurrentPlan, *, is_weighted: bool, is_between: Callable[[], bool]) -> None:
        self.weights = Weights(current_plan.group, is_weighted=is_weighted)
        self._current_plan = current_plan
        self._is_between = is_between
        # Parameters, by id, whose `.grad` is the result of a synchronization: its id, and its version.
        self._reduced: dict[int, tuple[int, int]] = {}
        self._earlier: dict[int, tuple[Tensor, Tensor]] = {}  # by id, a parameter and the former contents of its `.grad`
        self._task: int | None = None  # the backward for which they were taken out
        current_plan.call_before(self._take)

    def forward_begins(self) -> None:
        """Called before a training forward: the user's changes of earlier results so far are not gradients of its backward."""
        if self._reduced:
            marks = _marks(self._current_plan.now.hooks.params)
            self._reduced = {key: marks.get(key, _CLEARED) for key in self._reduced}

    def round_begins(self, kind: RoundKind, *, is_last: bool) -> RoundWeights | None:
        """Called when a round begins; returns the weights of all ranks if losses are weighted."""
        self._take()
        is_outside = kind is RoundKind.SHADOW or private.graph_task_id() == -1
        return self.weights.begins(
            is_synchronized=kind is not RoundKind.ACCUMULATE,
            is_without_data=is_outside and not self._current_plan.now.hooks.arrived_before,
            is_last=is_last,
        )

    def round_is_bound(self, result: RoundResult) -> None:
        """Called when every gradient has its new value: adds the earlier results to it."""
        if result.has_failed:
            return
        if not result.round.is_synchronized:
            self._leave_out()
            return
        result.keeps_earlier |= bool(self._earlier)
        weights = result.round.weights
        self.give_back(scale=1.0 if weights is None else weights.sums().keep)
        self._reduced = _marks(self._current_plan.now.hooks.params)

    @torch.no_grad()
    def give_back(self, *, scale: float = 1.0) -> None:
        """Adds earlier results to `.grad` again; after a backward that failed, it is as it would be without Undertow."""
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

    def _take(self) -> None:
        """Called before the first gradient of a backward, and when a round begins without one: empties `.grad`.

        Raises PhaseError if something other than autograd has added to an earlier result.
        """
        task = private.graph_task_id()
        if (self._task is not None and self._task == task) or not self._is_between():
            return
        self._task = None if task == -1 else task
        if not self._takes_any():  # the user has cleared everything since the last round
            self.weights.forget_gradients(has_accumulated=bool(self._current_plan.now.hooks.arrived_before))

    def _takes_any(self) -> bool:
        if not self._current_plan.has_result:
            self._reduced.clear()
            self._earlier.clear()
            return False
        had_some, has_shards = bool(self._reduced or self._earlier), False
        for name, param in self._current_plan.now.hooks.named_params:
            key, grad = id(param), param.grad
            if isinstance(grad, GradientPlaceholder):
                has_shards |= not grad.is_cleared
            elif key in self._earlier:
                if grad is None:  # cleared, and the new part that was there with it
                    del self._earlier[key]
            elif key in self._reduced and grad is not None:
                known, version = self._reduced[key]
                if known != id(grad):
                    continue  # cleared, and written anew since by something that autograd does not know of
                require(
                    version == grad._version or not has_values(grad),
                    "something other than autograd has added to a gradient that holds an earlier result: the old and the new "
                    "part cannot be told apart.",
                    where=f"parameter {name!r}, before the first gradient of a backward arrived",
                    remedy="Clear gradients with zero_grad(set_to_none=True) before each backward, and change them before the "
                    "forward only.",
                    error=PhaseError,
                )
                self._earlier[key] = param, grad
                param.grad = None
        self._reduced.clear()
        return bool(self._earlier) or has_shards or not had_some

    def _leave_out(self) -> None:
        """Ends a backward that only accumulates: earlier results return only to parameters without a new gradient."""
        self._task = None
        for key, (param, earlier) in list(self._earlier.items()):
            if param.grad is None:
                param.grad = earlier
                self._reduced[key] = id(earlier), earlier._version
                del self._earlier[key]


def _marks(params: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
    return {id(param): (id(grad), grad._version) for param in params if (grad := param.grad) is not None}
