"""The ops of one step: lowered from a plan, printed, simulated."""

from undertow.schedule.lower import lower_accumulation, lower_data_parallel
from undertow.schedule.op import Buffer, Op, OpKind, Schedule
from undertow.schedule.releases import Releases
from undertow.schedule.strategies import (
    DDP,
    HYBRID,
    STRATEGIES,
    ZERO1,
    ZERO2,
    Strategy,
    strategy_named,
)

__all__ = [
    "DDP",
    "HYBRID",
    "STRATEGIES",
    "ZERO1",
    "ZERO2",
    "Buffer",
    "Op",
    "OpKind",
    "Releases",
    "Schedule",
    "Strategy",
    "lower_accumulation",
    "lower_data_parallel",
    "strategy_named",
]
