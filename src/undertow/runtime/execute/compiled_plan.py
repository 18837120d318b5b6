"""A plan ready to run: the ops of both kinds of round, and buckets."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from undertow.plan import Plan
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.executor import Executor, ShardedExecutor
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.sharded.layout import Sharding
from undertow.schedule import (
    DDP,
    OpKind,
    Releases,
    Strategy,
    lower_accumulation,
    lower_data_parallel,
)

_LEAST_CUT_BYTES = 1024 * 1024  # torch cuts no smaller graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A plan in force, as a value."""

    plan: Plan
    generation: int
    has_shards: bool


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
        self.plan, self.generation = plan, generation
        self.params = tuple(params)
        self.strides = tuple(param.stride() for param in params)  # of this moment, as buckets are laid out
        self.reducer, self.sharding = reducer, sharding
        self.present = Present(plan=plan, generation=generation, has_shards=sharding is not None)
        self._recorder = recorder
        # The same under every strategy: it sends nothing.
        self.accumulating = Releases(lower_accumulation(len(plan.buckets)))
        overlap = reducer.config.overlap
        schedule = lower_data_parallel(len(plan.buckets), self.strategy, overlap=overlap)
        self.synchronizing = Releases(schedule)
        self._gathers = tuple(op for op in schedule.ops if op.kind is OpKind.ALL_GATHER)

    @cached_property
    def cut_bytes(self) -> int:
        """The bucket size at which torch.compile cuts graphs, or 0 if they stay whole."""
        largest = max((bucket.num_bytes for bucket in self.plan.buckets), default=0)
        return largest if self.plan.num_ranks > 1 and largest >= _LEAST_CUT_BYTES else 0

    @cached_property
    def strategy(self) -> Strategy:
        return DDP if self.sharding is None else self.sharding.strategy

    @cached_property
    def adding_up_shards(self) -> Releases:
        """The ops of a backward that accumulates, if the strategy reduces micro-batches."""
        return Releases(lower_accumulation(len(self.plan.buckets), self.strategy))

    @cached_property
    def executor(self) -> Executor:
        """Constructed at the first access: a group of one rank never needs the buckets."""
        if self.sharding is None:
            return Executor(self.plan, self.params, self._recorder, self.reducer)
        return ShardedExecutor(self.plan, self.params, self._recorder, self.reducer, self.sharding)

    def gather(self) -> None:
        """Called after the optimizer has stepped, with or without a round: every rank gets the other ranks' updates."""
        self.executor.run(self._gathers)
