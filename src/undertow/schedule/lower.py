"""Lowers a number of buckets and a strategy to the ops of one step."""

from collections.abc import Iterable, Mapping, Sequence

from undertow.errors import ConfigError
from undertow.schedule.op import COLLECTIVES, COMPUTE, UPDATE, Buffer, Op, OpKind, Schedule
from undertow.schedule.strategies import DDP, Strategy

# The axis over which ranks have different shards, and the axis over which they have the same shard.
_INSIDE, _ACROSS = "comm.inside", "comm.across"
_ONLY = "comm.dp"  # the axis, if there is only one


def lower_data_parallel(
    num_buckets: int, strategy: Strategy = DDP, *, overlap: bool = True, gather_order: Sequence[int] | None = None
) -> Schedule:
    """Reduces every bucket as soon as it and all earlier ones are full, and gathers updated parameters after the step.

    The last bucket is always launched after backward: its trailer carries information that a rank knows only then. Without
    `overlap` every bucket waits for the end of backward. Gathers are launched in `gather_order`, the order in which the next
    forward needs them; None is the reverse order of the buckets.
    """
    build = _Builder(strategy)
    reductions, join = build.backward(num_buckets, overlap=overlap)
    owned = "param" if strategy.gather is None else "own"
    binds = build.binds(reductions, join=join)
    step = build.add(OpKind.STEP, None, reads=(build.reduced,), writes=(owned,), after=binds)
    if strategy.gather is None:
        return build.uses({None: step})
    order = reversed(range(num_buckets)) if gather_order is None else gather_order
    return build.uses({bucket: build.gather(bucket, after=step) for bucket in order})


def lower_in_backward(num_buckets: int, strategy: Strategy, gathers_behind: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Steps every bucket when it is reduced, and gathers it then or later, while backward runs.

    After the reduction of bucket k the lane carries the gathers of `gathers_behind[k]`, in that order. If it is None, the gathers
    of all buckets follow the last reduction, the last bucket first. Backward reads a bucket's parameters until the bucket is
    full: autograd adds up all uses of a parameter before it delivers its gradient. Raises ConfigError for a gather before its
    step.
    """
    following = gathers_after_reductions(num_buckets) if gathers_behind is None else gathers_behind
    build = _Builder(strategy, backward_reads=("param",))
    fills: list[int] = []
    steps: list[int] = []
    gathers: dict[int | None, int] = {}
    for bucket in range(num_buckets):
        full = build.fill(bucket)
        fills.append(full)
        if bucket == num_buckets - 1:
            full = end = build.add(OpKind.END, None, after=fills)
        reduction = build.pack_and_reduce(bucket, after=full)
        steps.append(build.add(OpKind.STEP, bucket, reads=(build.reduced,), writes=("own",), after=[reduction]))
        for gathered in following[bucket]:
            if gathered > bucket:
                raise ConfigError(
                    f"bucket {gathered} cannot be gathered before it is reduced.",
                    where=f"the lane after the reduction of bucket {bucket}",
                    remedy="Put its gather after its own reduction, or a later one.",
                )
            gathers[gathered] = build.gather(gathered, after=steps[gathered])
    build.binds(steps, join=build.add(OpKind.JOIN, None, after=[end]))
    return build.uses(gathers)


def gathers_after_reductions(num_buckets: int) -> tuple[tuple[int, ...], ...]:
    """Returns the default of `lower_in_backward`: all gathers follow the last reduction, in the order of the forward."""
    return (*((),) * (num_buckets - 1), tuple(reversed(range(num_buckets))))


def lower_accumulation(num_buckets: int, strategy: Strategy = DDP) -> Schedule:
    """Lowers a backward without a step: gradients move into their buckets and stay, or are reduced to shards that add up."""
    build = _Builder(strategy)
    if strategy.reduces_micro_batches:
        reductions, join = build.backward(num_buckets, overlap=True)
        build.binds(reductions, join=join)
        return Schedule(tuple(build.ops))
    fills, binds = [], []
    for bucket in range(num_buckets):
        fills.append(build.fill(bucket))
        pack = build.add(OpKind.PACK, bucket, reads=("grad",), writes=("grad",), after=fills[-1:])
        binds.append(build.add(OpKind.BIND, bucket, reads=("grad",), after=[pack]))
    end = build.add(OpKind.END, None, after=fills)
    build.add(OpKind.JOIN, None, after=(end, *binds))
    return Schedule(tuple(build.ops))


class _Builder:
    """Builds the ops of a schedule and numbers them."""

    def __init__(self, strategy: Strategy, *, backward_reads: tuple[str, ...] = ()) -> None:
        self.ops: list[Op] = []
        self.reduced = "grad" if strategy.reduction is OpKind.ALL_REDUCE else "shard"
        self._backward_reads = backward_reads
        self._reduction, self._crossing = strategy.reduction, strategy.crossing

    def add(
        self,
        kind: OpKind,
        bucket: int | None,
        *,
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
        after: Iterable[int] = (),
    ) -> int:
        lane = UPDATE if kind is OpKind.STEP and bucket is not None else COMPUTE
        if kind in COLLECTIVES:
            lane = _ONLY if self._crossing is None else _ACROSS if kind is self._crossing else _INSIDE
        op = Op(
            id=len(self.ops),
            lane=lane,
            kind=kind,
            bucket=bucket,
            reads=tuple(Buffer(name, bucket) for name in reads),
            writes=tuple(Buffer(name, bucket) for name in writes),
            after=tuple(after),
        )
        self.ops.append(op)
        return op.id

    def backward(self, num_buckets: int, *, overlap: bool) -> tuple[list[int], int]:
        """Fills, packs and reduces every bucket. Returns the reductions, and the op at which all engines have launched."""
        fills: list[int] = []
        reductions: list[int] = []
        for bucket in range(num_buckets):
            fills.append(self.fill(bucket))
            if overlap and bucket < num_buckets - 1:
                reductions.append(self.pack_and_reduce(bucket, after=fills[bucket]))
        end = self.add(OpKind.END, None, after=fills)
        for bucket in range(len(reductions), num_buckets):
            reductions.append(self.pack_and_reduce(bucket, after=end))
        return reductions, self.add(OpKind.JOIN, None, after=[end])

    def fill(self, bucket: int) -> int:
        """Adds the op that stands for autograd producing the bucket's gradients."""
        return self.add(OpKind.FILL, bucket, reads=self._backward_reads, writes=("grad",))

    def pack_and_reduce(self, bucket: int, *, after: int) -> int:
        pack = self.add(OpKind.PACK, bucket, reads=("grad",), writes=("grad",), after=[after])
        reduction = self.add(self._reduction, bucket, reads=("grad",), writes=(self.reduced,), after=[pack])
        if self._crossing is None:
            return reduction
        return self.add(self._crossing, bucket, reads=(self.reduced,), writes=(self.reduced,), after=[reduction])

    def binds(self, reduced: Sequence[int], *, join: int) -> list[int]:
        """Makes the compute lane wait for every bucket."""
        return [self.add(OpKind.BIND, bucket, reads=(self.reduced,), after=(last, join)) for bucket, last in enumerate(reduced)]

    def gather(self, bucket: int, *, after: int) -> int:
        """Adds the op that gives every rank the other ranks' updates of a bucket."""
        return self.add(OpKind.ALL_GATHER, bucket, reads=("own",), writes=("param",), after=[after])

    def uses(self, gathers: Mapping[int | None, int]) -> Schedule:
        """Makes the next forward wait for each gather, or for the step of all buckets. Returns the schedule."""
        for bucket, op_id in gathers.items():
            self.add(OpKind.USE, bucket, reads=("param",), after=[op_id])
        return Schedule(tuple(self.ops))
