"""A model on one rank, without rounds: unused parameters, and times for a profile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from undertow.plan import Plan
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.hooks import remove_all
from undertow.runtime.torch_private import private
from undertow.tune import Tuner, measurement_of_one_rank

_FIRST, _NUM_STEPS = 2, 5  # the first step allocates memory for later ones


class SingleRank:
    """Notes the gradients of `params` until `close`, over the micro-batches of a step.

    A step begins with the first training forward after a backward that did not only accumulate, or after an optimizer step.
    """

    def __init__(self, params: Sequence[Tensor], before: SingleRank | None = None) -> None:
        self._params = tuple(params)
        self._arrived: set[Tensor] = set() if before is None else before._arrived.copy()  # in this mode; by identity
        self._earlier: set[Tensor] = set() if before is None else before._earlier.copy()  # in micro-batches that accumulated
        self._has_run = False  # a backward has run, maybe without gradients
        self._is_stepping_late = False  # a forward has begun since the backward whose gradients the next step uses
        self._is_accumulating: bool = False if before is None else before._is_accumulating
        self._unused: tuple[int, ...] = ()  # in the last complete step
        # set.add itself: a function of Undertow's would be a frame for every gradient of a rank that has nothing to wait for.
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._arrived.add)  # type: ignore[no-untyped-call]
            for param in params
        ]

    @property
    def unused(self) -> tuple[int, ...]:
        """Indices of the parameters without a gradient in this step; empty before its backward."""
        return self._now() if self.is_complete else self._unused

    def forward_begins(self) -> None:
        """Called before a training forward."""
        if self.is_complete:
            self._is_stepping_late = True
            self.reduces()
        self._unused = ()
        for noted in (self._arrived, self._earlier):
            noted.difference_update([param for param in noted if param.grad is None])  # cleared since

    def backward_runs(self, *, steps: bool = False) -> None:
        """Called for a backward that may bring no gradients; or there was none, and an optimizer `steps` on an earlier result."""
        self._has_run |= not self._is_accumulating and not (steps and self._is_stepping_late)

    def accumulates(self, value: bool) -> None:
        """Sets whether the following backwards only accumulate."""
        if value:
            self.ends()
        else:
            self._earlier |= self._arrived
            self._arrived.clear()
        self._is_accumulating = value

    def reduces(self) -> None:
        """Ends the step, even one of accumulated gradients only."""
        self._unused = self._now()
        self._arrived.clear()
        self._earlier.clear()
        self._has_run = False

    def steps(self) -> None:
        """Called before an optimizer steps."""
        self.ends()
        self._is_stepping_late = False

    def ends(self) -> None:
        """Ends the step if a backward has run."""
        if self.is_complete:
            self.reduces()

    def close(self) -> None:
        """Removes the hooks."""
        remove_all(self._hooks)
        self.ends()

    @property
    def is_complete(self) -> bool:
        """True if a backward has run that did not only accumulate."""
        return not self._is_accumulating and (self._has_run or bool(self._arrived))

    @property
    def has_accumulated(self) -> bool:
        """True if a gradient arrived while backwards only accumulated."""
        return bool(self._earlier) or (self._is_accumulating and bool(self._arrived))

    def _now(self) -> tuple[int, ...]:
        arrived = self._arrived | self._earlier
        return tuple(index for index, param in enumerate(self._params) if param not in arrived)


class SingleRankProbe:
    """Times the gradients of a few steps, for a profile that predicts the step on more ranks."""

    def __init__(self, params: Sequence[Tensor], plan: Plan, recorder: Recorder) -> None:
        self.tuner = Tuner()
        self._params, self._plan, self._recorder = tuple(params), plan, recorder
        self._num_forwards = 0
        self._hooks: list[RemovableHandle] = []

    def forward_begins(self) -> None:
        """Called before a training forward."""
        self._num_forwards += 1
        if self._num_forwards == _FIRST:
            self._hooks = [
                private.hook_gradients(param, partial(self._arrive, index)) for index, param in enumerate(self._params)
            ]
        elif self._hooks and self._num_forwards == _FIRST + _NUM_STEPS:
            self.close()
            measurement = measurement_of_one_rank(self._recorder.records(generation=0, at_most=_NUM_STEPS), self._plan)
            if measurement is not None:
                self.tuner.learn(measurement)

    def close(self) -> None:
        """Removes the hooks."""
        remove_all(self._hooks)

    def _arrive(self, param: int, _gradient: Tensor) -> None:
        self._recorder.gradient_arrives(param)
