"""The events of a step, and how much of its communication the computation hid."""

from undertow.trace.bucket_report import BucketReport
from undertow.trace.outer_report import OuterReport
from undertow.trace.record import (
    BucketRecord,
    Event,
    Overlap,
    StepRecord,
    Trace,
    limit_us,
    overlap_of,
    union_us,
)
from undertow.trace.step_report import StepReport
from undertow.trace.summary import summarize

__all__ = [
    "BucketRecord",
    "BucketReport",
    "Event",
    "OuterReport",
    "Overlap",
    "StepRecord",
    "StepReport",
    "Trace",
    "limit_us",
    "overlap_of",
    "summarize",
    "union_us",
]
