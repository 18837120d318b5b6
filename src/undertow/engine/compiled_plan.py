"""A plan ready to run: its buckets, and the ops of each kind of round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from undertow.buckets.bucket import Layout, LiveBucket, Shared
from undertow.buckets.recorder import Recorder
from undertow.buckets.reducer import Reducer
from undertow.buckets.trailer import Reading, Snapshot
from undertow.engine.tuning import Present
from undertow.errors import UndertowError
from undertow.plan import Plan
from undertow.ranks.transport import OwnGroup
from undertow.schedule import (
    Op,
    OpKind,
    Releases,
    Strategy,
    lower_accumulation,
    lower_data_parallel,
)
from undertow.torch_private import private

_LEAST_CUT_BYTES = 1024 * 1024  # torch cuts no smaller graphs
_NUM_ROUNDS_READ_AT_ONCE = 2  # on a device, where the host waits for it
T = TypeVar("T")
Acts: TypeAlias = Mapping[OpKind, Callable[[T, LiveBucket], object]]


class CompiledPlan:
    """A plan over `params`, ready to run; `generation` counts the plans of an engine.

    It takes the place of the plan `before`: trailers on their way pass to it, and memory for
    messages is freed, because others have other sizes.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        reducer: Reducer,
        recorder: Recorder,
        *,
        before: CompiledPlan | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.plan = plan
        self.params = tuple(params)
        # of this moment, as buckets are laid out
        self.strides = tuple(param.stride() for param in params)
        self.reducer, self.recorder = reducer, recorder
        self.layout = Layout(reducer.group) if layout is None else layout
        self.generation = 0
        self.snapshots: list[Snapshot] = []  # trailers on their way from a device to the host
        if before is not None:
            self.generation = before.generation + 1
            self.snapshots += before.snapshots
            before.release_messages()
        self.is_profiling = False  # torch's profiler runs
        self._num_rounds = 0
        schedule = lower_data_parallel(
            len(plan.buckets), self.strategy, overlap=reducer.config.overlap
        )
        self.synchronizing = Releases(schedule)
        self.gathers = tuple(op for op in schedule.ops if op.kind is OpKind.ALL_GATHER)

    @cached_property
    def buckets(self) -> Sequence[LiveBucket]:
        """Constructed at the first access: a group of one rank never needs them."""
        shared = Shared(self.plan, self.params, self.reducer, self.recorder)
        return self.layout.live_buckets(shared)

    @cached_property
    def group(self) -> OwnGroup:
        """The ranks that its reductions wait for."""
        return self.layout.group

    @cached_property
    def strategy(self) -> Strategy:
        return self.layout.strategy

    @cached_property
    def cut_bytes(self) -> int:
        """The bucket size at which torch.compile cuts graphs, or 0 if they stay whole."""
        largest = max((bucket.num_bytes for bucket in self.plan.buckets), default=0)
        return largest if self.plan.num_ranks > 1 and largest >= _LEAST_CUT_BYTES else 0

    @cached_property
    def accumulating(self) -> Releases:
        """The ops of a backward that only accumulates: the same under every strategy."""
        return Releases(lower_accumulation(len(self.plan.buckets)))

    @cached_property
    def adding_up_shards(self) -> Releases:
        """The ops of a backward that accumulates, if the strategy reduces micro-batches."""
        return Releases(lower_accumulation(len(self.plan.buckets), self.strategy))

    @property
    def present(self) -> Present:
        return Present(
            plan=self.plan, generation=self.generation, has_shards=self.strategy.gather is not None
        )

    def round_begins(self, *, is_synchronized: bool) -> list[Reading]:
        """Called when a round starts.

        Returns the contents of earlier trailers that have reached the host since, once. Only a
        synchronization takes them, because an accumulation draws no conclusions.
        """
        self.is_profiling = private.is_profiling()
        self._num_rounds += is_synchronized
        if self.reducer.hook is not None:
            self.reducer.hook.begin_round()
        if self.reducer.finite is not None:
            self.reducer.finite.begin()
        # In case no forward has. Autograd detects most parameters that were read too early.
        self.layout.wait_for_parameters()
        if not self.snapshots or not is_synchronized:
            return []
        there = [snapshot for snapshot in self.snapshots if snapshot.is_there()]
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot not in there]
        return [reading for snapshot in there if (reading := snapshot.read()) is not None]

    @property
    def is_learning(self) -> bool:
        """True in the first rounds, whose trailers are read at once on devices too.

        They show late arrivals, which the following rounds expect.
        """
        return self._num_rounds <= _NUM_ROUNDS_READ_AT_ONCE

    def issue(self, ops: Sequence[Op], acts: Acts[T], owner: T) -> None:
        """Issues `ops` in this order, and tells the observer of each, if there is one.

        Args:
            ops: Ops of this plan's schedules.
            acts: By kind, the function that issues an op: `act(owner, bucket)`.
            owner: The round, or the gathers, that these functions belong to.
        """
        if not ops:
            return
        is_waiting = ops[0].kind is OpKind.BIND  # a bucket names its own wait
        watch = self.group.watch
        if not is_waiting:
            watch.check()
        try:
            if self.recorder.observer is None and not self.is_profiling:
                for op in ops:
                    acts[op.kind](owner, self.buckets[op.bucket or 0])
            else:
                self._issue_observed(ops, acts, owner)
        except BaseException as error:
            # These messages must be complete on every rank.
            if not is_waiting and not isinstance(error, UndertowError):
                watch.fail(error)
            raise

    def _issue_observed(self, ops: Sequence[Op], acts: Acts[T], owner: T) -> None:
        observer = self.recorder.observer
        for op in ops:
            with (
                torch.profiler.record_function(f"undertow.{op.label}")
                if self.is_profiling
                else nullcontext(),
                nullcontext() if observer is None else observer(op),
            ):
                acts[op.kind](owner, self.buckets[op.bucket or 0])

    def is_completed(self) -> bool:
        """Returns True if the collectives of all buckets are complete."""
        return all(handle.is_completed() for bucket in self.buckets for handle in bucket.handles)

    def note_known(self) -> None:
        """Called when a step begins: marks present tensors in `.grad` as known."""
        for bucket in self.buckets:
            bucket.note_known()

    def written(self, params: Collection[int]) -> set[int]:
        """Returns the `params` whose `.grad` was written without a gradient from autograd."""
        if not params:
            return set()
        return {
            param
            for bucket in self.buckets
            for position, param in enumerate(bucket.spec.params)
            if param in params and bucket.is_written(position)
        }

    def has_result(self) -> bool:
        """Returns True if some `.grad` still holds the result of a round, changed or not, and was
        not zeroed."""
        return any(bucket.has_result() for bucket in self.buckets)

    def own_gradients(self) -> dict[int, tuple[Tensor, bool]]:
        """Returns this rank's gradients that were kept, by parameter, and whether `.grad` is still
        their result."""
        own: dict[int, tuple[Tensor, bool]] = {}
        for bucket in self.buckets:
            own.update(bucket.own_gradients())
        return own

    def release_messages(self) -> None:
        """Frees the memory that exchanges keep for later messages."""
        for exchanges in (self.reducer.exchanges, *self.layout.exchanges):
            if exchanges is not None:
                exchanges.release()

    def let_go(self) -> None:
        """Frees the buckets. The next plan's buckets then take no pages that are new to the
        process.

        If memory is too small for them, this plan is gone too, and training ends.
        """
        for bucket in self.buckets:
            bucket.release()
