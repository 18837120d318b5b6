"""One bucket in training: its memory and `.grad`, its trailer, and its collective in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from undertow.buckets.binding import Binding, BucketStorage, DenseBinding, SparseBinding
from undertow.buckets.finite import FiniteCheck
from undertow.buckets.recorder import BucketMarks, Recorder
from undertow.buckets.reducer import Reducer
from undertow.buckets.trailer import TrailerCodec
from undertow.errors import listed
from undertow.plan import Bucket, Plan
from undertow.ranks.comm_hook import HookedBucket
from undertow.ranks.transport import Handle, OwnGroup
from undertow.schedule import DDP, OpKind, Strategy


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that all buckets of a plan share."""

    plan: Plan
    reducer: Reducer
    recorder: Recorder
    finite: FiniteCheck | None  # None if nobody asks whether gradients are finite


class Layout(Protocol):
    """Where the parameters and the reduced gradients of a plan lie: whole on every rank, or in
    shards."""

    @property
    def strategy(self) -> Strategy: ...

    @property
    def group(self) -> OwnGroup:
        """The ranks that its reductions wait for."""

    @property
    def holds_shards(self) -> bool:
        """True if ranks have shards of a gradient that was not set to zero."""

    def live_buckets(self, shared: Shared, params: Sequence[Tensor]) -> list[LiveBucket]:
        """Returns the buckets of the plan, in its order."""

    def round_begins(self) -> None:
        """Called when a round starts."""

    def wait_for_parameters(self) -> None:
        """Waits until all parameters that an optimizer has updated have arrived."""

    def make_gradients_whole(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        """Called before gradients move to another plan.

        Raises PhaseError if ranks have shards of one of them.
        """


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """Every rank has whole parameters and gradients."""

    group: OwnGroup
    strategy: Strategy = DDP
    holds_shards: bool = False

    def live_buckets(self, shared: Shared, params: Sequence[Tensor]) -> list[LiveBucket]:
        return [
            LiveBucket(bucket, _binding(bucket, [params[index] for index in bucket.params]), shared)
            for bucket in shared.plan.buckets
        ]

    def round_begins(self) -> None:
        """Nothing is in flight between rounds."""

    def wait_for_parameters(self) -> None:
        """Parameters never leave."""

    def make_gradients_whole(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        """They are."""


def _binding(bucket: Bucket, params: Sequence[Tensor]) -> Binding:
    if bucket.is_sparse:
        return SparseBinding(BucketStorage(bucket, ()), params)
    return DenseBinding(BucketStorage(bucket, params), params)


class LiveBucket:
    """One bucket whose gradients are reduced whole."""

    reduction: ClassVar = OpKind.ALL_REDUCE

    def __init__(self, layout: Bucket, binding: Binding, shared: Shared) -> None:
        flat, reducer = binding.storage.flat, shared.reducer
        self.layout, self.binding, self.shared = layout, binding, shared
        divisor = reducer.trailer_divisor
        self.trailer = TrailerCodec(
            layout, binding.storage, divisor=divisor, rank=reducer.group.rank
        )
        self.label = _label_of(layout, shared.plan)  # in messages
        self.handles: list[Handle] = []
        self.marks: BucketMarks  # of the last reduction
        self.own: Tensor | None = None  # a copy of its memory before the last reduction
        self.is_packed = False  # by a round that only accumulates
        self._late: tuple[Sequence[Tensor], list[Handle]] | None = None  # in a second collective
        self._reduce_flat = reducer.reducing(flat.dtype)
        self.wire_bytes = reducer.wire_bytes(layout)

    def launch(self, *, keeps_own: bool, is_apart: bool, is_awaited_at_once: bool) -> None:
        """Sends the packed gradients and the trailer.

        Args:
            keeps_own: A copy of this rank's gradients stays in `own` if the reduction rounds them.
            is_apart: The result must not replace an earlier one; only shards have memory for that.
            is_awaited_at_once: The end of the collective needs no mark: the wait has one.
        """
        layout, reducer, recorder = self.layout, self.shared.reducer, self.shared.recorder
        if self.shared.finite is not None:
            self.shared.finite.look(self.binding, layout, self.trailer)
        flat = self.binding.storage.flat
        is_kept = keeps_own and not layout.is_sparse and reducer.rounds(flat.dtype)
        self.own = flat.clone() if is_kept else None
        self.marks.launched = recorder.mark()
        if layout.slots and (layout.is_sparse or reducer.hook is not None):
            # Values outside of the bucket, or for the hook alone, leave the trailer to a separate
            # small collective.
            self.handles = [
                *self._reduce(self.binding.values()),
                reducer.reduce(flat[layout.trailer.start :]),
            ]
        else:
            self.handles = [self._reduce_flat(flat)]
        if not is_awaited_at_once:
            recorder.completes(self.marks, self.handles[0])

    def launch_across(self) -> None:
        """Reduces the shard over the second axis of a mesh; only a sharded bucket can."""
        raise NotImplementedError

    def wait(self) -> None:
        """Waits for the collective."""
        recorder, handles = self.shared.recorder, self.handles
        self.handles = []
        self.marks.wait_start = recorder.mark()
        for handle in handles:
            handle.wait()
        self.marks.wait_stop = recorder.mark()

    def launch_late(self) -> None:
        """Reduces, in a second round, the gradients that arrived after the launch, on any rank."""
        values = self.binding.late_values()
        if self.own is not None:
            self.own[: values[0].numel()] += values[0]
        self._late = values, self._reduce(values)

    def wait_for_late(self) -> Sequence[Tensor] | None:
        """Waits for these gradients.

        Returns them as `Binding.late_values` lays them out, or None if there are none.
        """
        if self._late is None:
            return None
        (values, handles), self._late = self._late, None
        with self.shared.reducer.group.waiting(f"what came late for {self.label}"):
            for handle in handles:
                handle.wait()
        return values

    def own_gradients(self) -> dict[int, tuple[Tensor, bool]]:
        """Returns this rank's gradients that were kept, by parameter, and whether `.grad` is still
        their result."""
        binding = self.binding
        if self.own is None or not isinstance(binding, DenseBinding):
            return {}
        views = binding.storage.views_of(self.own)
        return {
            param: (grad, binding.is_unchanged(position))
            for position, (param, grad) in enumerate(zip(self.layout.params, views, strict=True))
        }

    def _reduce(self, values: Sequence[Tensor]) -> list[Handle]:
        reducer, layout, params = self.shared.reducer, self.layout, self.binding.params
        if reducer.hook is None:
            return [reducer.reduce(value) for value in values]
        of_values = [[param] for param in params] if layout.is_sparse else [params]
        last = len(values) - 1 if layout.trailer.facts else None
        return [
            reducer.hook.start(
                HookedBucket(layout.index, value, of_value, is_last=place == last), reducer.group
            )
            for place, (value, of_value) in enumerate(zip(values, of_values, strict=True))
        ]


def _label_of(bucket: Bucket, plan: Plan) -> str:
    names = [repr(plan.params[index].name) for index in dict.fromkeys(bucket.params)]
    return f"bucket {bucket.index} ({listed(names) or 'flags only'})"
