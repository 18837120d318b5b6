"""Issues the ops of a schedule: a table from op kind to what it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.plan import Bucket, Plan, signature_bits
from undertow.runtime import private
from undertow.runtime.binding import GradientBinding
from undertow.runtime.buckets import GradientBucket
from undertow.runtime.collectives import ReductionHandle, all_reduce_async
from undertow.runtime.group import OwnGroup
from undertow.runtime.recorder import Recorder
from undertow.runtime.trailer import Reading, Snapshot, TrailerCodec, Verdict, to_device
from undertow.schedule import Op, OpKind

# Late arrivals show in the first rounds of a plan and are expected from then on.
_NUM_ROUNDS_READ_AT_ONCE = 2


@dataclass(slots=True)
class Round:
    """One backward, or several that accumulate: what the executor is told, and what it finds out."""

    number: int  # of the synchronisation
    generation: int  # of the plan
    is_synchronised: bool
    not_arrived: Callable[[int], Sequence[int]]  # bucket -> positions without a new gradient on this rank
    has_repeats: Callable[[], bool]  # whether some parameter arrived more often than expected
    has_failed: bool = False
    is_launched: bool = False  # its last bucket has left
    unused: dict[int, list[int]] = field(default_factory=dict)  # bucket -> positions unused on this rank
    readings: list[Reading] = field(default_factory=list)
    busy_ms: tuple[float, ...] = ()


class Executor:
    """The buckets of one plan and what is in flight of them."""

    def __init__(
        self, plan: Plan, named_params: Sequence[tuple[str, Tensor]], group: OwnGroup, recorder: Recorder, *, average: bool
    ) -> None:
        self._group = group
        self._recorder = recorder
        self._averages = average and group.can_average  # inside the collective; else we divide before a sum
        self._wire_bytes = [bucket.wire_bytes for bucket in plan.buckets]
        self._bindings = [_binding(bucket, named_params) for bucket in plan.buckets]
        self._trailers = [
            TrailerCodec(bucket, binding.bucket, num_ranks=group.num_ranks, is_averaged=self._averages)
            for bucket, binding in zip(plan.buckets, self._bindings, strict=True)
        ]
        self._handles: dict[int, ReductionHandle] = {}
        self._signatures: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._snapshots: list[Snapshot] = []
        self._num_rounds = 0
        self._round: Round | None = None
        # Functions and no bound methods: an executor that held itself would keep the buckets of an old plan alive until
        # the garbage collector comes.
        self._table: dict[OpKind, Callable[[Executor, int, Round], None]] = {
            OpKind.PACK: Executor._pack,
            OpKind.ALL_REDUCE: Executor._all_reduce,
            OpKind.BIND: Executor._bind,
        }

    def begin(self, this_round: Round) -> None:
        self._round = this_round
        self._num_rounds += this_round.is_synchronised
        self._signatures.clear()
        for snapshot in [snapshot for snapshot in self._snapshots if snapshot.is_there()]:
            self._snapshots.remove(snapshot)
            reading = snapshot.read()
            if reading is not None:
                this_round.readings.append(reading)

    def run(self, ops: Sequence[Op]) -> None:
        """Issues `ops` in the given order."""
        assert self._round is not None  # begin() comes first
        for op in ops:
            with _profiler_range(op):
                self._table[op.kind](self, op.bucket or 0, self._round)

    def reduce_late_parts(self, buckets: Sequence[int]) -> None:
        """A second round for what arrived after these buckets had left, on any rank; blocks."""
        for index in buckets:
            bucket = self._bindings[index].bucket
            part = self._bindings[index].late_contribution()
            numel = bucket.bucket_tensor.numel()
            self._reduce(part, numel).wait()
            # The mean of a sum is the sum of the means: what was reduced before stays as it is.
            bucket.bucket_tensor.add_(part[:numel])

    def _pack(self, index: int, this_round: Round) -> None:
        binding = self._bindings[index]
        if not this_round.is_synchronised:
            binding.take()
            return
        self._recorder.ready(index, num_bytes=self._wire_bytes[index])
        unused = binding.take(this_round.not_arrived(index))
        this_round.unused[index] = unused
        is_last = index == len(self._bindings) - 1
        self._trailers[index].write(
            unused=unused,
            signature=self._signature(binding.bucket.storage, this_round),
            verdict=self._verdict(this_round) if is_last else None,
        )

    def _all_reduce(self, index: int, _round: Round) -> None:
        bucket = self._bindings[index].bucket
        self._recorder.launches(index)
        handle = self._reduce(bucket.storage, bucket.bucket_tensor.numel())
        self._handles[index] = handle
        self._recorder.launched(index, handle)

    def _bind(self, index: int, this_round: Round) -> None:
        binding, handle = self._bindings[index], self._handles.pop(index, None)
        if handle is None:
            binding.give()
            return
        self._recorder.wait_begins(index)
        handle.wait()
        self._recorder.wait_ends(index)
        binding.give(self._used_elsewhere(index, this_round))

    def _used_elsewhere(self, index: int, this_round: Round) -> Collection[int]:
        """Reads the trailer: positions of parameters that are unused here and were used on another rank."""
        trailer = self._trailers[index]
        if not self._must_read_now(index, this_round):
            self._snapshots.append(trailer.snapshot())
            return ()
        if index == len(self._bindings) - 1:
            this_round.busy_ms = trailer.busy_ms()
        reading = trailer.read()
        if reading is None:
            return ()
        this_round.readings.append(reading)
        return reading.used

    def _must_read_now(self, index: int, this_round: Round) -> bool:
        """On a device reading makes the host wait: only where this rank needs to know, and while habits are learned."""
        is_on_host = self._bindings[index].bucket.storage.device.type == "cpu"
        return is_on_host or bool(this_round.unused[index]) or self._num_rounds <= _NUM_ROUNDS_READ_AT_ONCE

    def _reduce(self, tensor: Tensor, numel: int) -> ReductionHandle:
        if self._averages:
            return all_reduce_async(tensor, self._group.process_group, dist.ReduceOp.AVG)
        tensor[:numel].div_(self._group.num_ranks)
        return all_reduce_async(tensor, self._group.process_group, dist.ReduceOp.SUM)

    def _signature(self, like: Tensor, this_round: Round) -> Tensor:
        kind = like.dtype, like.device
        if kind not in self._signatures:
            bits = signature_bits(step=this_round.number, generation=this_round.generation, mode=0)
            self._signatures[kind] = to_device(bits, *kind)
        return self._signatures[kind]

    def _verdict(self, this_round: Round) -> Verdict:
        in_flight = sorted(self._handles) if this_round.has_repeats() else ()
        return Verdict(
            rank=self._group.rank,
            has_failed=this_round.has_failed,
            late_buckets=[index for index in in_flight if self._bindings[index].catch_late()],
            busy_ms=self._recorder.busy_ms(),
        )


def _binding(bucket: Bucket, named_params: Sequence[tuple[str, Tensor]]) -> GradientBinding:
    chosen = [named_params[param] for param in bucket.params]
    params, names = [param for _, param in chosen], [name for name, _ in chosen]
    return GradientBinding(GradientBucket(bucket.index, bucket.num_bytes, params, layout=bucket), params, names)


def _profiler_range(op: Op) -> AbstractContextManager[object]:
    if not private.is_profiling():
        return nullcontext()
    return torch.profiler.record_function(f"undertow.{op.label}")
