"""In which order the lane carries reductions and gathers where buckets are stepped while backward goes on.

Reductions keep the order of the buckets, and a gather goes behind the reduction of its own bucket or of a later one. Which
is reduced last is needed first in the next forward, so that a reduction that is ready goes before any gather, and gathers
fill the lane where it would be idle. A gather that is not through when the next gradient comes delays it; the order is
computed for several shares of a gather that may do so, and the one of the shortest period is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.errors import ConfigError

GathersBehind = tuple[tuple[int, ...], ...]  # by bucket: those that are gathered behind its reduction, in order

# Shares of a gather that may be left when the next gradient comes; 0 fills only gaps that are long enough.
_PATIENCES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTimes:
    """What a step asks of the lane, by bucket; microseconds."""

    ready_us: Sequence[float]  # full, since backward began; the last one not before its end
    reduce_us: Sequence[float]  # the reduction takes
    step_us: Sequence[float]  # the update of this rank's part takes; one at a time
    gather_us: Sequence[float]  # the gather takes
    used_us: Sequence[float]  # first read in forward, since that began
    forward_us: float  # forward takes

    def __post_init__(self) -> None:
        sizes = {len(times) for times in (self.ready_us, self.reduce_us, self.step_us, self.gather_us, self.used_us)}
        if len(sizes) != 1 or sizes == {0}:
            raise ConfigError(
                f"every bucket must have all of its times, got {sorted(sizes)} of them.",
                where="the times of a lane",
                remedy="Give one time of each kind for each bucket, and at least one bucket.",
            )

    @property
    def num_buckets(self) -> int:
        return len(self.ready_us)


class _Lane:
    """Where the lane and the updates are; it carries one collective at a time."""

    def __init__(self, times: LaneTimes) -> None:
        self._times = times
        self.free_us = 0.0
        self.stepped_us: list[float] = []  # by bucket, as far as they are reduced
        self.gathered_us = dict.fromkeys(range(times.num_buckets), 0.0)

    def reduce(self) -> None:
        """The next bucket is reduced, and then stepped."""
        times, bucket = self._times, len(self.stepped_us)
        self.free_us = max(self.free_us, times.ready_us[bucket]) + times.reduce_us[bucket]
        begin_us = max([self.free_us, *self.stepped_us[-1:]])
        self.stepped_us.append(begin_us + times.step_us[bucket])

    def gather(self, bucket: int) -> None:
        self.free_us = self.gather_start_us(bucket) + self._times.gather_us[bucket]
        self.gathered_us[bucket] = self.free_us

    def gather_start_us(self, bucket: int) -> float:
        return max(self.free_us, self.stepped_us[bucket])


def lane_period_us(times: LaneTimes, gathers_behind: GathersBehind) -> float:
    """From the begin of backward to that of the next one: backward until all buckets are stepped, and the forward behind it."""
    lane = _Lane(times)
    for behind in gathers_behind:
        lane.reduce()
        for bucket in behind:
            lane.gather(bucket)
    now_us, computed_us = lane.stepped_us[-1], 0.0
    for bucket in sorted(range(times.num_buckets), key=lambda bucket: times.used_us[bucket]):
        now_us = max(now_us + times.used_us[bucket] - computed_us, lane.gathered_us[bucket])
        computed_us = times.used_us[bucket]
    return now_us + times.forward_us - computed_us


def eager_order(times: LaneTimes) -> GathersBehind:
    """The order of the shortest period that was found; all gathers are behind the last reduction if nothing is gained."""
    orders = [_gathers_last(times), *(_in_gaps(times, patience) for patience in _PATIENCES)]
    return min(orders, key=lambda order: lane_period_us(times, order))


def _gathers_last(times: LaneTimes) -> GathersBehind:
    """All gathers behind the last reduction, in the order in which the forward needs them."""
    num = times.num_buckets
    return (*((),) * (num - 1), tuple(_by_need(times, range(num))))


def _in_gaps(times: LaneTimes, patience: float) -> GathersBehind:
    """Gathers where the lane would be idle, if no more than `patience` of one is left when the next gradient comes."""
    lane = _Lane(times)
    behind: list[list[int]] = []
    waiting: list[int] = []
    for bucket in range(times.num_buckets):
        lane.reduce()
        waiting.append(bucket)
        behind.append([])
        is_last = bucket == times.num_buckets - 1
        next_us = float("inf") if is_last else times.ready_us[bucket + 1]
        while waiting:
            chosen = _next_gather(times, lane, waiting)
            start_us, takes_us = lane.gather_start_us(chosen), times.gather_us[chosen]
            if start_us >= next_us or start_us + takes_us - next_us > patience * takes_us:
                break
            lane.gather(chosen)
            waiting.remove(chosen)
            behind[-1].append(chosen)
    return tuple(map(tuple, behind))


def _next_gather(times: LaneTimes, lane: _Lane, waiting: Sequence[int]) -> int:
    """Of those that can start first the one that is needed first."""
    earliest_us = min(map(lane.gather_start_us, waiting))
    return _by_need(times, [bucket for bucket in waiting if lane.gather_start_us(bucket) == earliest_us])[0]


def _by_need(times: LaneTimes, buckets: Sequence[int]) -> list[int]:
    """Of those read at once the one that is reduced last comes first: its layer is the earlier one."""
    return sorted(buckets, key=lambda bucket: (times.used_us[bucket], -bucket))
