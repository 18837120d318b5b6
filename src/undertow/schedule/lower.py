"""Lowers a number of buckets and a strategy to the ops of one step."""

from collections.abc import Iterable, Mapping, Sequence

from undertow.schedule.op import COMPUTE, Buffer, Op, OpKind, Schedule
from undertow.schedule.strategies import DDP, Strategy


def lower_data_parallel(
    num_buckets: int,
    strategy: Strategy = DDP,
    *,
    overlap: bool = True,
    gather_order: Sequence[int] | None = None,
) -> Schedule:
    """Reduces every bucket as soon as it and all earlier ones are full, and gathers updated parameters after the step.

    The last bucket is always launched after backward: its trailer carries information that a rank knows only then. Without
    `overlap` every bucket waits for the end of backward. Gathers are launched in `gather_order`, the order of their use in
    the next forward; None is the reverse order of the buckets.
    """
    build = _Builder(strategy)
    step = build.add(OpKind.STEP, None, after=build.backward(num_buckets, overlap=overlap))
    if strategy.gather is None:
        return build.uses({None: step})
    order = reversed(range(num_buckets)) if gather_order is None else gather_order
    return build.uses({bucket: build.add(strategy.gather, bucket, after=[step]) for bucket in order})


def lower_accumulation(num_buckets: int, strategy: Strategy = DDP) -> Schedule:
    """Lowers a backward without a step: gradients move into their buckets and stay, or are reduced to shards that add up."""
    if strategy.reduces_micro_batches:
        build = _Builder(strategy)
        build.backward(num_buckets, overlap=True)
        return Schedule(tuple(build.ops))
    build = _Builder(DDP)  # of any strategy: gradients are packed and bound, and nothing else happens
    fills, binds = [], []
    for bucket in range(num_buckets):
        fills.append(build.add(OpKind.FILL, bucket))
        binds.append(build.add(OpKind.BIND, bucket, after=[build.add(OpKind.PACK, bucket, after=fills[-1:])]))
    build.add(OpKind.JOIN, None, after=(build.add(OpKind.END, None, after=fills), *binds))
    return Schedule(tuple(build.ops))


class _Builder:
    def __init__(self, strategy: Strategy) -> None:
        self.ops: list[Op] = []
        self._reductions = [kind for kind in (strategy.reduction, strategy.crossing) if kind is not None]
        # The axis over which ranks have different shards, and the axis over which they have the same shard; or the only axis.
        inside, across = ("comm.dp", "") if strategy.crossing is None else ("comm.inside", "comm.across")
        reduced = ("grad",) if strategy.reduction is OpKind.ALL_REDUCE else ("shard",)
        # By kind: lane, buffers that an op reads, and buffers that it writes.
        self._rows: dict[OpKind | None, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
            OpKind.FILL: (COMPUTE, (), ("grad",)),
            OpKind.END: (COMPUTE, (), ()),
            OpKind.JOIN: (COMPUTE, (), ()),
            OpKind.PACK: (COMPUTE, ("grad",), ("grad",)),
            strategy.crossing: (across, reduced, reduced),
            strategy.reduction: (inside, ("grad",), reduced),
            OpKind.BIND: (COMPUTE, reduced, ()),
            OpKind.STEP: (COMPUTE, reduced, ("param",) if strategy.gather is None else ("own",)),
            OpKind.ALL_GATHER: (inside, ("own",), ("param",)),
            OpKind.USE: (COMPUTE, ("param",), ()),
        }

    def add(self, kind: OpKind, bucket: int | None, *, after: Iterable[int] = ()) -> int:
        lane, *names = self._rows[kind]
        reads, writes = (tuple(Buffer(name, bucket) for name in of_op) for of_op in names)
        op = Op(
            id=len(self.ops),
            lane=lane,
            kind=kind,
            bucket=bucket,
            reads=reads,
            writes=writes,
            after=tuple(after),
        )
        self.ops.append(op)
        return op.id

    def backward(self, num_buckets: int, *, overlap: bool) -> list[int]:
        """Fills, packs and reduces every bucket. Returns the ops that wait for the buckets."""
        fills: list[int] = []
        reductions: list[int] = []
        for bucket in range(num_buckets):
            fills.append(self.add(OpKind.FILL, bucket))
            if overlap and bucket < num_buckets - 1:
                reductions.append(self.pack_and_reduce(bucket, after=fills[bucket]))
        end = self.add(OpKind.END, None, after=fills)
        reductions += [self.pack_and_reduce(bucket, after=end) for bucket in range(len(reductions), num_buckets)]
        return self.binds(reductions, end=end)

    def pack_and_reduce(self, bucket: int, *, after: int) -> int:
        for kind in (OpKind.PACK, *self._reductions):
            after = self.add(kind, bucket, after=[after])
        return after

    def binds(self, reduced: Sequence[int], *, end: int) -> list[int]:
        """Makes the compute lane wait for every bucket after all engines have launched."""
        join = self.add(OpKind.JOIN, None, after=[end])
        return [self.add(OpKind.BIND, bucket, after=(last, join)) for bucket, last in enumerate(reduced)]

    def uses(self, gathers: Mapping[int | None, int]) -> Schedule:
        """Makes the next forward wait for each gather, or for the step of all buckets. Returns the schedule."""
        for bucket, op_id in gathers.items():
            self.add(OpKind.USE, bucket, after=[op_id])
        return Schedule(tuple(self.ops))
