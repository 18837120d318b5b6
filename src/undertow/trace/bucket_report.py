"""The report of a bucket in a step, and how buckets are shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from undertow.shown import cell, narrow_table

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 22  # of a parameter's name


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """The gradients of one bucket in a typical step, or the gather of its parameters.

    Times are in milliseconds since the step began.
    """

    index: int
    params: tuple[str, ...]
    largest: str  # the parameter with the most bytes here
    num_bytes: int  # bytes of its gradients
    # bytes passed to collectives, in their format and with the trailer; 0 if a communication hook
    # sent them
    sent_bytes: int
    ready_ms: float
    launched_ms: float
    done_ms: float
    # its part of the communication, without queueing; includes the wait for a rank that sends later
    wire_ms: float
    waited_ms: float  # time that the step waited for it
    coding_ms: float = 0.0  # time that threads of the host encoded and decoded it


def bucket_table(
    buckets: Sequence[BucketReport], *, worst: BucketReport | None, has_format: bool
) -> "Table":
    """Returns a table with a row for each bucket, the worst one in bold.

    `has_format`: the bytes that were sent are fewer than the bucket's, and shown too.
    """
    table = narrow_table("bucket")
    sizes = ("MB", "sent") if has_format else ("MB",)
    for name in (*sizes, "ready", "launched", "done", "wire", "waited"):
        table.add_column(name, justify="right", no_wrap=True)
    width = _WIDTH - len(" 123.45") if has_format else _WIDTH
    table.add_column(
        "largest +others" if has_format else "largest parameter +others", overflow="fold"
    )
    for bucket in buckets:
        largest = bucket.largest
        if len(largest) > width:
            largest = f"...{largest[3 - width :]}"
        if len(bucket.params) > 1:
            largest += f" +{len(bucket.params) - 1}"
        num_bytes = (bucket.num_bytes, bucket.sent_bytes)[: len(sizes)]
        table.add_row(
            str(bucket.index),
            *(f"{size / 1e6:.2f}" for size in num_bytes),
            f"{bucket.ready_ms:z.1f}",
            f"{bucket.launched_ms:z.1f}",
            f"{bucket.done_ms:z.1f}",
            f"{bucket.wire_ms:z.1f}",
            f"{bucket.waited_ms:z.1f}",
            cell(largest),
            style="bold" if bucket == worst else None,
        )
    return table
