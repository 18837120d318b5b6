"""What a plan becomes: the ops of both kinds of round, and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from undertow.plan import Plan
from undertow.runtime.executor import Executor, Reducer
from undertow.runtime.recorder import Recorder
from undertow.schedule import DDP, OpKind, Releases, lower_accumulation, lower_data_parallel, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A plan in force, as a value."""

    plan: Plan
    generation: int
    has_shards: bool


class Assembly:
    """A plan over `params`, ready to run; `generation` counts the plans of an engine."""

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        reducer: Reducer,
        recorder: Recorder,
        *,
        generation: int,
        overlap: bool,
    ) -> None:
        self.plan = plan
        self.params = tuple(params)
        self.reducer = reducer
        self.generation = generation
        self.strategy = DDP if reducer.sharding is None else reducer.sharding.strategy
        self._overlap = overlap
        self._recorder = recorder
        num_buckets = len(plan.buckets)
        accumulation = lower_accumulation(num_buckets, self.strategy)
        self._accumulating = Releases(verify(accumulation, self.strategy, num_buckets=num_buckets))
        self.gather_in()

    @property
    def present(self) -> Present:
        return Present(plan=self.plan, generation=self.generation, has_shards=self.reducer.sharding is not None)

    @cached_property
    def executor(self) -> Executor:
        """Made when it is first asked for: a group of one rank never needs the buckets."""
        return Executor(self.plan, self.params, self.reducer.group, self._recorder, self.reducer)

    def releases(self, *, is_accumulating: bool) -> Releases:
        """The ops of one kind of round, none of which has happened."""
        releases = self._accumulating if is_accumulating else self._synchronising
        releases.reset()
        return releases

    def gather_in(self, order: Sequence[int] | None = None) -> None:
        """Gathers buckets in that order from now on: the one in which the forward needs them."""
        num_buckets = len(self.plan.buckets)
        if order is not None:  # one without parameters is needed nowhere
            order = tuple(dict.fromkeys((*order, *range(num_buckets))))
        schedule = lower_data_parallel(num_buckets, self.strategy, overlap=self._overlap, gather_order=order)
        self._synchronising = Releases(verify(schedule, self.strategy, num_buckets=num_buckets))
        self._gathers = tuple(op for op in schedule.ops if op.kind is OpKind.ALL_GATHER)

    def gather(self) -> None:
        """The optimizer has stepped, whether a round came before or not: every rank gets what the others have updated."""
        self.executor.run(self._gathers)
