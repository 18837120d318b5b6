"""The events of a step, and how much of its communication the computation hid."""

from undertow.trace.event import Event, Trace
from undertow.trace.overlap import Overlap, limit_us, overlap_of, union_us
from undertow.trace.record import BucketRecord, StepRecord
from undertow.trace.samples import Transfer, cost_samples
from undertow.trace.summary import BucketReport, GatherReport, StepReport, summarize

__all__ = [
    "BucketRecord",
    "BucketReport",
    "Event",
    "GatherReport",
    "Overlap",
    "StepRecord",
    "StepReport",
    "Trace",
    "Transfer",
    "cost_samples",
    "limit_us",
    "overlap_of",
    "summarize",
    "union_us",
]
