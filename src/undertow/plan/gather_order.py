"""Orders reductions and gathers on the communication stream if buckets are stepped while backward runs.

Reductions keep the order of the buckets. A gather follows the reduction of the same bucket or of a later one. The bucket reduced
last is needed first in the next forward. So a reduction that is ready goes before any gather, and gathers fill the gaps that
would leave the lane idle. A gather that is still running when the next gradient is ready delays that gradient. The order is
computed for several shares of a gather that may run over, and the order with the shortest period wins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from undertow.errors import require

GathersBehind = tuple[tuple[int, ...], ...]  # by bucket: the buckets gathered after its reduction, in order

# Shares of a gather that may remain when the next gradient is ready; 0 fills only gaps that are long enough.
_PATIENCES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTimes:
    """Times of each bucket on the communication stream, in microseconds."""

    ready_us: Sequence[float]  # when the bucket is full, since backward began; the last one not before backward ends
    reduce_us: Sequence[float]  # duration of the reduction
    step_us: Sequence[float]  # duration of the update of this rank's shard; one at a time
    gather_us: Sequence[float]  # duration of the gather
    used_us: Sequence[float]  # first read in forward, since forward began
    forward_us: float  # duration of forward

    def __post_init__(self) -> None:
        sizes = {len(times) for times in (self.ready_us, self.reduce_us, self.step_us, self.gather_us, self.used_us)}
        require(
            len(sizes) == 1 and sizes != {0},
            f"every bucket must have all of its times, got {sorted(sizes)} of them.",
            where="the times of a lane",
            remedy="Give one time of each kind for each bucket, and at least one bucket.",
        )


class _Lane:
    """Tracks the lane, which carries one collective at a time, and the updates."""

    def __init__(self, times: LaneTimes) -> None:
        self._times = times
        self.free_us = 0.0
        self.stepped_us: list[float] = []  # by bucket, for the buckets reduced so far
        self.gathered_us = [0.0] * len(times.ready_us)

    def reduce(self) -> None:
        times, bucket = self._times, len(self.stepped_us)
        self.free_us = max(self.free_us, times.ready_us[bucket]) + times.reduce_us[bucket]
        self.stepped_us.append(max([self.free_us, *self.stepped_us[-1:]]) + times.step_us[bucket])

    def gather(self, bucket: int) -> None:
        self.free_us = self.gather_start_us(bucket) + self._times.gather_us[bucket]
        self.gathered_us[bucket] = self.free_us

    def gather_start_us(self, bucket: int) -> float:
        return max(self.free_us, self.stepped_us[bucket])


def lane_period_us(times: LaneTimes, gathers_behind: GathersBehind) -> float:
    """Returns the period of steps in backward in microseconds: backward until all buckets are stepped, then the next forward."""
    lane = _Lane(times)
    for following in gathers_behind:
        lane.reduce()
        for bucket in following:
            lane.gather(bucket)
    now_us, computed_us = lane.stepped_us[-1], 0.0
    for used_us, gathered_us in sorted(zip(times.used_us, lane.gathered_us, strict=True), key=itemgetter(0)):
        now_us, computed_us = max(now_us + used_us - computed_us, gathered_us), used_us
    return now_us + times.forward_us - computed_us


def in_backward_order(times: LaneTimes) -> GathersBehind:
    """Returns the order with the shortest period found; all gathers follow the last reduction if no other order is shorter."""
    orders = [_gathers_last(times), *(_in_gaps(times, patience) for patience in _PATIENCES)]
    return min(orders, key=lambda order: lane_period_us(times, order))


def _gathers_last(times: LaneTimes) -> GathersBehind:
    by_need = sorted(range(len(times.used_us)), key=lambda bucket: (times.used_us[bucket], -bucket))
    return (*((),) * (len(by_need) - 1), tuple(by_need))


def _in_gaps(times: LaneTimes, patience: float) -> GathersBehind:
    """Puts gathers into gaps of the lane, if at most `patience` of one remains when the next gradient is ready."""
    lane = _Lane(times)
    following: list[list[int]] = []
    waiting: list[int] = []
    for bucket, next_us in enumerate((*times.ready_us[1:], math.inf)):
        lane.reduce()
        waiting.append(bucket)
        following.append([])
        while waiting:
            # Of the buckets that can start first, the one that is needed first. If two are read at once, the one reduced last
            # comes first: its layer is the earlier one.
            chosen = min(waiting, key=lambda it: (lane.gather_start_us(it), times.used_us[it], -it))
            start_us, takes_us = lane.gather_start_us(chosen), times.gather_us[chosen]
            if start_us >= next_us or start_us + takes_us - next_us > patience * takes_us:
                break
            lane.gather(chosen)
            waiting.remove(chosen)
            following[-1].append(chosen)
    return tuple(map(tuple, following))
