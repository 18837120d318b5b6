"""Plans buckets before any gradient exists."""

from undertow.plan.gather_order import GathersBehind, LaneTimes, in_backward_order, lane_period_us
from undertow.plan.grouping import (
    SizeCaps,
    default_caps,
    first_plan,
    group_by_size,
    group_in_pieces,
    groups_in_order,
    largest_first,
    observed,
    plan_in_order,
    reverse_registration,
)
from undertow.plan.layout import (
    GroupEntry,
    Groups,
    ParamSpec,
    Piece,
    Slot,
    Trailer,
    ranks_differ,
    signature_of,
)
from undertow.plan.optimal import Optimum, optimal_groups
from undertow.plan.plan import Bucket, Plan, plan_from_groups
from undertow.plan.timing import StepTiming, finish_us, in_backward_limit_us

__all__ = [
    "Bucket",
    "GathersBehind",
    "GroupEntry",
    "Groups",
    "LaneTimes",
    "Optimum",
    "ParamSpec",
    "Piece",
    "Plan",
    "SizeCaps",
    "Slot",
    "StepTiming",
    "Trailer",
    "default_caps",
    "finish_us",
    "first_plan",
    "group_by_size",
    "group_in_pieces",
    "groups_in_order",
    "in_backward_limit_us",
    "in_backward_order",
    "lane_period_us",
    "largest_first",
    "observed",
    "optimal_groups",
    "plan_from_groups",
    "plan_in_order",
    "ranks_differ",
    "reverse_registration",
    "signature_of",
]
