"""What a plan becomes: the ops of both kinds of round, and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from undertow.plan import Plan
from undertow.runtime.executor import Executor, Reducer
from undertow.runtime.recorder import Recorder
from undertow.schedule import Releases, lower_accumulation, lower_data_parallel, verify


class Assembly:
    """A plan over `params`, ready to run; `generation` counts the plans of an engine."""

    def __init__(
        self, plan: Plan, params: Sequence[Tensor], reducer: Reducer, recorder: Recorder, *, generation: int, overlap: bool
    ) -> None:
        self.plan = plan
        self.params = tuple(params)
        self.reducer = reducer
        self.generation = generation
        self._recorder = recorder
        num_buckets = len(plan.buckets)
        self._synchronising, self._accumulating = (
            Releases(verify(schedule, num_buckets=num_buckets))
            for schedule in (lower_data_parallel(num_buckets, overlap=overlap), lower_accumulation(num_buckets))
        )

    @cached_property
    def executor(self) -> Executor:
        """Made when it is first asked for: a group of one rank never needs the buckets."""
        return Executor(self.plan, self.params, self.reducer.group, self._recorder, self.reducer)

    def releases(self, *, is_synchronised: bool) -> Releases:
        """The ops of one kind of round, none of which has happened."""
        releases = self._synchronising if is_synchronised else self._accumulating
        releases.reset()
        return releases
