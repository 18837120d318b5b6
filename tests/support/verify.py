"""Proves properties of a schedule. Lowering depends on few numbers, so tests prove every schedule that a run can have."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations, pairwise
from operator import or_

from undertow.errors import ConfigError, require
from undertow.schedule import DDP, Buffer, Op, OpKind, Schedule, Strategy
from undertow.schedule.op import COMPUTE

_REDUCTIONS = (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER)


def verify(schedule: Schedule, strategy: Strategy = DDP, *, num_buckets: int) -> Schedule:
    """Returns `schedule` if it is correct, else raises ConfigError with the ops at fault.

    - Backward ends once and is joined once, and the last collective, which carries the verdict, is launched after its end.
    - The optimizer steps on all buckets at once; an accumulation has no step.
    - Every bucket's gradients are filled once and cross each mesh axis once, after they are filled and before their step, the
      inner axis first. If they come back as shards, every bucket's parameters cross once between their step and their use.
    - Collectives are launched in the order of their ids, whatever order gradients arrive in (each comm lane is a
      queue).
    - No op writes a buffer while another may touch it, in this step or in the next one.
    """
    _check_numbers(schedule)
    before = _happens_before(schedule)
    _check_end(schedule, before)
    _check_steps(schedule)
    by_bucket: dict[int | None, dict[OpKind, list[Op]]] = {bucket: defaultdict(list) for bucket in range(num_buckets)}
    for op in schedule.ops:
        by_bucket.setdefault(op.bucket, defaultdict(list))[op.kind].append(op)
    for bucket in by_bucket:
        _check_bucket(by_bucket, bucket, strategy, num_buckets, before)
    _check_hazards(schedule, before)
    twice = _twice(schedule)
    _check_hazards(twice, _happens_before(twice))
    return schedule


def memory_of(buffer: Buffer) -> str:
    """The memory that contains a buffer; the part of the parameters that a rank owns lies in theirs."""
    return "param" if buffer.name == "own" else buffer.name


def overlap(one: Buffer, other: Buffer) -> bool:
    is_of_same = None in (one.bucket, other.bucket) or one.bucket == other.bucket
    return memory_of(one) == memory_of(other) and is_of_same


def _check_numbers(schedule: Schedule) -> None:
    for position, op in enumerate(schedule.ops):
        require(
            op.id == position and all(0 <= earlier < op.id for earlier in op.after),
            f"op {op.id} ({op.label}) is at position {position} and comes after {list(op.after)}.",
            where="schedule",
            remedy="Number ops from 0 in order; an op may only come after ops with smaller ids.",
        )


def _twice(schedule: Schedule) -> Schedule:
    """Returns the schedule twice in a row: the next backward comes after the forward that uses the parameters."""
    ops, shift = schedule.ops, len(schedule.ops) + 1
    done = tuple(op.id for op in ops if op.kind in (OpKind.USE, OpKind.JOIN, OpKind.BIND))
    between = Op(id=len(ops), lane=COMPUTE, kind=OpKind.JOIN, bucket=None, after=done)
    again = [
        replace(
            op, id=op.id + shift, after=(*(it + shift for it in op.after), *((between.id,) if op.kind is OpKind.FILL else ()))
        )
        for op in ops
    ]
    return Schedule((*ops, between, *again))


def _happens_before(schedule: Schedule) -> list[int]:
    """Returns for each op the ids, as bits, of all ops that are complete when it starts.

    Order comes from `after` and from the queues of the comm lanes. The compute lane gives no order: its ops follow the arrival of
    gradients, which no schedule can know.
    """
    closed: list[int] = []
    last_of_lane: dict[str, int] = {}
    for op in schedule.ops:
        earlier = [*op.after, *([last_of_lane[op.lane]] if op.lane in last_of_lane else ())]
        closed.append(reduce(or_, (closed[op_id] | 1 << op_id for op_id in earlier), 0))
        if op.lane != COMPUTE:
            last_of_lane[op.lane] = op.id
    return closed


def _is_before(before: Sequence[int], earlier: Op, later: Op) -> bool:
    return bool(before[later.id] >> earlier.id & 1)


def _check_end(schedule: Schedule, before: Sequence[int]) -> None:
    kinds = [op.kind for op in schedule.ops]
    for kind in (OpKind.END, OpKind.JOIN):
        require(
            kinds.count(kind) == 1,
            f"the schedule has {kinds.count(kind)} ops of kind {kind}, expected 1.",
            where=f"schedule of {len(kinds)} ops",
            remedy="Backward ends once in a step, and its engines join once.",
        )
    end = schedule.ops[kinds.index(OpKind.END)]
    for last in {op.kind: op for op in schedule.ops if op.kind in _REDUCTIONS}.values():  # on each axis
        require(
            _is_before(before, end, last),
            f"op {last.id:02d} ({last.label}) may leave before backward ends.",
            where=f"it is the last reduction; backward ends with op {end.id:02d}",
            remedy="The last bucket leaves after backward: its trailer carries facts that a rank knows only then.",
        )


def _check_steps(schedule: Schedule) -> None:
    stepped = [op.bucket for op in schedule.ops if op.kind is OpKind.STEP]
    require(
        stepped in ([], [None]),
        "the steps do not update each parameter once.",
        where=f"buckets that are stepped: {', '.join('all' if bucket is None else f'b{bucket}' for bucket in stepped)}",
        remedy="One step updates all buckets.",
    )


def _check_bucket(
    by_bucket: Mapping[int | None, Mapping[OpKind, Sequence[Op]]],
    bucket: int | None,
    strategy: Strategy,
    num_buckets: int,
    before: Sequence[int],
) -> None:
    """Checks that the bucket crosses each axis by one op after it is filled and before its step, and is gathered after it."""
    ops, exists = by_bucket[bucket], bucket in range(num_buckets)
    steps = by_bucket[None][OpKind.STEP]
    is_sent = int(exists and (bool(steps) or strategy.reduces_micro_batches))
    kinds = (kind for kind in (OpKind.FILL, strategy.reduction, strategy.crossing) if kind is not None)
    for source_kind, kind in pairwise(kinds):
        wanted = (int(exists) if source_kind is OpKind.FILL else is_sent, is_sent)
        found = (len(ops[source_kind]), len(ops[kind]))
        require(
            found == wanted,
            f"the ops on {Buffer('grad', bucket)} do not carry each gradient across once.",
            where=f"{source_kind}s: expected {wanted[0]}, got {found[0]}; {kind}s: expected {wanted[1]}, "
            f"got {found[1]}; the plan has {num_buckets} buckets",
            remedy="A step fills every bucket once and sends it once; an accumulation sends nothing, or shards.",
        )
        for source, crossing in zip(ops[source_kind], ops[kind], strict=False):
            require(
                _is_before(before, source, crossing) and all(_is_before(before, crossing, step) for step in steps),
                f"op {crossing.id:02d} ({crossing.label}) may run before its gradients are there or after the step.",
                where=", ".join(f"{op.kind} is op {op.id:02d}" for op in (source, *steps[:1])),
                remedy="Order the collective after the fill and before the step.",
            )
    gathers, num_wanted = ops[OpKind.ALL_GATHER], int(exists and bool(steps) and strategy.gather is not None)
    require(
        len(gathers) == num_wanted,
        f"the ops on {Buffer('param', bucket)} do not bring each parameter to every rank once.",
        where=f"all_gathers: expected {num_wanted}, got {len(gathers)}; the plan has {num_buckets} buckets",
        remedy="With a sharded optimizer every bucket is gathered once after the step; without one, never.",
    )
    for gather in gathers:
        require(
            all(_is_before(before, step, gather) for step in steps),
            f"op {gather.id:02d} ({gather.label}) may run before the step.",
            where=f"step is op {steps[0].id:02d}",
            remedy="Order the gather after the step.",
        )


def _check_hazards(schedule: Schedule, before: Sequence[int]) -> None:
    touching: dict[str, dict[int | None, list[Op]]] = defaultdict(lambda: defaultdict(list))
    for op in schedule.ops:
        for memory, bucket in {(memory_of(buffer), buffer.bucket) for buffer in (*op.reads, *op.writes)}:
            touching[memory][bucket].append(op)
    for of_bucket in touching.values():
        whole = of_bucket.pop(None, [])  # ops that touch the buffers of all buckets
        for ops in of_bucket.values():
            _check_pairs([*ops, *whole], before)
        _check_pairs(whole, before)


def _check_pairs(ops: Sequence[Op], before: Sequence[int]) -> None:
    for earlier, later in combinations(sorted(ops, key=lambda op: op.id), 2):
        clash = None if _is_before(before, earlier, later) else _clash(earlier, later)
        if clash is not None:
            raise ConfigError(
                f"ops {earlier.id:02d} ({earlier.label}) and {later.id:02d} ({later.label}) may touch {clash} at once.",
                where=f"one writes it, and nothing orders {later.id:02d} after {earlier.id:02d}",
                remedy="Let the later op come after the earlier one.",
            )


def _clash(one: Op, other: Op) -> Buffer | None:
    """Returns a buffer that one op writes while the other touches it."""
    clashes = (
        touched if written.bucket is None else written
        for writer, toucher in ((one, other), (other, one))
        for written in writer.writes
        for touched in (*toucher.reads, *toucher.writes)
        if overlap(written, touched)
    )
    return next(clashes, None)
