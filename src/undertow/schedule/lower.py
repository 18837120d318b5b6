"""From a number of buckets and a strategy to the ops of one step."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.schedule.op import COLLECTIVES, COMPUTE, Buffer, Op, OpKind, Schedule
from undertow.schedule.placement import DDP, Strategy

_COMM = "comm.dp"


def lower_data_parallel(
    num_buckets: int, strategy: Strategy = DDP, *, overlap: bool = True, gather_order: Sequence[int] | None = None
) -> Schedule:
    """Every bucket is reduced as soon as it and all earlier ones are full; what was updated is gathered after the step.

    The last bucket leaves when backward is over, always: its trailer carries what a rank knows only then. Without
    `overlap` every bucket waits for that. Gathers leave in `gather_order`, that in which the next forward needs them;
    the reverse of the buckets' order if not known.
    """
    build = _Builder(strategy)
    reductions, join = build.backward(num_buckets, overlap=overlap)
    step = build.step(after=build.binds(reductions, join=join))
    if strategy.gather is None:
        build.add(OpKind.USE, None, reads=("param",), after=(step,))
        return build.schedule
    order = tuple(reversed(range(num_buckets)) if gather_order is None else gather_order)
    gathers = [build.add(strategy.gather, bucket, reads=("own",), writes=("param",), after=(step,)) for bucket in order]
    for bucket, gather in zip(order, gathers, strict=True):
        build.add(OpKind.USE, bucket, reads=("param",), after=(gather,))
    return build.schedule


def lower_accumulation(num_buckets: int, strategy: Strategy = DDP) -> Schedule:
    """A backward without a step: gradients move into their buckets and stay there, or are reduced to shards that add up."""
    build = _Builder(strategy)
    if strategy.reduces_micro_batches:
        reductions, join = build.backward(num_buckets, overlap=True)
        build.binds(reductions, join=join)
        return build.schedule
    fills, binds = [], []
    for bucket in range(num_buckets):
        fills.append(build.add(OpKind.FILL, bucket, writes=("grad",)))
        pack = build.add(OpKind.PACK, bucket, reads=("grad",), writes=("grad",), after=(fills[-1],))
        binds.append(build.add(OpKind.BIND, bucket, reads=("grad",), after=(pack,)))
    end = build.add(OpKind.END, None, after=tuple(fills))
    build.add(OpKind.JOIN, None, after=(end, *binds))
    return build.schedule


class _Builder:
    """Numbers ops as they are added."""

    def __init__(self, strategy: Strategy) -> None:
        self._ops: list[Op] = []
        self._reduction = strategy.reduction
        self._reduced = "grad" if strategy.reduction is OpKind.ALL_REDUCE else "shard"

    @property
    def schedule(self) -> Schedule:
        return Schedule(tuple(self._ops))

    def add(
        self,
        kind: OpKind,
        bucket: int | None,
        *,
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
        after: tuple[int, ...] = (),
    ) -> int:
        op = Op(
            id=len(self._ops),
            lane=_COMM if kind in COLLECTIVES else COMPUTE,
            kind=kind,
            bucket=bucket,
            reads=tuple(Buffer(name, bucket) for name in reads),
            writes=tuple(Buffer(name, bucket) for name in writes),
            after=after,
        )
        self._ops.append(op)
        return op.id

    def backward(self, num_buckets: int, *, overlap: bool) -> tuple[list[int], int]:
        """Every bucket is filled, packed and reduced. Returns the reductions, and where all engines have launched."""
        fills: list[int] = []
        reductions: list[int] = []
        for bucket in range(num_buckets):
            fills.append(self.add(OpKind.FILL, bucket, writes=("grad",)))
            if overlap and bucket < num_buckets - 1:
                reductions.append(self._pack_and_reduce(bucket, after=fills[bucket]))
        end = self.add(OpKind.END, None, after=tuple(fills))
        for bucket in range(len(reductions), num_buckets):
            reductions.append(self._pack_and_reduce(bucket, after=end))
        return reductions, self.add(OpKind.JOIN, None, after=(end,))

    def binds(self, reductions: Sequence[int], *, join: int) -> tuple[int, ...]:
        """The compute lane waits for every bucket."""
        return tuple(
            self.add(OpKind.BIND, bucket, reads=(self._reduced,), after=(reduction, join))
            for bucket, reduction in enumerate(reductions)
        )

    def step(self, *, after: tuple[int, ...]) -> int:
        """The optimizer updates what this rank owns."""
        owned = "param" if self._reduced == "grad" else "own"
        return self.add(OpKind.STEP, None, reads=(self._reduced,), writes=(owned,), after=after)

    def _pack_and_reduce(self, bucket: int, *, after: int) -> int:
        pack = self.add(OpKind.PACK, bucket, reads=("grad",), writes=("grad",), after=(after,))
        return self.add(self._reduction, bucket, reads=("grad",), writes=(self._reduced,), after=(pack,))
