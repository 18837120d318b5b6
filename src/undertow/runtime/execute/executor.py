"""Issues the ops of a schedule: a table from op kind to what it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_not

import torch
from torch import Tensor

from undertow.plan import Bucket, Plan, signature_bits
from undertow.runtime.comm.comm_hook import HookedBucket
from undertow.runtime.comm.handles import Handle
from undertow.runtime.comm.recorder import Observer, Recorder
from undertow.runtime.gradients.binding import Binding, DenseBinding, SparseBinding
from undertow.runtime.gradients.finite import FiniteCheck
from undertow.runtime.gradients.reducer import Reducer
from undertow.runtime.gradients.storage import GradientBucket
from undertow.runtime.gradients.trailer import Reading, Snapshot, TrailerCodec, Verdict, to_device
from undertow.runtime.gradients.weights import RoundWeights
from undertow.runtime.peers.waiting import label_of
from undertow.runtime.sharded.binding import ShardedBinding
from undertow.runtime.sharded.in_backward import GathersInBackward
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.torch_private import private
from undertow.schedule import Op, OpKind

# Late arrivals show in the first rounds of a plan and are expected from then on.
_NUM_ROUNDS_READ_AT_ONCE = 2

_gradient_of = attrgetter("grad")


@dataclass(slots=True)
class Round:
    """One backward, or several that accumulate: what the executor is told, and what it finds out."""

    number: int  # of the synchronization
    generation: int  # of the plan
    is_synchronized: bool
    not_arrived: Callable[[int], Sequence[int]]  # bucket -> positions without a new gradient on this rank
    has_repeats: Callable[[], bool]  # whether some parameter arrived more often than expected
    rebinds: Callable[[int], Collection[int]] | None = None  # bucket -> positions that take over others' values; None: all
    is_last: bool = True  # of the step, which adds up no more gradients
    mode: int | None = 0  # must be the same on every rank; None on one that goes by the others
    is_shadow: bool = False  # of a rank that has run out of data, and does not step
    rescale: float = 1.0  # of the mean over all ranks, where some of them have run out of data
    weighing: RoundWeights | None = None  # what the mean is divided by, where losses are sums
    steps: bool = False  # buckets are stepped in it as soon as they are reduced
    steps_in_backward: bool = False  # after a failure or a change a bucket tells so by its signature, and is not stepped
    has_failed: bool = False
    misuse: int = 0  # why, where it is a reduction by hand that cannot be right
    op: str | None = None  # of a reduction by hand, where it is not that of the settings
    has_changed: bool = False  # the parameters are no longer those of the plan
    has_other_buffers: bool = False  # than those that were compared
    is_read_at_once: bool = False  # on devices too: what its trailers say counts when it ends
    unused: dict[int, list[int]] = field(default_factory=dict)  # bucket -> positions unused on this rank
    readings: list[Reading] = field(default_factory=list)
    nonfinite: dict[int, frozenset[int]] = field(default_factory=dict)  # bucket -> positions, on any rank
    keeps_earlier: bool = False  # what the round brings is added to what earlier ones have brought
    busy_ms: tuple[float, ...] = ()


class Executor:
    """The buckets of one plan and what is in flight of them; `reducer` says how they are reduced."""

    def __init__(
        self, plan: Plan, params: Sequence[Tensor], recorder: Recorder, reducer: Reducer, sharding: Sharding | None
    ) -> None:
        self._rank = reducer.group.rank
        self._group = reducer.group if sharding is None else sharding.groups.shard.group
        self._labels = [label_of(bucket, plan) for bucket in plan.buckets]
        self._recorder = recorder
        self._reducer = reducer
        self._buckets = plan.buckets
        self._params = tuple(params)
        self._sharding = sharding
        self._bindings: list[Binding] = [
            _binding(bucket, [params[index] for index in bucket.params]) if sharding is None else sharding.binding(bucket)
            for bucket in plan.buckets
        ]
        self._trailers = [
            TrailerCodec(bucket, binding.bucket, divisor=reducer.trailer_divisor(binding.bucket.storage.dtype))
            for bucket, binding in zip(plan.buckets, self._bindings, strict=True)
        ]
        self._finite = None if reducer.nonfinite == "ignore" else FiniteCheck(reducer)
        self._handles: dict[int, list[Handle]] = {}
        self._unsound: set[int] = set()  # of the round, buckets that were packed without gradients, after a failure or a change
        self._packed: set[int] = set()  # in a round that does not communicate
        self._late: dict[int, tuple[Sequence[Tensor], list[Handle]]] = {}
        self._signatures: dict[tuple[torch.dtype, torch.device, bool], Tensor] = {}
        self._snapshots: list[Snapshot] = []
        self._num_rounds = 0
        self._round: Round | None = None
        # Functions and no bound methods: an executor that held itself would keep the buckets of an old plan alive until
        # the garbage collector comes.
        self._table: dict[OpKind, Callable[[Executor, int], None]] = {
            OpKind.PACK: Executor._pack,
            OpKind.ALL_REDUCE: Executor._all_reduce if sharding is None else Executor._all_reduce_shard,
            OpKind.REDUCE_SCATTER: Executor._reduce_scatter,
            OpKind.STEP: Executor._step,
            OpKind.BIND: Executor._bind,
            OpKind.ALL_GATHER: Executor._all_gather,
        }

    def begin(self, this_round: Round) -> None:
        self._round = this_round
        self._unsound.clear()
        if self._sharding is not None:
            self._sharding.begin_round()
            self._sharding.gathers.round_begins()
            in_backward = self._sharding.in_backward
            this_round.steps_in_backward = in_backward is not None
            if in_backward is not None and this_round.is_synchronized and not this_round.has_changed:
                this_round.steps = in_backward.begin_round(self._sharding, is_last=this_round.is_last)
        if self._reducer.hook is not None:
            self._reducer.hook.begin_round()
        self._num_rounds += this_round.is_synchronized
        if self._finite is not None:
            self._finite.begin()
        self._signatures.clear()
        for snapshot in [snapshot for snapshot in self._snapshots if snapshot.is_there()]:
            self._snapshots.remove(snapshot)
            reading = snapshot.read()
            if reading is not None:
                this_round.readings.append(reading)

    def run(self, ops: Sequence[Op]) -> None:
        """Issues `ops` in the given order, and tells the observer of each, if there is one."""
        observer = self._recorder.observer
        with self._group.launching() if ops and ops[0].kind is not OpKind.BIND else self._group.waiting():
            for op in ops if observer is None else _observed(ops, observer):
                with _profiler_range(op):
                    self._table[op.kind](self, op.bucket or 0)

    def take_over_readings(self, before: Executor) -> None:
        """Of the last rounds under another plan, whose trailers are still on their way to the host."""
        self._snapshots += before._snapshots

    def look(self) -> None:
        """A step begins, which may find in `.grad` what nobody has bound."""
        for binding in self._bindings:
            binding.look()

    def written(self, params: Collection[int]) -> set[int]:
        """Those of the parameters into whose `.grad` something has come of which autograd has not told."""
        return (
            {
                param
                for bucket, binding in zip(self._buckets, self._bindings, strict=True)
                for position, param in enumerate(bucket.params)
                if param in params and binding.is_written(position)
            }
            if params
            else set()
        )

    def has_result(self) -> bool:
        """Whether some `.grad` is still what `bind` has made it, or what somebody has made of that, but for zeros."""
        return any(binding.has_result() for binding in self._bindings)

    def launch_late_parts(self, buckets: Sequence[int]) -> None:
        """A second round for what arrived after these buckets had left, on any rank."""
        for index in buckets:
            values = self._bindings[index].late_values()
            self._late[index] = values, self._reduce(index, values)

    def add_late_parts(self) -> None:
        """Waits for that round."""
        assert self._round is not None  # the one whose late parts they are
        for index, (values, handles) in self._late.items():
            with self._group.waiting(f"what came late for {self._labels[index]}"):
                for handle in handles:
                    handle.wait()
            self._note_nonfinite(index, values, self._round)
            _rescale(values, self._round)
            self._bindings[index].add_late(values)
        self._late.clear()

    def _look(self, index: int) -> None:
        """Before a bucket leaves: says in its trailer which of its gradients are not finite."""
        if self._finite is not None:
            self._finite.look(self._bindings[index], self._buckets[index], self._trailers[index])

    def _note_nonfinite(self, index: int, late: Sequence[Tensor], this_round: Round) -> None:
        """Late parts, which had no trailer, are looked at when they are reduced: all ranks have the same."""
        bad = None if self._finite is None else self._finite.bad_slots(late, self._buckets[index])
        positions = frozenset(() if bad is None else bad.nonzero().flatten().tolist())
        if positions:
            this_round.nonfinite[index] = positions | this_round.nonfinite.get(index, frozenset())

    def _pack(self, index: int) -> None:
        binding, this_round = self._bindings[index], self._the_round
        if not this_round.is_synchronized:
            if not binding.has_graph():
                self._packed.add(index)
                binding.pack_local()
            return
        kind = OpKind.ALL_REDUCE if self._sharding is None else OpKind.REDUCE_SCATTER
        self._recorder.ready(index, num_bytes=self._reducer.wire_bytes(self._buckets[index]), kind=kind)
        if this_round.steps_in_backward and (this_round.has_failed or this_round.has_changed):
            self._unsound.add(index)
        unused = binding.pack(this_round.not_arrived(index))
        this_round.unused[index] = unused
        is_last = index == len(self._bindings) - 1
        self._trailers[index].write(
            unused=unused,
            signature=self._signature(binding.bucket.storage, this_round, is_sound=index not in self._unsound),
            verdict=self._verdict(this_round) if is_last else None,
        )
        if isinstance(binding, ShardedBinding):
            this_round.keeps_earlier |= binding.keeps_earlier
        else:
            self._look(index)

    def _all_reduce(self, index: int) -> None:
        binding, bucket = self._bindings[index], self._buckets[index]
        storage, trailer = binding.bucket.storage, bucket.trailer
        self._recorder.launches(index)
        if bucket.slots and (bucket.is_sparse or self._reducer.hook is not None):
            # What is not in the bucket, or is the hook's alone, leaves the trailer to a small collective of its own.
            handles = [*self._reduce(index, binding.values()), self._reducer.reduce(storage[trailer.start :], numel=0)]
        else:
            handles = [self._reducer.reduce(storage, numel=trailer.start)]
        self._handles[index] = handles
        self._recorder.launched(index, handles[0])

    def _reduce_scatter(self, index: int) -> None:
        binding, bucket, this_round = self._bindings[index], self._buckets[index], self._the_round
        assert isinstance(binding, ShardedBinding)  # the schedule is that of its strategy
        assert self._sharding is not None
        target = binding.target(is_apart=this_round.has_failed or this_round.rebinds is not None)
        trailer = range(bucket.trailer.start, bucket.storage_numel)
        self._recorder.launches(index)
        pack = binding.packing()

        def pack_and_look() -> None:
            pack()
            self._look(index)

        handle = self._sharding.groups.shard.reduce_scatter(binding.bucket.storage, target, trailer=trailer, pack=pack_and_look)
        self._handles[index] = [handle]
        self._recorder.launched(index, handle)

    def _all_reduce_shard(self, index: int) -> None:
        binding, bucket, sharding = self._bindings[index], self._buckets[index], self._sharding
        assert isinstance(binding, ShardedBinding)
        assert sharding is not None
        assert sharding.groups.replicate is not None  # the schedule is that of its strategy
        trailer = binding.bucket.storage[bucket.trailer.start : bucket.storage_numel]
        handle = sharding.groups.replicate.all_reduce_behind(self._handles[index][0], binding.reduced, trailer=trailer)
        self._handles[index] = [handle]
        self._recorder.launched(index, handle)

    def _step(self, index: int) -> None:
        sharding, this_round = self._sharding, self._the_round
        assert sharding is not None
        in_backward, gathers = sharding.in_backward, sharding.gathers
        assert in_backward is not None  # the schedule is its
        assert isinstance(gathers, GathersInBackward)
        # Now: a backward that fails later says nothing of a bucket that left before, with which all ranks go on alike.
        is_sound, weighing = index not in self._unsound, this_round.weighing
        weighs = is_sound or this_round.has_changed
        if this_round.steps:
            gathers.step_begins(index)
        reduced = self._handles[index][0]

        def step() -> None:
            reduced.wait()  # it is over, and raises here if it has failed
            is_alike = self._settle(index, this_round, weighs=weighs)
            if this_round.steps and is_sound and is_alike and (weighing is None or weighing.is_sound()):
                in_backward.update(index)

        gathers.steps[index] = in_backward.after_reductions(step)
        self._handles[index].append(gathers.steps[index])

    def _settle(self, index: int, this_round: Round, *, weighs: bool) -> bool:
        """Reads the trailer of a bucket that is reduced. Returns whether it may be stepped, which all ranks find alike."""
        binding = self._bindings[index]
        assert isinstance(binding, ShardedBinding)
        num_readings = len(this_round.readings)
        if weighs and this_round.weighing is not None:
            sums = this_round.weighing.sums()
            binding.weigh(divisor=sums.divisor, keep=sums.keep)
        elif this_round.rescale != 1.0:
            binding.reduced.mul_(this_round.rescale)
        used = self._used_elsewhere(index, this_round)
        binding.settle(used if this_round.rebinds is None else set(used).intersection(this_round.rebinds(index)))
        if self._finite is not None and self._finite.stops_updates and index in this_round.nonfinite:
            return False
        return not any(reading.ranks_differ for reading in this_round.readings[num_readings:])

    def _all_gather(self, index: int) -> None:
        assert self._sharding is not None
        # After a change what comes is of the old plan, whose parameters may have become others.
        is_read = self._round is None or not self._round.has_changed
        self._sharding.gathers.launch(index, is_read=is_read)

    @property
    def _the_round(self) -> Round:
        assert self._round is not None  # begin() comes first
        return self._round

    def _bind(self, index: int) -> None:
        binding, handles, this_round = self._bindings[index], self._handles.pop(index, None), self._the_round
        if handles is None:
            if index in self._packed:
                self._packed.remove(index)
                binding.bind_local()
            return
        self._recorder.wait_begins(index)
        with self._group.waiting(self._labels[index]):
            for handle in handles:
                handle.wait()
        self._recorder.wait_ends(index)
        if self._sharding is not None:
            self._bind_placeholders(self._sharding, index)
            return
        if this_round.weighing is not None or this_round.rescale != 1.0:
            _rescale(binding.values(), this_round)
        used = self._used_elsewhere(index, this_round)
        binding.bind(used if this_round.rebinds is None else set(used).intersection(this_round.rebinds(index)))

    def _bind_placeholders(self, sharding: Sharding, index: int) -> None:
        binding = self._bindings[index]
        assert isinstance(binding, ShardedBinding)
        if binding.settled is None:
            self._settle(index, self._the_round, weighs=not self._the_round.has_failed)
        binding.bind()
        if isinstance(sharding.gathers, GathersInBackward):
            sharding.gathers.being_stepped.discard(index)

    def _used_elsewhere(self, index: int, this_round: Round) -> Collection[int]:
        """Reads the trailer: positions of parameters that are unused here and were used on another rank."""
        trailer = self._trailers[index]
        if not self._must_read_now(index, this_round):
            self._snapshots.append(trailer.snapshot())
            return ()
        if index == len(self._bindings) - 1:
            this_round.busy_ms = trailer.busy_ms()
        with _profiler_range("search_unused_parameters"):  # torch's name for it
            reading = trailer.read()
        if reading is None:
            return ()
        this_round.readings.append(reading)
        if reading.nonfinite:
            this_round.nonfinite[index] = reading.nonfinite
        return reading.used

    def _must_read_now(self, index: int, this_round: Round) -> bool:
        """On a device reading makes the host wait: only where this rank needs to know, and while habits are learned."""
        is_on_host = self._bindings[index].bucket.storage.device.type == "cpu"
        wants_to_know = bool(this_round.unused[index]) or this_round.has_other_buffers or this_round.is_read_at_once
        return is_on_host or wants_to_know or self._num_rounds <= _NUM_ROUNDS_READ_AT_ONCE

    def _reduce(self, index: int, values: Sequence[Tensor]) -> list[Handle]:
        binding, hook = self._bindings[index], self._reducer.hook
        if hook is None:
            return [self._reducer.reduce(value, numel=value.numel()) for value in values]
        params = [[param] for param in binding.params] if self._buckets[index].is_sparse else [binding.params]
        last = values[-1] if values and index == len(self._bindings) - 1 else None
        of_values = zip(values, params, strict=True)
        hooked = [HookedBucket(index, value, of_value, is_last=value is last) for value, of_value in of_values]
        return [hook.start(bucket, self._group) for bucket in hooked]

    def _signature(self, like: Tensor, this_round: Round, *, is_sound: bool) -> Tensor:
        kind = like.dtype, like.device, is_sound
        if kind not in self._signatures:
            # Another step than everybody's has the others leave a bucket unstepped long before the verdict comes.
            step = this_round.number if is_sound else ~this_round.number
            bits = signature_bits(
                step=step, generation=this_round.generation, mode=this_round.mode, has_other_op=this_round.op is not None
            )
            self._signatures[kind] = to_device(bits, like.dtype, like.device)
        return self._signatures[kind]

    def _verdict(self, this_round: Round) -> Verdict:
        # Nothing is in any `.grad` but what came late, from autograd or by the hand of some function, of which no hook tells.
        # The last bucket too, which has just been packed: of a parameter in pieces it has taken what had come by then.
        has_late = this_round.has_repeats() or any(map(is_not, map(_gradient_of, self._params), repeat(None)))
        in_flight = range(len(self._bindings)) if has_late else ()
        return Verdict(
            rank=self._rank,
            has_failed=this_round.has_failed,
            misuse=this_round.misuse,
            has_changed=this_round.has_changed,
            has_other_buffers=this_round.has_other_buffers,
            late_buckets=[index for index in in_flight if self._bindings[index].catch_late()],
            busy_ms=self._recorder.busy_ms(),
        )


def _binding(bucket: Bucket, params: Sequence[Tensor]) -> Binding:
    if bucket.is_sparse:
        return SparseBinding(GradientBucket(bucket.index, 0, (), layout=bucket), params)
    return DenseBinding(GradientBucket(bucket.index, bucket.num_bytes, params, layout=bucket), params)


def _observed(ops: Sequence[Op], observer: Observer) -> Iterator[Op]:
    """Yields each op between the observer's calls; an op that raises has no second one."""
    for op in ops:
        observer.before(op)
        yield op
        observer.after(op)


def _rescale(values: Sequence[Tensor], this_round: Round) -> None:
    for value in values:
        if this_round.weighing is not None:
            value.div_(this_round.weighing.sums().divisor)
        elif this_round.rescale != 1.0:
            value.mul_(this_round.rescale)


def _profiler_range(what: Op | str) -> AbstractContextManager[object]:
    if not private.is_profiling():
        return nullcontext()
    return torch.profiler.record_function(what if isinstance(what, str) else f"undertow.{what.label}")
