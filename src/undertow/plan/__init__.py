"""Plans buckets before any gradient exists."""

from undertow.plan.facts import Trailer, signature_of
from undertow.plan.grouping import (
    SizeCaps,
    default_caps,
    equal_groups,
    first_plan,
    group_by_size,
    largest_first,
    observed,
    plan_in_order,
    reverse_registration,
)
from undertow.plan.layout import (
    Groups,
    ParamSpec,
    Slot,
    Wires,
)
from undertow.plan.plan import Bucket, Plan, plan_from_groups

__all__ = [
    "Bucket",
    "Groups",
    "ParamSpec",
    "Plan",
    "SizeCaps",
    "Slot",
    "Trailer",
    "Wires",
    "default_caps",
    "equal_groups",
    "first_plan",
    "group_by_size",
    "largest_first",
    "observed",
    "plan_from_groups",
    "plan_in_order",
    "reverse_registration",
    "signature_of",
]
