"""The ops of one step: lowered from a plan, verified, printed, and released as gradients arrive."""

from undertow.schedule.lower import lower_accumulation, lower_data_parallel
from undertow.schedule.op import Buffer, Op, OpKind, Schedule, schedule_from_text
from undertow.schedule.tracker import Tracker
from undertow.schedule.verify import verify

__all__ = [
    "Buffer",
    "Op",
    "OpKind",
    "Schedule",
    "Tracker",
    "lower_accumulation",
    "lower_data_parallel",
    "schedule_from_text",
    "verify",
]
