"""Issues the ops of a schedule: a table from op kind to the function that does it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, ClassVar

import torch
from torch import Tensor

from undertow.errors import UndertowError
from undertow.plan import Bucket, Plan, signature_of
from undertow.runtime.comm.collectives import P2PCollectives
from undertow.runtime.comm.comm_hook import HookedBucket
from undertow.runtime.comm.handles import Handle
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.hooks import users_hooks
from undertow.runtime.execute.round import RoundKind, RoundResult
from undertow.runtime.gradients.binding import Binding, DenseBinding, SparseBinding
from undertow.runtime.gradients.finite import FiniteCheck
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.gradients.storage import BucketStorage
from undertow.runtime.gradients.trailer import Snapshot, TrailerCodec, Verdict
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.torch_private import private
from undertow.schedule import Op, OpKind

# Late arrivals show in the first rounds of a plan and are expected from then on.
_NUM_ROUNDS_READ_AT_ONCE = 2
_NUM_STEPS_TOLD_APART = 64  # by trailers; a codec keeps the bits that it has written, and need not keep more

_gradient_of = attrgetter("grad")


@dataclass(slots=True, eq=False)
class LiveBucket:
    """One bucket of a plan in training: its `.grad` and memory, its trailer, and its collective in flight."""

    layout: Bucket
    binding: Binding
    trailer: TrailerCodec
    label: str  # in messages
    wire_bytes: int
    trailer_start: int  # in the bucket's memory
    reduce: Callable[[Tensor], Handle]  # starts to reduce its memory
    is_on_host: bool
    marks: Any = None  # BucketMarks of its last reduction
    handles: list[Handle] = field(default_factory=list)
    late: tuple[Sequence[Tensor], list[Handle]] | None = None  # gradients that arrived after the launch, in a second collective
    own: Tensor | None = None  # a copy of its memory before the last reduction
    is_packed: bool = False  # by a round that only accumulates


class Executor:
    """Issues the ops of one plan whose gradients are whole on every rank; `reducer` says how they are reduced."""

    reduction = OpKind.ALL_REDUCE

    def __init__(self, plan: Plan, params: Sequence[Tensor], recorder: Recorder, reducer: Reducer) -> None:
        self._group, self._recorder, self._reducer = reducer.group, recorder, reducer
        self._params = tuple(params)
        self.buckets = [self._live(bucket, plan, self._binding(bucket)) for bucket in plan.buckets]
        self._finite = None if reducer.config.nonfinite == "ignore" else FiniteCheck(reducer)
        self._snapshots: list[Snapshot] = []
        self._num_rounds, self._is_profiling = 0, False
        self._result: Any = None  # the RoundResult of `begin`, which comes first

    def is_completed(self) -> bool:
        """Returns True if the collectives of all buckets are complete."""
        return all(handle.is_completed() for bucket in self.buckets for handle in bucket.handles)

    def begin(self, result: RoundResult) -> None:
        """Begins the round of `result`, into which the ops write from now on."""
        self._result, self._is_profiling = result, private.is_profiling()
        if self._reducer.hook is not None:
            self._reducer.hook.begin_round()
        self._num_rounds += result.round.is_synchronized
        if self._finite is not None:
            self._finite.begin()
        if self._snapshots:
            there = [snapshot for snapshot in self._snapshots if snapshot.is_there()]
            self._snapshots = [snapshot for snapshot in self._snapshots if snapshot not in there]
            result.readings += filter(None, (snapshot.read() for snapshot in there))

    def run(self, ops: Sequence[Op]) -> None:
        """Issues `ops`, at least one, in the given order, and tells the observer of each, if there is one."""
        is_waiting = ops[0].kind is OpKind.BIND  # a bucket names its own wait
        if not is_waiting:
            self._group.watch.check()
        try:
            if self._recorder.observer is None and not self._is_profiling:
                for op in ops:
                    self.ops[op.kind](self, self.buckets[op.bucket or 0])
            else:
                self._run_observed(ops)
        except BaseException as error:
            # These messages must be complete on every rank.
            if not is_waiting and not isinstance(error, UndertowError):
                self._group.watch.fail(error)
            raise

    def _run_observed(self, ops: Sequence[Op]) -> None:
        observer = self._recorder.observer
        for op in ops:
            with (
                torch.profiler.record_function(f"undertow.{op.label}") if self._is_profiling else nullcontext(),
                nullcontext() if observer is None else observer(op),
            ):
                self.ops[op.kind](self, self.buckets[op.bucket or 0])

    def let_go(self) -> None:
        """Frees the buckets. The next plan's buckets then take no pages that are new to the process.

        If there is no memory for them, this plan is gone too, and so is the training.
        """
        for bucket in self.buckets:
            bucket.binding.storage.release()
        if isinstance(self._reducer.shard_exchanges, P2PCollectives):
            self._reducer.shard_exchanges.free.clear()

    def take_over_readings(self, before: Executor) -> None:
        """Takes the trailers of the last rounds under another plan that are still on their way to the host."""
        self._snapshots += before._snapshots

    def look(self) -> None:
        """Called when a step begins: marks present tensors in `.grad` as known."""
        for bucket in self.buckets:
            bucket.binding.look()

    def written(self, params: Collection[int]) -> set[int]:
        """Returns the `params` whose `.grad` was written without a gradient from autograd."""
        if not params:
            return set()
        return {
            param
            for bucket in self.buckets
            for position, param in enumerate(bucket.layout.params)
            if param in params and bucket.binding.is_written(position)
        }

    def has_result(self) -> bool:
        """Returns True if some `.grad` still holds the result of a round, changed or not, and was not zeroed."""
        return any(bucket.binding.has_result() for bucket in self.buckets)

    def own_gradients(self) -> dict[int, tuple[Tensor, bool]]:
        """Returns this rank's gradients that were kept, by parameter, and whether `.grad` is still what they were reduced to."""
        return {
            param: (grad, bucket.binding.is_unchanged(position))
            for bucket in self.buckets
            if bucket.own is not None and isinstance(bucket.binding, DenseBinding)
            for position, (param, grad) in enumerate(
                zip(bucket.layout.params, bucket.binding.storage.views_of(bucket.own), strict=True)
            )
        }

    def launch_late_parts(self, indices: Sequence[int]) -> None:
        """Reduces, in a second round, the gradients that arrived after these buckets had been launched, on any rank."""
        for index in indices:
            bucket = self.buckets[index]
            values = bucket.binding.late_values()
            if bucket.own is not None:
                bucket.own[: values[0].numel()] += values[0]
            bucket.late = values, self._reduce(bucket, values)

    def add_late_parts(self) -> None:
        """Waits for that round, and adds its results."""
        for bucket in self.buckets:
            if bucket.late is None:
                continue
            (values, handles), bucket.late = bucket.late, None
            with self._group.waiting(f"what came late for {bucket.label}"):
                for handle in handles:
                    handle.wait()
            self._note_nonfinite(bucket, values)
            if self._result.round.rescale != 1.0:
                self._rescale(values)
            bucket.binding.add_late(values)

    def _live(self, layout: Bucket, plan: Plan, binding: Binding) -> LiveBucket:
        reducer, flat = self._reducer, binding.storage.flat
        trailer = TrailerCodec(layout, binding.storage, divisor=reducer.trailer_divisor, rank=reducer.group.rank)
        return LiveBucket(
            layout,
            binding,
            trailer,
            _label_of(layout, plan),
            reducer.wire_bytes(layout),
            layout.trailer.start,
            reducer.reducing(flat.dtype),
            flat.device.type == "cpu",
        )

    def _binding(self, bucket: Bucket) -> Binding:
        params = [self._params[index] for index in bucket.params]
        if bucket.is_sparse:
            return SparseBinding(BucketStorage(bucket, ()), params)
        return DenseBinding(BucketStorage(bucket, params), params)

    def _note_nonfinite(self, bucket: LiveBucket, late: Sequence[Tensor]) -> None:
        """Late parts have no trailer; they are looked at after their reduction, when all ranks have the same."""
        bad = None if self._finite is None else self._finite.bad_slots(late, bucket.layout)
        positions = frozenset(() if bad is None else bad.nonzero().flatten().tolist())
        if positions:
            found, index = self._result.nonfinite, bucket.layout.index
            found[index] = positions | found.get(index, frozenset())

    def _pack(self, bucket: LiveBucket) -> None:
        result, binding, index = self._result, bucket.binding, bucket.layout.index
        if result.round.kind is RoundKind.ACCUMULATE:
            if not binding.has_graph():
                bucket.is_packed = True
                binding.pack_local()
            return
        bucket.marks = self._recorder.ready(index, num_bytes=bucket.wire_bytes, kind=self.reduction)
        this_round = result.round
        arrivals = this_round.arrivals
        has_all = arrivals is not None and arrivals.buckets[index].is_full
        not_arrived = () if has_all else this_round.not_arrived(index)
        unused = result.unused[index] = binding.pack(not_arrived)
        if arrivals is not None and len(unused) > len(not_arrived) and not result.has_failed:
            # Without a hook of the user's, the gradient that arrived was undefined, as of a function that returns None for it.
            gone = set(map(bucket.layout.params.__getitem__, unused)) - arrivals.missing(index)
            result.taken.update(param for param in gone if users_hooks(self._params[param]))
        result.keeps_earlier |= bool(binding.live)
        bucket.trailer.write(
            unused=unused,
            signature=signature_of(
                generation=this_round.generation, mode=this_round.mode, has_other_op=this_round.op is not None
            ),
            step=this_round.number % _NUM_STEPS_TOLD_APART,
            verdict=self._verdict() if bucket.layout.trailer.late else None,
        )

    def _all_reduce(self, bucket: LiveBucket) -> None:
        if self._finite is not None:
            self._finite.look(bucket.binding, bucket.layout, bucket.trailer)
        flat = bucket.binding.storage.flat
        keeps_own = self._result.round.keeps_own and not bucket.layout.is_sparse and self._reducer.rounds(flat.dtype)
        bucket.own = flat.clone() if keeps_own else None
        bucket.marks.launched = self._recorder.mark()
        if bucket.layout.slots and (bucket.layout.is_sparse or self._reducer.hook is not None):
            # Values outside of the bucket, or for the hook alone, leave the trailer to a separate small collective.
            values = bucket.binding.values()
            bucket.handles = [*self._reduce(bucket, values), self._reducer.reduce(flat[bucket.trailer_start :])]
        else:
            bucket.handles = [bucket.reduce(flat)]
        # At the end of the backward of one model, a single bucket is waited for at once, and is complete when that wait ends.
        if len(self.buckets) > 1 or len(self._recorder.in_backward) > 1 or private.graph_task_id() == -1:
            self._recorder.completes(bucket.marks, bucket.handles[0])

    def _bind(self, bucket: LiveBucket) -> None:
        result = self._result
        with self._group.watch.waiting(bucket.label):
            if not self._await(bucket):
                return
            if result.round.rescale != 1.0:
                self._rescale(bucket.binding.values())
            bucket.binding.bind(self._used_elsewhere(bucket, result))

    def _await(self, bucket: LiveBucket) -> bool:
        """Waits for the collective of a bucket; returns False if it was only packed, and is bound now, or not at all."""
        handles, bucket.handles = bucket.handles, []
        if not handles:
            if bucket.is_packed:
                bucket.is_packed = False
                bucket.binding.bind_local()
            return False
        bucket.marks.wait_start = self._recorder.mark()
        for handle in handles:
            handle.wait()
        bucket.marks.wait_stop = self._recorder.mark()
        return True

    def _used_elsewhere(self, bucket: LiveBucket, result: RoundResult) -> Collection[int]:
        """Reads the trailer; returns the positions to bind that are unused here and were used on another rank."""
        index = bucket.layout.index
        if not bucket.is_on_host and not self._must_read_now(bucket, result):
            self._snapshots.append(bucket.trailer.snapshot())
            return ()
        if bucket.layout.trailer.late:  # the last bucket
            result.busy_ms = bucket.trailer.busy_ms()
        # torch's name for it
        with torch.profiler.record_function("search_unused_parameters") if self._is_profiling else nullcontext():
            reading = bucket.trailer.read()
        if reading is None:
            return ()
        result.readings.append(reading)
        if reading.nonfinite:
            result.nonfinite[index] = reading.nonfinite
        return () if result.round.kind is RoundKind.RETIRE else reading.used

    def _must_read_now(self, bucket: LiveBucket, result: RoundResult) -> bool:
        """On a device, reading makes the host wait: only if this rank needs to know, and while habits are learned."""
        needs_to_know = bool(result.unused[bucket.layout.index])
        return needs_to_know or result.round.is_read_at_once or self._num_rounds <= _NUM_ROUNDS_READ_AT_ONCE

    def _reduce(self, bucket: LiveBucket, values: Sequence[Tensor]) -> list[Handle]:
        hook, layout, params = self._reducer.hook, bucket.layout, bucket.binding.params
        if hook is None:
            return [self._reducer.reduce(value) for value in values]
        of_values = [[param] for param in params] if layout.is_sparse else [params]
        last = len(values) - 1 if layout.trailer.late else None
        return [
            hook.start(HookedBucket(layout.index, value, of_value, is_last=place == last), self._group)
            for place, (value, of_value) in enumerate(zip(values, of_values, strict=True))
        ]

    def _rescale(self, values: Sequence[Tensor]) -> None:
        for value in values:
            value.mul_(self._result.round.rescale)

    def _verdict(self) -> Verdict:
        # No `.grad` holds anything except late gradients, from autograd or written by some function, which no hook reports. This
        # includes the last bucket, just packed.
        result = self._result
        arrivals = result.round.arrivals
        has_repeats = arrivals is not None and arrivals.has_repeats
        # A single bucket has just taken all that has arrived.
        has_late = has_repeats or (len(self.buckets) > 1 and any(map(is_not, map(_gradient_of, self._params), repeat(None))))
        return Verdict(
            rank=self._reducer.group.rank,
            has_failed=result.has_failed,
            has_taken=bool(result.taken),
            has_changed=result.round.kind is RoundKind.RETIRE,
            late_buckets=[bucket.layout.index for bucket in self.buckets if bucket.binding.catch_late()] if has_late else (),
            busy_ms=self._recorder.busy_ms(),
            alike=result.round.alike,
        )

    # Functions and not bound methods: an executor that held itself would keep the buckets of an old plan alive until the garbage
    # collector runs.
    ops: ClassVar[dict[OpKind, Callable[[Any, LiveBucket], None]]] = {
        OpKind.PACK: _pack,
        OpKind.ALL_REDUCE: _all_reduce,
        OpKind.BIND: _bind,
    }


def _label_of(bucket: Bucket, plan: Plan) -> str:
    names = [repr(plan.params[index].name) for index in dict.fromkeys(bucket.params)]
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return f"bucket {bucket.index} ({shown or 'flags only'})"


class ShardedExecutor(Executor):
    """Issues the ops of one sharded plan: each rank has its shards of the gradients, in `sharding`."""

    reduction = OpKind.REDUCE_SCATTER

    def __init__(self, plan: Plan, params: Sequence[Tensor], recorder: Recorder, reducer: Reducer, sharding: Sharding) -> None:
        self._sharding = sharding
        super().__init__(plan, params, recorder, reducer)
        self._group = sharding.groups.shard.group

    def begin(self, result: RoundResult) -> None:
        super().begin(result)
        gathers = self._sharding.gathers
        if gathers.in_flight:  # no forward has waited; autograd then detects most parameters that were read too early
            gathers.wait_for_all()

    def _binding(self, bucket: Bucket) -> Binding:
        return self._sharding.binding(bucket)

    def _reduce_scatter(self, bucket: LiveBucket) -> None:
        layout, result = bucket.layout, self._result
        binding = self._sharding.bindings[layout.index]
        is_apart = result.has_failed or result.round.kind is RoundKind.RETIRE or binding.live
        binding.reduced = torch.empty_like(binding.shard) if is_apart else binding.shard
        bucket.marks.launched = self._recorder.mark()
        pack = binding.packing()

        def pack_and_look() -> None:
            pack()
            if self._finite is not None:
                self._finite.look(binding, layout, bucket.trailer)

        trailer, exchanges = range(bucket.trailer_start, layout.storage_numel), self._sharding.groups.shard
        bucket.handles = [exchanges.reduce_scatter(binding.storage.flat, binding.reduced, trailer=trailer, pack=pack_and_look)]
        self._recorder.completes(bucket.marks, bucket.handles[0])

    def _all_reduce_shard(self, bucket: LiveBucket) -> None:
        """Sums the shards of all replicas, after the reduce-scatter inside this one."""
        layout, replicate = bucket.layout, self._sharding.groups.replicate
        assert replicate is not None  # the schedule of a strategy with two axes
        reduced = self._sharding.bindings[layout.index].reduced
        trailer = bucket.binding.storage.flat[bucket.trailer_start : layout.storage_numel]
        bucket.handles = [replicate.all_reduce_behind(bucket.handles[0], reduced, trailer=trailer)]
        self._recorder.completes(bucket.marks, bucket.handles[0])

    def _all_gather(self, bucket: LiveBucket) -> None:
        self._sharding.gathers.launch(bucket.layout.index)

    ops = Executor.ops | {
        OpKind.REDUCE_SCATTER: _reduce_scatter,
        OpKind.ALL_REDUCE: _all_reduce_shard,
        OpKind.ALL_GATHER: _all_gather,
    }
