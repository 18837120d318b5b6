"""What a plan becomes: the ops of both kinds of round, and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from undertow.plan import GathersBehind, Plan
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.executor import Executor, Round
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.sharded.layout import Sharding
from undertow.schedule import DDP, OpKind, Releases, Schedule, lower_accumulation, lower_data_parallel, lower_in_backward, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A plan in force, as a value."""

    plan: Plan
    generation: int
    has_shards: bool
    steps_in_backward: bool = False  # its buckets are stepped in backward


class CompiledPlan:
    """A plan over `params`, ready to run; `generation` counts the plans of an engine."""

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        reducer: Reducer,
        recorder: Recorder,
        *,
        generation: int,
        sharding: Sharding | None = None,
    ) -> None:
        self.plan = plan
        self.params = tuple(params)
        self.strides = tuple(param.stride() for param in params)  # of this moment, as buckets are laid out
        self.reducer, self.sharding = reducer, sharding
        self.generation = generation
        self.strategy = DDP if sharding is None else sharding.strategy
        self._recorder = recorder
        num_buckets = len(plan.buckets)
        accumulation = lower_accumulation(num_buckets, self.strategy)
        self._accumulating = Releases(verify(accumulation, self.strategy, num_buckets=num_buckets))
        self._gathers_behind: GathersBehind | None = None
        self.in_backward = None if sharding is None else sharding.in_backward
        if self.in_backward is not None:
            self._follow(lower_in_backward(num_buckets, self.strategy))
        else:
            self.gather_in()

    @property
    def present(self) -> Present:
        has_shards = self.sharding is not None
        return Present(
            plan=self.plan, generation=self.generation, has_shards=has_shards, steps_in_backward=self.in_backward is not None
        )

    @cached_property
    def executor(self) -> Executor:
        """Made when it is first asked for: a group of one rank never needs the buckets."""
        return Executor(self.plan, self.params, self._recorder, self.reducer, self.sharding)

    def releases(self, this_round: Round) -> Releases:
        """The ops of a round of its kind, none of which has happened."""
        # A micro-batch that is reduced to shards, and nothing more.
        is_added_up = self.strategy.reduces_micro_batches and not this_round.is_last
        is_accumulating = is_added_up or not this_round.is_synchronized
        releases = self._accumulating if is_accumulating else self._synchronizing
        releases.reset()
        return releases

    def gather_in(self, order: Sequence[int] | None = None) -> None:
        """Gathers buckets in that order from now on: the one in which the forward needs them."""
        num_buckets = len(self.plan.buckets)
        if order is not None:  # one without parameters is needed nowhere
            order = tuple(dict.fromkeys((*order, *range(num_buckets))))
        self._follow(lower_data_parallel(num_buckets, self.strategy, overlap=self.reducer.overlap, gather_order=order))

    def interleave(self, gathers_behind: GathersBehind | None) -> None:
        """Gathers buckets from now on after the reductions that `lower_in_backward` takes; None: after the last one."""
        if self.in_backward is not None and self._gathers_behind != gathers_behind:
            self._gathers_behind = gathers_behind
            self._follow(lower_in_backward(len(self.plan.buckets), self.strategy, gathers_behind))

    def _follow(self, schedule: Schedule) -> None:
        self._synchronizing = Releases(verify(schedule, self.strategy, num_buckets=len(self.plan.buckets)))
        self._gathers = tuple(op for op in schedule.ops if op.kind is OpKind.ALL_GATHER)

    def round_ended(self, this_round: Round) -> None:
        """All ranks have found it sound."""
        if self.in_backward is not None:
            self.in_backward.is_due = this_round.steps

    def gather(self) -> None:
        """The optimizer has stepped, whether a round came before or not: every rank gets what the others have updated."""
        self.executor.run(self._gathers)
