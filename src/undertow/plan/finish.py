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

from undertow.cost.costs import Costs
from undertow.errors import ConfigError
from undertow.plan.layout import Member, Piece
from undertow.plan.spec import ParamSpec


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
    groups: Sequence[Sequence[Member]],
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


def _param(member: Member) -> int:
    return member.param if isinstance(member, Piece) else member


def _num_bytes(member: Member, params: Sequence[ParamSpec]) -> int:
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
