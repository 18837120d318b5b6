"""The cost model that compares plans by the end of their last bucket.

Buckets are launched in order, and the lane carries one collective at a time. A bucket starts when
the previous one ends and its last gradient is ready:

    F = max(F, latest ready) + C(bytes)

With shards a bucket's storage is one allocation, so the same buckets are gathered under the next
forward, in reverse order: the last one first. A parameter read at u waits for its own bucket and
all later ones. That wait delays everything after it by as much. Counted from the first bucket on,
this is the same recursion with -u for the ready time:

    K = max(K, -earliest use) + C(bytes),   stall = max(0, K)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from undertow.cost.costs import Costs, Floats
from undertow.plan.layout import ParamSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """When gradients are ready and parameters are read in a step without communication.

    Microseconds, the latest of all ranks.
    """

    ready_us: Sequence[float]  # by parameter: its gradient is ready, since the step began
    # the last bucket is not sent earlier: its trailer carries information known only then
    backward_end_us: float
    # by parameter: first read in forward, since forward began; only for shards
    used_us: Sequence[float] = ()


def finish_us(
    params: Sequence[ParamSpec],
    groups: Sequence[Sequence[int]],
    timing: StepTiming,
    costs: Costs,
    *,
    has_shards: bool = False,
    bucket_us: float = 0.0,
) -> float:
    """Returns when the last reduction of the buckets of `groups` ends, in microseconds since the
    step began.

    Each bucket delays backward by `bucket_us` of processor time before it is sent. With shards the
    function returns the period of steps without their update: the stall of the next forward, which
    waits for gathers, plus the longer of backward and reductions. Bytes are of gradients, without
    padding and trailers.
    """
    # without parameters one empty bucket is sent
    filled = [group for group in groups if group] or [()]
    sizes = [float(sum(params[param].num_bytes for param in group)) for group in filled]
    starts_us = []
    for number, group in enumerate(filled, 1):
        ready_us = max((timing.ready_us[param] for param in group), default=0.0)
        starts_us.append(ready_us + number * bucket_us)
    starts_us[-1] = max(starts_us[-1], timing.backward_end_us + len(filled) * bucket_us)
    if not has_shards:
        return _through_us(starts_us, costs.collective_us("all_reduce", sizes))
    used_us = [-min((timing.used_us[param] for param in group), default=0.0) for group in filled]
    stall_us = max(0.0, _through_us(used_us, costs.collective_us("all_gather", sizes)))
    return stall_us + _through_us(starts_us, costs.collective_us("reduce_scatter", sizes))


def _through_us(starts_us: Sequence[float], times_us: Floats) -> float:
    through_us = -math.inf
    for start_us, time_us in zip(starts_us, times_us.tolist(), strict=True):
        through_us = max(through_us, start_us) + time_us
    return through_us
