"""Issues the ops of a plan under a sharded optimizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undertow.plan import Bucket, Plan
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.executor import Executor, LiveBucket
from undertow.runtime.execute.round import RoundKind, RoundResult
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.sharded.in_backward import GathersInBackward
from undertow.runtime.sharded.layout import Sharding
from undertow.schedule import OpKind


class ShardedExecutor(Executor):
    """Issues the ops of one plan of which each rank has its shards of the gradients, in `sharding`."""

    reduction = OpKind.REDUCE_SCATTER

    def __init__(self, plan: Plan, params: Sequence[Tensor], recorder: Recorder, reducer: Reducer, sharding: Sharding) -> None:
        self._sharding = sharding
        super().__init__(plan, params, recorder, reducer)
        self._group = sharding.groups.shard.group

    def begin(self, result: RoundResult) -> None:
        super().begin(result)
        sharding, this_round, in_backward = self._sharding, result.round, self._sharding.in_backward
        result.steps_in_backward = in_backward is not None
        for split in sharding.splits.values():
            split.begin_round()
        sharding.gathers.round_begins()
        if in_backward is not None and this_round.is_synchronized and this_round.kind is not RoundKind.RETIRE:
            result.steps = in_backward.begin_round(sharding, is_last=this_round.is_last)

    def _binding(self, bucket: Bucket) -> Any:
        return self._sharding.binding(bucket)

    def _reduce_scatter(self, bucket: LiveBucket) -> None:
        binding, layout, result = bucket.binding, bucket.layout, self._result
        is_apart = result.has_failed or result.round.rebinds is not None or binding.live
        binding.reduced = torch.empty_like(binding.shard) if is_apart else binding.shard
        bucket.marks.launched = self._recorder.mark()
        pack = binding.packing()

        def pack_and_look() -> None:
            pack()
            self._mark_nonfinite(bucket)

        trailer, exchanges = range(bucket.trailer_start, layout.storage_numel), self._sharding.groups.shard
        bucket.handles = [exchanges.reduce_scatter(binding.storage.flat, binding.reduced, trailer=trailer, pack=pack_and_look)]
        self._recorder.completes(bucket.marks, bucket.handles[0])

    def _all_reduce_shard(self, bucket: LiveBucket) -> None:
        """Sums the shards of all replicas, after the reduce-scatter inside this one."""
        layout, replicate = bucket.layout, self._sharding.groups.replicate
        assert replicate is not None  # the schedule of a strategy with two axes
        trailer = bucket.binding.storage.flat[bucket.trailer_start : layout.storage_numel]
        bucket.handles = [replicate.all_reduce_behind(bucket.handles[0], bucket.binding.reduced, trailer=trailer)]
        self._recorder.completes(bucket.marks, bucket.handles[0])

    def _step(self, bucket: LiveBucket) -> None:
        in_backward, gathers = self._sharding.in_backward, self._sharding.gathers
        result, index = self._result, bucket.layout.index
        assert in_backward is not None  # the schedule of steps in backward
        assert isinstance(gathers, GathersInBackward)
        # Now: a backward that fails later says nothing about a bucket that was launched before, and that all ranks step alike.
        is_sound, weights = not bucket.is_unsound, result.round.weights
        weighs = is_sound or result.round.kind is RoundKind.RETIRE
        if result.steps:
            gathers.step_begins(index)
        reduced = bucket.handles[0]

        def step() -> None:
            reduced.wait()  # it is complete, and raises here if it has failed
            is_alike = self._settle(bucket, result, weighs=weighs)
            if result.steps and is_sound and is_alike and (weights is None or weights.is_sound()):
                in_backward.update(index)

        gathers.steps[index] = self._sharding.groups.after_reductions(step)
        bucket.handles.append(gathers.steps[index])

    def _settle(self, bucket: LiveBucket, result: RoundResult, *, weighs: bool) -> bool:
        """Reads the trailer of a reduced bucket; returns True if the bucket may be stepped, on which all ranks agree."""
        binding, this_round, num_readings = bucket.binding, result.round, len(result.readings)
        if weighs and this_round.weights is not None:
            sums = this_round.weights.sums()
            binding.weigh(divisor=sums.divisor, keep=sums.keep)
        elif this_round.rescale != 1.0:
            binding.reduced.mul_(this_round.rescale)
        binding.settle(self._used_elsewhere(bucket, result))
        is_stopped = self._finite is not None and self._finite.stops_updates and bucket.layout.index in result.nonfinite
        readings = result.readings[num_readings:]
        return not is_stopped and not (readings and any(reading.ranks_differ for reading in readings))

    def _bind(self, bucket: LiveBucket) -> None:
        with self._group.waiting(bucket.label):
            if not self._await(bucket):
                return
            if bucket.binding.settled is None:
                self._settle(bucket, self._result, weighs=not self._result.has_failed)
            bucket.binding.bind()
            if isinstance(self._sharding.gathers, GathersInBackward):
                self._sharding.gathers.being_stepped.discard(bucket.layout.index)

    def _all_gather(self, bucket: LiveBucket) -> None:
        # After a change the result belongs to the old plan, whose parameters may have become others.
        is_read = self._result is None or self._result.round.kind is not RoundKind.RETIRE
        self._sharding.gathers.launch(bucket.layout.index, is_read=is_read)

    ops = Executor.ops | {
        OpKind.REDUCE_SCATTER: _reduce_scatter,
        OpKind.ALL_REDUCE: _all_reduce_shard,
        OpKind.STEP: _step,
        OpKind.BIND: _bind,
        OpKind.ALL_GATHER: _all_gather,
    }
