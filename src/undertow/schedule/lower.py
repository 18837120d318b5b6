"""From a number of buckets to the ops of one step."""

from __future__ import annotations

from undertow.schedule.op import COMPUTE, Buffer, Op, OpKind, Schedule

_LANE = {OpKind.ALL_REDUCE: "comm.dp"}


def lower_data_parallel(num_buckets: int, *, overlap: bool = True) -> Schedule:
    """Plain data parallel: every bucket is all-reduced as soon as it and all earlier ones are full.

    The last bucket leaves when backward is over, always: its trailer carries what a rank knows only then. Without
    `overlap` every bucket waits for that.
    """
    build = _Builder()
    fills = []
    reductions: list[int] = []
    for bucket in range(num_buckets):
        fills.append(build.add(OpKind.FILL, bucket, writes=("grad",)))
        if overlap and bucket < num_buckets - 1:
            reductions.append(build.pack_and_reduce(bucket, after=(fills[bucket],)))
    end = build.add(OpKind.END, None, after=tuple(fills))
    for bucket in range(len(reductions), num_buckets):
        reductions.append(build.pack_and_reduce(bucket, after=(end,)))
    join = build.add(OpKind.JOIN, None, after=(end,))
    binds = tuple(
        build.add(OpKind.BIND, bucket, reads=("grad",), after=(reduction, join)) for bucket, reduction in enumerate(reductions)
    )
    return build.finish(after=binds)


def lower_accumulation(num_buckets: int) -> Schedule:
    """A backward that does not communicate: gradients move into their buckets and stay there."""
    build = _Builder()
    fills, binds = [], []
    for bucket in range(num_buckets):
        fills.append(build.add(OpKind.FILL, bucket, writes=("grad",)))
        pack = build.add(OpKind.PACK, bucket, reads=("grad",), writes=("grad",), after=(fills[-1],))
        binds.append(build.add(OpKind.BIND, bucket, reads=("grad",), after=(pack,)))
    end = build.add(OpKind.END, None, after=tuple(fills))
    build.add(OpKind.JOIN, None, after=(end, *binds))
    return Schedule(tuple(build.ops))


class _Builder:
    """Numbers ops as they are added."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

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
            id=len(self.ops),
            lane=_LANE.get(kind, COMPUTE),
            kind=kind,
            bucket=bucket,
            reads=tuple(Buffer(name, bucket) for name in reads),
            writes=tuple(Buffer(name, bucket) for name in writes),
            after=after,
        )
        self.ops.append(op)
        return op.id

    def pack_and_reduce(self, bucket: int, *, after: tuple[int, ...]) -> int:
        pack = self.add(OpKind.PACK, bucket, reads=("grad",), writes=("grad",), after=after)
        return self.add(OpKind.ALL_REDUCE, bucket, reads=("grad",), writes=("grad",), after=(pack,))

    def finish(self, *, after: tuple[int, ...]) -> Schedule:
        """Adds what the user's code does with the gradients: the optimizer's step and the next forward."""
        step = self.add(OpKind.STEP, None, reads=("grad",), writes=("param",), after=after)
        self.add(OpKind.USE, None, reads=("param",), after=(step,))
        return Schedule(tuple(self.ops))
