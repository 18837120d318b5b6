"""Lowers a number of buckets and a strategy to the ops of one step."""

from collections.abc import Iterable, Mapping

from undertow.schedule.op import COMPUTE, Buffer, Op, OpKind, Schedule
from undertow.schedule.strategies import DDP, Strategy


def lower_data_parallel(
    num_buckets: int,
    strategy: Strategy = DDP,
    *,
    overlap: bool = True,
) -> Schedule:
    """Reduces every bucket as soon as it and all earlier ones are full, and gathers updated
    parameters after the step.

    The last bucket is always launched after backward: its trailer carries information that a rank
    knows only then. Without `overlap` every bucket waits for the end of backward. Gathers are
    launched in the reverse order of the buckets, the order of their use in the next forward.
    """
    build = _Builder(strategy)
    step = build.add(OpKind.STEP, None, after=build.backward(num_buckets, overlap=overlap))
    if strategy.gather is None:
        return build.uses({None: step})
    order = reversed(range(num_buckets))
    return build.uses(
        {bucket: build.add(strategy.gather, bucket, after=[step]) for bucket in order}
    )


def lower_accumulation(num_buckets: int, strategy: Strategy = DDP) -> Schedule:
    """Lowers a backward without a step.

    Gradients move into their buckets and stay, or are reduced to shards that add up.
    """
    if strategy.reduces_micro_batches:
        build = _Builder(strategy)
        build.backward(num_buckets, overlap=True)
        return Schedule(tuple(build.ops))
    # under any strategy: gradients are only packed and bound
    build = _Builder(DDP)
    fills, binds = [], []
    for bucket in range(num_buckets):
        fills.append(build.add(OpKind.FILL, bucket))
        binds.append(
            build.add(OpKind.BIND, bucket, after=[build.add(OpKind.PACK, bucket, after=fills[-1:])])
        )
    build.add(OpKind.JOIN, None, after=(build.add(OpKind.END, None, after=fills), *binds))
    return Schedule(tuple(build.ops))


class _Builder:
    def __init__(self, strategy: Strategy) -> None:
        self.ops: list[Op] = []
        self._reductions = [strategy.reduction]
        # The axis over which ranks have different shards; or the only axis.
        inside = "comm.dp"
        if strategy.crossing is not None:
            self._reductions.append(strategy.crossing)
            inside = "comm.inside"
        reduced = "grad" if strategy.reduction is OpKind.ALL_REDUCE else "shard"
        # By kind: lane, the buffer that an op reads, and the buffer that it writes.
        self._rows: dict[OpKind | None, tuple[str, str, str]] = {
            OpKind.FILL: (COMPUTE, "", "grad"),
            OpKind.END: (COMPUTE, "", ""),
            OpKind.JOIN: (COMPUTE, "", ""),
            OpKind.PACK: (COMPUTE, "grad", "grad"),
            strategy.crossing: ("comm.across", reduced, reduced),
            strategy.reduction: (inside, "grad", reduced),
            OpKind.BIND: (COMPUTE, reduced, ""),
            OpKind.STEP: (COMPUTE, reduced, "param" if strategy.gather is None else "own"),
            OpKind.ALL_GATHER: (inside, "own", "param"),
            OpKind.USE: (COMPUTE, "param", ""),
        }

    def add(self, kind: OpKind, bucket: int | None, *, after: Iterable[int] = ()) -> int:
        lane, reads, writes = self._rows[kind]
        op = Op(
            id=len(self.ops),
            lane=lane,
            kind=kind,
            bucket=bucket,
            reads=(Buffer(reads, bucket),) if reads else (),
            writes=(Buffer(writes, bucket),) if writes else (),
            after=tuple(after),
        )
        self.ops.append(op)
        return op.id

    def backward(self, num_buckets: int, *, overlap: bool) -> list[int]:
        """Fills, packs and reduces every bucket.

        Returns the ops that wait for the buckets, after all engines have launched.
        """
        fills: list[int] = []
        reduced: list[int] = []
        for bucket in range(num_buckets):
            fills.append(self.add(OpKind.FILL, bucket))
            if overlap and bucket < num_buckets - 1:
                reduced.append(self.pack_and_reduce(bucket, after=fills[bucket]))
        end = self.add(OpKind.END, None, after=fills)
        for bucket in range(len(reduced), num_buckets):
            reduced.append(self.pack_and_reduce(bucket, after=end))
        join = self.add(OpKind.JOIN, None, after=[end])
        return [
            self.add(OpKind.BIND, bucket, after=(last, join)) for bucket, last in enumerate(reduced)
        ]

    def pack_and_reduce(self, bucket: int, *, after: int) -> int:
        for kind in (OpKind.PACK, *self._reductions):
            after = self.add(kind, bucket, after=[after])
        return after

    def uses(self, gathers: Mapping[int | None, int]) -> Schedule:
        """Makes the next forward wait for each gather, or for the step of all buckets.

        Returns the schedule.
        """
        for bucket, op_id in gathers.items():
            self.add(OpKind.USE, bucket, after=[op_id])
        return Schedule(tuple(self.ops))
