"""Finds the buckets whose reductions end first, for any cost curve.

Over the cuts 0..n between atoms, let F[i] be the earliest time at which everything before cut i is reduced:

    F[0] = 0,   F[i] = min over j < i of  max(F[j], r_i) + C(B_i - B_j)

This is optimal because a bucket starts at max(F[j], r_i), which is monotonic in F[j]. With at most k windows,

    F_k[i] = min over j < i of  max(F_{k-1}[j], r_i) + C(B_i - B_j)

The plan uses the least k whose F_k[n] is within a small slack of F[n], because every collective has a cost on the host, and on a
network that other jobs use, that no curve shows. docs/planning.md derives both, and the cost of coarsening.

With shards the same buckets are reduced under backward and gathered under the next forward. Reductions and gathers each have the
lane to themselves, but share one grouping. Two numbers describe a prefix of buckets: the time at which its reductions end (F),
and the stall it would cause by itself (K). The period is max(0, K[n]) + F[n], and both terms are monotonic in the prefix's. So
among all prefixes up to a cut it is enough to keep the ones that no other prefix beats in both numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from undertow.cost.costs import Costs
from undertow.errors import ConfigError
from undertow.plan.atoms import (
    Atoms,
    Ints,
    Windows,
    atoms_of,
    gather_windows,
    groups_of,
    reduction_windows,
    small_pieces,
    whole_pieces,
)
from undertow.plan.layout import GroupEntry, ParamSpec
from undertow.plan.timing import Floats, StepTiming, check_timing, finish_us, limit_us

SLACK = 1.002  # a plan of fewer buckets may end later than the optimum by this factor
_MAX_ATOMS = 512
_MAX_ATOMS_WITH_SHARDS = 128  # docs/planning.md shows the gain and the time of twice as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The plan with the fewest buckets within the slack of the best one; microseconds, as `finish_us` counts."""

    groups: tuple[tuple[GroupEntry, ...], ...]  # input of `plan_from_groups`
    finish_us: float  # under these groups
    best_us: float  # under the best groups, however many
    limit_us: float  # lower bound: no grouping, order or splitting ends earlier


def optimal_groups(  # noqa: PLR0913  # the parameters, the run they are planned for, and the one limit of memory
    params: Sequence[ParamSpec],
    order: Sequence[int],
    timing: StepTiming,
    costs: Costs,
    *,
    num_ranks: int,
    has_shards: bool = False,
    max_bucket_bytes: float = math.inf,
) -> Optimum:
    """Groups consecutive parameters of `order` into the buckets that end first, with as few buckets as come close to that.

    With shards it minimizes the period instead, and cuts large parameters into pieces. A parameter above `max_bucket_bytes`
    travels alone, or is cut. With several dtypes it minimizes the number of windows, each with one bucket per dtype in it. Costs
    must not decrease with the size; for any other curve the plan is still the best one, but `limit_us` may be as high as
    `best_us`.

    - `timing`: ready times of gradients, and with shards first uses of parameters, in microseconds.
    - `costs`: the time of a collective by kind and bytes.

    Raises ConfigError if `order` is not a permutation of the parameters, a time is missing, `max_bucket_bytes` is too small for a
    plan, or no plan has a finite cost.
    """
    check_timing(params, timing, has_shards=has_shards)
    if sorted(order) != list(range(len(params))):
        raise ConfigError(
            f"an order must hold each of the {len(params)} parameters exactly once.",
            where=f"got {len(order)} indices, {len(set(order) & set(range(len(params))))} of them different parameters",
            remedy="Give a permutation of range(len(params)).",
        )
    limit = limit_us(params, timing, costs, has_shards=has_shards)
    if not params:
        finish = finish_us(params, (), timing, costs, has_shards=has_shards)
        return Optimum(groups=(), finish_us=finish, best_us=finish, limit_us=min(limit, finish))
    pieces, max_atoms = whole_pieces(params, order), _MAX_ATOMS
    if has_shards:
        pieces = small_pieces(params, order, num_ranks=num_ranks, max_bucket_bytes=max_bucket_bytes)
        max_atoms = _MAX_ATOMS_WITH_SHARDS
    atoms = atoms_of(params, pieces, timing, max_atoms=max_atoms, has_shards=has_shards, max_bucket_bytes=max_bucket_bytes)
    chosen, best = _chosen_cuts(atoms, costs, has_shards=has_shards, max_bucket_bytes=max_bucket_bytes)
    if not math.isfinite(best):
        raise ConfigError(
            f"no plan is ever through: a collective costs {best}.",
            where=f"costs of {'reduce_scatter and all_gather' if has_shards else 'all_reduce'}",
            remedy="Give finite costs for all sizes up to those of all gradients together.",
        )
    groups = groups_of(atoms, params, chosen)
    finish = finish_us(params, groups, timing, costs, has_shards=has_shards)
    best = min(best, finish)
    return Optimum(groups=groups, finish_us=finish, best_us=best, limit_us=min(limit, best))


def _chosen_cuts(atoms: Atoms, costs: Costs, *, has_shards: bool, max_bucket_bytes: float) -> tuple[list[int], float]:
    """Returns the cuts of the plan, and the end of the best one."""
    if not has_shards:
        windows = reduction_windows(atoms, costs, "all_reduce", max_bucket_bytes=max_bucket_bytes)
        best = _best_us(windows)
        return _fewest_cuts(windows, enough_us=best * SLACK), best
    reductions = reduction_windows(atoms, costs, "reduce_scatter", max_bucket_bytes=max_bucket_bytes)
    gathers = gather_windows(atoms, costs, max_bucket_bytes=max_bucket_bytes)
    return best_with_shards(reductions, gathers, slack=SLACK)


def _best_us(windows: Windows) -> float:
    """Returns F[n]."""
    through = np.zeros(len(windows.time_us))
    for end in range(1, len(through)):
        through[end] = windows.through_us(through, end).min()
    return float(through[-1])


def _fewest_cuts(windows: Windows, *, enough_us: float) -> list[int]:
    """Returns the cuts of the fewest windows that end by `enough_us`; among those, of the plan that ends first."""
    through = np.full(len(windows.time_us), math.inf)
    through[0] = 0.0
    tables = [through]
    while tables[-1][-1] > enough_us:
        tables.append(np.maximum(tables[-1] + windows.time_us, windows.earliest_us).min(axis=1))
        tables[-1][0] = 0.0
    cuts = [len(through) - 1]
    for table in reversed(tables[:-1]):
        if cuts[-1] > 0:
            cuts.append(int(np.argmin(windows.through_us(table, cuts[-1]))))
    return cuts[::-1]


class _Prefixes(NamedTuple):
    """Prefixes of plans, as arrays of one length."""

    cut: Ints  # index of the cut at which they end
    reduced_us: Floats  # F
    stall_us: Floats  # K
    parent: Ints  # index of the prefix without the last window, in the layer with one window less

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> "_Prefixes":
        return _Prefixes(*(array[which] for array in self))


class _Lane:
    """One of the two lanes: how windows extend it, and the least time that the rest of a plan costs."""

    def __init__(self, windows: Windows) -> None:
        self._time, self._earliest = windows.time_us, windows.earliest_us
        # The lane may also be free later, if no next window would start before that.
        idle = np.where(np.isfinite(self._time), self._earliest - np.where(np.isfinite(self._time), self._time, 0.0), math.inf)
        self._floor = np.append(idle.min(axis=0)[:-1], -math.inf)
        self.start_us = float(self._floor[0])
        self.num_cuts = len(self._time)
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
    every = _Prefixes(*map(np.concatenate, zip(kept, new, strict=True)))
    is_new = np.arange(len(every.cut)) >= len(kept.cut)
    order = np.lexsort((is_new, every.stall_us, every.reduced_us, every.cut))
    stall = every.stall_us[order]
    # Levels are lower for every later cut than for any earlier one, so that one running minimum serves all cuts.
    level = stall - stall.min() - every.cut[order] * (1.0 + stall.max() - stall.min())
    is_beaten = np.append(False, np.minimum.accumulate(level)[:-1] <= level[1:])
    unbeaten = order[~is_beaten]
    return every.take(unbeaten[is_new[unbeaten]]), every.take(unbeaten)
