"""The operations of one step, as data that can be printed."""

from dataclasses import dataclass
from enum import StrEnum

COMPUTE = "compute"


class OpKind(StrEnum):
    """Kinds of ops.

    The kinds in `EXTERNAL` happen without the library and are listed so that every access is
    visible.
    """

    FILL = "fill"  # autograd produces the bucket's gradients
    END = "end"  # the outermost backward ends
    # every engine of this process has launched; from now on the compute lane may wait
    JOIN = "join"
    PACK = "pack"  # gradients that are not views of the bucket are copied into it
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"  # each rank gets its shard of the sum
    # waits for the bucket; its gradients become views of it, or placeholders if this rank has only
    # a shard
    BIND = "bind"
    STEP = "step"  # the optimizer updates the parameters, or this rank's shards of them
    ALL_GATHER = "all_gather"  # each rank gets every other one's shard of the parameters
    USE = "use"  # the next forward reads the parameters


EXTERNAL = frozenset({OpKind.FILL, OpKind.END, OpKind.JOIN, OpKind.STEP, OpKind.USE})


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that an op reads or writes.

    A bucket's part of `grad`, `shard`, `param` or `own`, or all of it (`bucket` None).
    """

    name: str
    bucket: int | None

    def __str__(self) -> str:
        return f"{self.name}[{_bucket_text(self.bucket)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation: its lane, the buffers it touches, and the ops it follows."""

    id: int
    lane: str  # "compute", or "comm." and the name of a mesh axis
    kind: OpKind
    bucket: int | None  # None: all buckets
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Name shown by profilers: "all_reduce b3"."""
        return f"{self.kind} {_bucket_text(self.bucket)}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ops of one step; an op comes only after ops with smaller ids."""

    ops: tuple[Op, ...]

    def to_text(self) -> str:
        """Returns a table with one line per op."""
        rows = [_COLUMNS, *map(_row, self.ops)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        return "\n".join(lines) + "\n"


_COLUMNS = ("id", "lane", "kind", "bucket", "reads", "writes", "after")


def _row(op: Op) -> tuple[str, ...]:
    columns = (op.reads, op.writes, (f"{earlier:02d}" for earlier in op.after))
    items = (" ".join(map(str, column)) or "-" for column in columns)
    return (f"{op.id:02d}", op.lane, op.kind, _bucket_text(op.bucket), *items)


def _bucket_text(bucket: int | None) -> str:
    return "*" if bucket is None else f"b{bucket}"
