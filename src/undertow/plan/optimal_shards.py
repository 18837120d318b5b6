"""Finds the buckets with the shortest period if the same buckets are reduced under backward and gathered under the next forward.

Reductions and gathers each have the lane to themselves, but share one grouping. Two numbers describe a prefix of buckets: the
time at which its reductions end (F), and the stall it would cause by itself (K). The period is max(0, K[n]) + F[n], and both
terms are monotonic in the prefix's. So among all prefixes up to a cut it is enough to keep the ones that no other prefix beats in
both numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from undertow.plan.atoms import Floats, Ints
from undertow.plan.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefixes:
    cut: Ints  # [num] index of the cut at which they end
    reduced_us: Floats  # [num] F
    stall_us: Floats  # [num] K
    parent: Ints  # [num] index of the prefix without the last window, in the layer with one window less

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> _Prefixes:
        return _Prefixes(
            cut=self.cut[which], reduced_us=self.reduced_us[which], stall_us=self.stall_us[which], parent=self.parent[which]
        )

    def joined(self, others: _Prefixes) -> _Prefixes:
        return _Prefixes(
            cut=np.concatenate([self.cut, others.cut]),
            reduced_us=np.concatenate([self.reduced_us, others.reduced_us]),
            stall_us=np.concatenate([self.stall_us, others.stall_us]),
            parent=np.concatenate([self.parent, others.parent]),
        )


class _Lane:
    """One of the two lanes: how windows extend it, and the least time that the rest of a plan costs."""

    def __init__(self, windows: Windows) -> None:
        self.num_cuts = len(windows.time_us)
        self._time = windows.time_us
        self._earliest = windows.earliest_us
        # The lane may also be free later, if no next window would start before that.
        idle = np.where(np.isfinite(self._time), self._earliest - np.where(np.isfinite(self._time), self._time, 0.0), math.inf)
        self._floor = np.append(idle.min(axis=0)[:-1], -math.inf)
        self.start_us = float(self._floor[0])
        self._rest_time, self._rest_earliest = np.zeros(self.num_cuts), np.full(self.num_cuts, -math.inf)
        for begin in range(self.num_cuts - 2, -1, -1):
            ends = slice(begin + 1, None)
            self._rest_time[begin] = (self._time[ends, begin] + self._rest_time[ends]).min()
            least = np.maximum(self._earliest[ends, begin] + self._rest_time[ends], self._rest_earliest[ends])
            self._rest_earliest[begin] = least.min()

    def after(self, us: Floats, begin: Ints, end: Ints) -> Floats:
        """Returns when prefixes up to `begin` end with one more window."""
        through: Floats = np.maximum(us + self._time[end, begin], self._earliest[end, begin])
        np.maximum(through, self._floor[end], out=through)
        return through

    def at_least(self, us: Floats, cut: Ints) -> Floats:
        """Returns a lower bound for the end of any continuation of such prefixes."""
        least: Floats = np.maximum(us + self._rest_time[cut], self._rest_earliest[cut])
        return least


def best_with_shards(reductions: Windows, gathers: Windows, *, slack: float) -> tuple[list[int], float]:
    """Returns the cuts of the fewest windows whose period is within `slack` of the best one, and the best period in us."""
    reduction, gather = _Lane(reductions), _Lane(gathers)
    last = reduction.num_cuts - 1
    start = _Prefixes(
        cut=np.zeros(1, dtype=np.int64),
        reduced_us=np.array([reduction.start_us]),
        stall_us=np.array([gather.start_us]),
        parent=np.zeros(1, dtype=np.int64),
    )
    layers, kept, found = [start], start, [(math.inf, 0)]
    while len(layers[-1].cut):
        longer, period = _prolonged(layers[-1], reduction, gather)
        done = np.where(longer.cut == last, period, math.inf)
        at = int(np.argmin(done))
        found.append(min(found[-1], (float(done[at]), int(longer.parent[at]))))
        layer, kept = _unbeaten(longer.take((longer.cut < last) & (period < found[-1][0])), kept)
        layers.append(layer)
    best = found[-1][0]
    num_windows = next(num for num, (period_us, _) in enumerate(found) if period_us <= best * slack)
    cuts, parent = [last], found[num_windows][1]
    for layer in reversed(layers[:num_windows]):
        cuts.append(int(layer.cut[parent]))
        parent = int(layer.parent[parent])
    return cuts[::-1], best


def _prolonged(prefixes: _Prefixes, reduction: _Lane, gather: _Lane) -> tuple[_Prefixes, Floats]:
    """Extends the prefixes by every possible next window and returns a lower bound of the period of each."""
    parent, end = np.nonzero(prefixes.cut[:, None] < np.arange(reduction.num_cuts))
    begin = prefixes.cut[parent]
    longer = _Prefixes(
        cut=end,
        reduced_us=reduction.after(prefixes.reduced_us[parent], begin, end),
        stall_us=gather.after(prefixes.stall_us[parent], begin, end),
        parent=parent,
    )
    stall = np.maximum(0.0, gather.at_least(longer.stall_us, end))
    return longer, stall + reduction.at_least(longer.reduced_us, end)


def _unbeaten(new: _Prefixes, kept: _Prefixes) -> tuple[_Prefixes, _Prefixes]:
    """Returns the members of `new` that no other prefix beats in both times, and all such prefixes."""
    every = kept.joined(new)
    is_new = np.arange(len(every.cut)) >= len(kept.cut)
    order = np.lexsort((is_new, every.stall_us, every.reduced_us, every.cut))
    stall = every.stall_us[order]
    # Levels are lower for every later cut than for any earlier one, so that one running minimum serves all cuts.
    level = stall - stall.min() - every.cut[order] * (1.0 + stall.max() - stall.min())
    is_beaten = np.append(False, np.minimum.accumulate(level)[:-1] <= level[1:])
    unbeaten = order[~is_beaten]
    return every.take(unbeaten[is_new[unbeaten]]), every.take(unbeaten)
