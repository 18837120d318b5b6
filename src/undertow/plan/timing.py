"""When the last bucket is through: the cost model that plans are compared by.

Buckets leave in order, and one collective at a time is on the lane. A bucket starts when the one before it is through and
its last gradient has come:

    F = max(F, latest ready) + C(bytes)

Under shards a bucket's storage is one allocation, so that the same buckets are gathered under the next forward, in the
reverse order: the last one first. A parameter read at u waits for its own bucket and all later ones; what it waits delays
everything behind it as much. Taken from the first bucket on, that is the same recursion with -u for the ready time:

    K = max(K, -earliest use) + C(bytes),   stall = max(0, K)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.cost.costs import Costs
from undertow.errors import ConfigError
from undertow.plan.layout import GroupEntry, ParamSpec, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """When a step has and needs its parameters, without communication; microseconds, each at the latest of all ranks."""

    ready_us: Sequence[float]  # by parameter: its gradient has come, since the step began
    backward_end_us: float  # the last bucket leaves then or later: its trailer carries what is known only then
    used_us: Sequence[float] = ()  # by parameter: first read in forward, since forward began; for shards only

    def __post_init__(self) -> None:
        _check_us("backward_end_us", self.backward_end_us)
        for name, times in (("ready_us", self.ready_us), ("used_us", self.used_us)):
            for param, time in enumerate(times):
                _check_us(f"{name} of parameter {param}", time)


def check_timing(params: Sequence[ParamSpec], timing: StepTiming, *, has_shards: bool) -> None:
    """ConfigError where a parameter has no time."""
    for name, times in (("ready_us", timing.ready_us), *((("used_us", timing.used_us),) if has_shards else ())):
        if len(times) != len(params):
            raise ConfigError(
                f"each of the {len(params)} parameters must have its {name}, got {len(times)} of them.",
                where="the timing of a step",
                remedy="Give one time for each parameter, in the order of the parameters.",
            )


def finish_us(
    params: Sequence[ParamSpec],
    groups: Sequence[Sequence[GroupEntry]],
    timing: StepTiming,
    costs: Costs,
    *,
    has_shards: bool = False,
) -> float:
    """When the last reduction of buckets of `groups` is through, in microseconds since the step began.

    With shards the period of steps without their update: the stall of the next forward, which waits for gathers, and the
    longer of backward and reductions. Bytes are those of gradients, without padding and trailers.
    """
    check_timing(params, timing, has_shards=has_shards)
    filled = [group for group in groups if group] or [()]
    sizes = [sum(_num_bytes(member, params) for member in group) for group in filled]
    ready = [max((timing.ready_us[_param(member)] for member in group), default=0.0) for group in filled]
    ready[-1] = max(ready[-1], timing.backward_end_us)
    if not has_shards:
        return _through_us(ready, costs.collective_us("all_reduce", sizes).tolist())
    reduced = _through_us(ready, costs.collective_us("reduce_scatter", sizes).tolist())
    unused = max(timing.used_us, default=0.0)
    needed = [-min((timing.used_us[_param(member)] for member in group), default=unused) for group in filled]
    return max(0.0, _through_us(needed, costs.collective_us("all_gather", sizes).tolist())) + reduced


def _param(member: GroupEntry) -> int:
    return member.param if isinstance(member, Piece) else member


def _num_bytes(member: GroupEntry, params: Sequence[ParamSpec]) -> int:
    return member.numel * params[member.param].itemsize if isinstance(member, Piece) else params[member].num_bytes


def _through_us(starts: Iterable[float], times: Iterable[float]) -> float:
    through = -math.inf
    for start, time in zip(starts, times, strict=True):
        through = max(through, start) + time
    return through


def _check_us(name: str, time_us: float) -> None:
    if not 0 <= time_us < math.inf:  # NaN is not between them either
        raise ConfigError(
            f"a time of a step must be finite and not negative, got {time_us}.",
            where=name,
            remedy="Count from the beginning of the step or of forward; a gradient that never comes is ready when backward ends.",
        )


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
