"""The ops of one step: lowered from a plan, verified, printed, and released as gradients arrive."""

from undertow.schedule.arrivals import Arrivals
from undertow.schedule.lower import lower_accumulation, lower_data_parallel
from undertow.schedule.op import Buffer, Op, OpKind, Schedule, schedule_from_text
from undertow.schedule.tracker import Releases, Tracker
from undertow.schedule.verify import verify

__all__ = [
    "Arrivals",
    "Buffer",
    "Op",
    "OpKind",
    "Releases",
    "Schedule",
    "Tracker",
    "lower_accumulation",
    "lower_data_parallel",
    "schedule_from_text",
    "verify",
]
