"""Which parameters got a gradient on a rank alone, where there are no rounds that would tell."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Uses:
    """Notes the gradients of `params` until `close`, over the micro-batches of a step.

    A step begins with the first training forward after a backward that was more than an accumulation, or after an optimizer.
    """

    def __init__(self, params: Sequence[Tensor], before: Uses | None = None) -> None:
        self._params = tuple(params)
        self._arrived: set[Tensor] = set() if before is None else before._arrived.copy()  # in this mode; by identity
        self._earlier: set[Tensor] = set() if before is None else before._earlier.copy()  # in micro-batches that accumulated
        self._has_run = False  # a backward, which may have brought nothing
        self._is_stepping_late = False  # a forward has begun since the backward whose gradients are stepped on next
        self._is_accumulating: bool = False if before is None else before._is_accumulating
        self._unused: tuple[int, ...] = ()  # in the step that has ended
        # No function of ours: each would be a frame for every gradient of a rank that has nothing to wait for.
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._arrived.add)  # type: ignore[no-untyped-call]
            for param in params
        ]

    @property
    def unused(self) -> tuple[int, ...]:
        """Indices of the parameters without a gradient in this step; none before its backward."""
        return self._now() if self.is_over else self._unused

    def forward_begins(self) -> None:
        """A training forward."""
        self._unused = ()
        if self.is_over:
            self._is_stepping_late = True
            self._forget()
        for noted in (self._arrived, self._earlier):
            noted.difference_update([param for param in noted if param.grad is None])  # thrown away since

    def backward_runs(self, *, steps: bool = False) -> None:
        """One that may bring nothing, or none has and an optimizer `steps`, perhaps on what an earlier backward has brought."""
        self._has_run |= not self._is_accumulating and not (steps and self._is_stepping_late)

    def accumulates(self, value: bool) -> None:
        """What comes from now on is accumulated, or no more."""
        if value:
            self.ends()
        else:
            self._earlier |= self._arrived
            self._arrived.clear()
        self._is_accumulating = value

    def reduces(self) -> None:
        """What was accumulated is all of the step."""
        self._earlier |= self._arrived
        self._unused = self._now()
        self._forget()

    def steps(self) -> None:
        """An optimizer has what it needs."""
        self.ends()
        self._is_stepping_late = False

    def ends(self) -> None:
        """The step is over if a backward has run."""
        if self.is_over:
            self._unused = self._now()
            self._forget()

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.ends()

    @property
    def is_over(self) -> bool:
        """Whether a backward has run that was more than an accumulation."""
        return not self._is_accumulating and (self._has_run or bool(self._arrived))

    @property
    def has_accumulated(self) -> bool:
        """Whether a gradient has come while backwards only accumulate."""
        return bool(self._earlier) or (self._is_accumulating and bool(self._arrived))

    def _now(self) -> tuple[int, ...]:
        return tuple(
            index for index, param in enumerate(self._params) if param not in self._arrived and param not in self._earlier
        )

    def _forget(self) -> None:
        self._arrived.clear()
        self._earlier.clear()
        self._has_run = False
