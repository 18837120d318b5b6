"""Plans buckets for steps in which buckets are stepped and gathered while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from undertow.cost import Costs
from undertow.plan import (
    Optimum,
    Plan,
    SizeCaps,
    group_in_pieces,
    in_backward_limit_us,
    in_backward_order,
    lane_period_us,
    optimal_groups,
    plan_from_groups,
)
from undertow.profile import Profile
from undertow.simulate import lane_times

# A bucket may hold one of this many equal shares of all parameters' bytes.
_NUM_SHARES = (6, 9, 12, 16, 24, 32, 48, 64)
# A plan of more buckets must be faster by this share of the step, because each bucket costs time on the host.
_SLACK = 0.002


def best_groups_in_backward(profile: Profile, order: Sequence[int], costs: Costs, *, num_ranks: int, max_bytes: float) -> Optimum:
    """Returns the buckets with the shortest period, among several sizes and the best buckets for a step with a barrier.

    A parameter above the size is cut.
    """
    params = profile.params
    total = sum(spec.num_bytes for spec in params)
    barrier = optimal_groups(
        params, order, profile.timing, costs, num_ranks=num_ranks, has_shards=True, max_bucket_bytes=max_bytes
    )
    sizes = [max(1, int(min(total // num, max_bytes))) for num in _NUM_SHARES]
    firsts = [(), (max(1, int(total // _NUM_SHARES[-1])),)]  # a small one, so that communication starts sooner
    caps = [SizeCaps(cap_bytes=size, first_bytes=first) for size in sizes for first in firsts]
    tried = [group_in_pieces(params, order, cap, num_ranks=num_ranks) for cap in caps]
    plans = [plan_from_groups(params, groups, num_ranks=num_ranks) for groups in dict.fromkeys([barrier.groups, *tried])]
    periods = [(in_backward_period_us(profile, plan, costs), len(plan.buckets), at) for at, plan in enumerate(plans)]
    least_us = min(periods)[0]
    _, period_us, at = min((num, us, at) for us, num, at in periods if us <= least_us * (1 + _SLACK))
    return Optimum(
        groups=plans[at].groups,
        finish_us=period_us,
        best_us=least_us,
        limit_us=in_backward_limit_us(params, profile.timing, costs),
    )


def in_backward_period_us(profile: Profile, plan: Plan, costs: Costs) -> float:
    """Returns the period of a step with these buckets, in the order in which they are gathered."""
    times = lane_times(profile, plan, costs)
    return lane_period_us(times, in_backward_order(times))


def without_update(profile: Profile) -> Profile:
    """Returns the profile without update time: with steps in backward, no measurement contains it."""
    return replace(profile, update_us=0.0)
