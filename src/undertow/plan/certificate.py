"""The earliest any grouping could be through: what an optimum is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.cost.costs import Costs
from undertow.plan.finish import StepTiming
from undertow.plan.spec import ParamSpec

Floats = NDArray[np.float64]

# Sizes at which a cost is looked up between 1 byte and all; a cell is then a sixth of a percent wide for a gigabyte.
_NUM_SIZES = 12288


def limit_us(params: Sequence[ParamSpec], timing: StepTiming, costs: Costs, *, has_shards: bool) -> float:
    """No grouping, order or splitting of gradients is through earlier; microseconds, as `finish_us` counts.

        limit = max over i of  r_i + C*(S_i),   and  end of backward + C(0)

    S_i is the bytes of all gradients ready at r_i or later, C*(S) the cheapest way to send S bytes in any split. With shards
    the stall of the next forward is added, for the two phases have the lane to themselves:
    stall = max over i of  C*(G_i) - u_i, G_i being the bytes of all parameters used at u_i or earlier.
    """
    reduction = "reduce_scatter" if has_shards else "all_reduce"
    alone_us = float(costs.collective_us(reduction, [0.0])[0])
    reduced = max(timing.backward_end_us + alone_us, _latest_us(params, -np.asarray(timing.ready_us), costs, reduction))
    if not has_shards:
        return reduced
    return max(0.0, _latest_us(params, np.asarray(timing.used_us), costs, "all_gather")) + reduced


def eager_limit_us(params: Sequence[ParamSpec], timing: StepTiming, costs: Costs) -> float:
    """No period of steps is shorter whose buckets are stepped and gathered as soon as they are reduced; microseconds.

        limit = max(compute, cost of all, max over i of  r_i + C*(S_i) - last use in S_i)

    S_i as in `limit_us`, C* the cheapest way to reduce and to gather so many bytes; what has become ready at r_i or later is
    through, both ways, before the next forward reads the last of it. A reduction has the lane no longer than a gather of as
    many bytes, adding up beside it. Updates are taken to cost nothing.
    """
    order = sorted(range(len(params)), key=lambda param: -timing.ready_us[param])
    limit, last_use, sizes = timing.backward_end_us, 0.0, np.cumsum([params[param].num_bytes for param in order])
    if not order:
        return limit
    gather = _cheapest_us(costs, "all_gather", sizes)
    cost = gather + np.minimum(gather, _cheapest_us(costs, "reduce_scatter", sizes))
    for param, cost_us in zip(order, cost.tolist(), strict=True):
        last_use = max(last_use, timing.used_us[param])
        limit = max(limit, timing.ready_us[param] + cost_us - last_use)
    return max(limit, float(cost[-1]))


def _latest_us(params: Sequence[ParamSpec], key_us: Floats, costs: Costs, kind: str) -> float:
    """Maximum over i of C*(bytes of all whose key is at most that of i), less the key of i."""
    if not params:
        return 0.0
    order = np.argsort(key_us, kind="stable")
    total = np.zeros(len(params))
    sizes = np.array([params[i].num_bytes for i in order], dtype=np.float64)
    kinds = [params[i].kind for i in order]
    for which in dict.fromkeys(kinds):
        is_of_kind = np.array([each == which for each in kinds])
        together = np.cumsum(np.where(is_of_kind, sizes, 0.0))
        total += np.where(np.cumsum(is_of_kind) > 0, _cheapest_us(costs, kind, together), 0.0)
    return float((total - key_us[order]).max())


def _cheapest_us(costs: Costs, kind: str, num_bytes: ArrayLike) -> Floats:
    """C*(S) from below: S bytes at the best rate of any part of S, and no less than one collective.

    Between two sizes at which the cost is looked up, a part costs no less than at the smaller one and holds no more than the
    larger one; costs do not decrease with the size.
    """
    wanted = np.asarray(num_bytes, dtype=np.float64)
    largest = max(1.0, float(wanted.max()))
    sizes = np.unique(np.concatenate([[0.0], np.geomspace(1.0, largest, _NUM_SIZES), wanted]))
    times = np.minimum.accumulate(costs.collective_us(kind, sizes)[::-1])[::-1]
    rates = np.minimum.accumulate(times[:-1] / sizes[1:])  # of all parts below the next size
    at = np.searchsorted(sizes, wanted)
    full = np.maximum(wanted, 1.0)
    rate = np.minimum(times[at] / full, rates[np.maximum(at - 1, 0)])
    cheapest: Floats = np.maximum(times[0], np.where(wanted > 0, wanted * rate, 0.0))
    return cheapest
