"""Lowers a number of buckets and a strategy to the ops of one step."""

from collections.abc import Iterable, Mapping, Sequence

from undertow.errors import require
from undertow.schedule.op import COMPUTE, UPDATE, Buffer, Op, OpKind, Schedule
from undertow.schedule.strategies import DDP, Strategy


def lower_data_parallel(
    num_buckets: int, strategy: Strategy = DDP, *, overlap: bool = True, gather_order: Sequence[int] | None = None
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


def lower_in_backward(num_buckets: int, strategy: Strategy, gathers_behind: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Steps every bucket when it is reduced, and gathers it then or later, while backward runs.

    After the reduction of bucket k the lane carries the gathers of `gathers_behind[k]`, in that order. If it is None, the gathers
    of all buckets follow the last reduction, the last bucket first. Backward reads a bucket's parameters until the bucket is
    full: autograd adds up all uses of a parameter before it delivers its gradient. Raises ConfigError for a gather before its
    step.
    """
    following = gathers_after_reductions(num_buckets) if gathers_behind is None else gathers_behind
    build = _Builder(strategy, in_backward=True)
    fills: list[int] = []
    steps: list[int] = []
    gathers: dict[int | None, int] = {}
    for bucket in range(num_buckets):
        full = build.add(OpKind.FILL, bucket)
        fills.append(full)
        if bucket == num_buckets - 1:
            full = end = build.add(OpKind.END, None, after=fills)
        steps.append(build.add(OpKind.STEP, bucket, after=[build.pack_and_reduce(bucket, after=full)]))
        for gathered in following[bucket]:
            require(
                gathered <= bucket,
                f"bucket {gathered} cannot be gathered before it is reduced.",
                where=f"the lane after the reduction of bucket {bucket}",
                remedy="Put its gather after its own reduction, or a later one.",
            )
            gathers[gathered] = build.add(OpKind.ALL_GATHER, gathered, after=[steps[gathered]])
    build.binds(steps, end=end)
    return build.uses(gathers)


def gathers_after_reductions(num_buckets: int) -> tuple[tuple[int, ...], ...]:
    """Returns the default of `lower_in_backward`: all gathers follow the last reduction, in the order of the forward."""
    return (*((),) * (num_buckets - 1), tuple(reversed(range(num_buckets))))


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
    def __init__(self, strategy: Strategy, *, in_backward: bool = False) -> None:
        self.ops: list[Op] = []
        self._reductions = [kind for kind in (strategy.reduction, strategy.crossing) if kind is not None]
        # The axis over which ranks have different shards, and the axis over which they have the same shard; or the only axis.
        inside, across = ("comm.dp", "") if strategy.crossing is None else ("comm.inside", "comm.across")
        reduced = ("grad",) if strategy.reduction is OpKind.ALL_REDUCE else ("shard",)
        # By kind: lane, buffers that an op reads, and buffers that it writes.
        self._rows: dict[OpKind | None, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
            OpKind.FILL: (COMPUTE, ("param",) if in_backward else (), ("grad",)),
            OpKind.END: (COMPUTE, (), ()),
            OpKind.JOIN: (COMPUTE, (), ()),
            OpKind.PACK: (COMPUTE, ("grad",), ("grad",)),
            strategy.crossing: (across, reduced, reduced),
            strategy.reduction: (inside, ("grad",), reduced),
            OpKind.BIND: (COMPUTE, reduced, ()),
            OpKind.STEP: (UPDATE if in_backward else COMPUTE, reduced, ("param",) if strategy.gather is None else ("own",)),
            OpKind.ALL_GATHER: (inside, ("own",), ("param",)),
            OpKind.USE: (COMPUTE, ("param",), ()),
        }

    def add(self, kind: OpKind, bucket: int | None, *, after: Iterable[int] = ()) -> int:
        lane, *names = self._rows[kind]
        reads, writes = (tuple(Buffer(name, bucket) for name in of_op) for of_op in names)
        op = Op(id=len(self.ops), lane=lane, kind=kind, bucket=bucket, reads=reads, writes=writes, after=tuple(after))
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
