"""Records of steps whose times are known, and the plan they are of."""

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from support.strategies import spec
from undertow.plan import Plan, plan_from_groups
from undertow.trace import BucketRecord, StepRecord, StepReport, summarize


def two_buckets() -> Plan:
    return plan_from_groups([spec(name, 1_000_000) for name in ("head", "body", "stem")], [(0, 1), (2,)], num_ranks=2)


def row(bucket: int, launched_us: float, done_us: float, waited: tuple[float, float], **changes: Any) -> BucketRecord:
    """A bucket that left when it was ready."""
    return replace(
        BucketRecord(
            bucket=bucket,
            num_bytes=two_buckets().buckets[bucket].num_bytes,
            ready_us=launched_us,
            launched_us=launched_us,
            done_us=done_us,
            waited=waited,
        ),
        **changes,
    )


def record(**changes: Any) -> StepRecord:
    """Forward 0 to 20 ms, backward to 60; b0 on the link 30 to 50, b1 60 to 80; the lane waits 60 to 80."""
    rows = row(0, 30_000, 50_000, (60_000, 60_000)), row(1, 60_000, 80_000, (60_000, 80_000))
    times = {"step_us": 100_000, "forwards": ((0.0, 20_000.0),), "backwards": ((20_000.0, 60_000.0),)}
    return replace(StepRecord(step=0, rank=0, **times, buckets=rows, busy_ms=(50.0, 50.0)), **changes)


# The same in shards: b1 is gathered from -10 to 5 ms, b0 behind it to 10; the forward waits for b1 from 0 to 5.
GATHERS = (
    row(1, -10_000, 5_000, (0, 5_000), kind="all_gather"),
    row(0, -9_000, 10_000, (12_000, 12_000), kind="all_gather"),
)


def report(*records: StepRecord, **how: Any) -> StepReport:
    return summarize(records, two_buckets(), **{"rank": 0, **how})


def printed(shown: object, *, width: int = 200) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(shown)
    return file.getvalue()
