"""The times of a model on one rank, where there are no rounds to measure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from undertow.plan import Plan
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.torch_private import private
from undertow.tune import Tuner, measurement_of_one_rank

_FIRST, _NUM_STEPS = 2, 5  # the first step makes what later ones find


class SingleRankProbe:
    """Watches gradients come in a few steps, for a profile that tells what more ranks would make of it."""

    def __init__(self, params: Sequence[Tensor], plan: Plan, recorder: Recorder) -> None:
        self.tuner = Tuner()
        self._params = tuple(params)
        self._plan = plan
        self._recorder = recorder
        self._num_forwards = 0
        self._hooks: list[RemovableHandle] = []

    def forward_begins(self) -> None:
        """A step begins."""
        self._num_forwards += 1
        if self._num_forwards == _FIRST:
            self._hooks = [
                private.hook_gradients(param, partial(self._arrive, index)) for index, param in enumerate(self._params)
            ]
        elif self._hooks and self._num_forwards == _FIRST + _NUM_STEPS:
            self.close()
            records = self._recorder.records(generation=0, at_most=_NUM_STEPS)
            measurement = measurement_of_one_rank(records, self._plan)
            if measurement is not None:
                self.tuner.learn(measurement)

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arrive(self, param: int, _gradient: Tensor) -> None:
        self._recorder.gradient_arrives(param)
