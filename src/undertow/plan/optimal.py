"""Finds the buckets whose reductions end first, for any cost curve.

Over the cuts 0..n between atoms, let F[i] be the earliest time at which everything before cut i is reduced:

    F[0] = 0,   F[i] = min over j < i of  max(F[j], r_i) + C(B_i - B_j)

This is optimal because a bucket starts at max(F[j], r_i), which is monotonic in F[j]. With at most k windows,

    F_k[i] = min over j < i of  max(F_{k-1}[j], r_i) + C(B_i - B_j)

The plan uses the least k whose F_k[n] is within a small slack of F[n], because every collective has a cost on the host, and on a
network that other jobs use, that no curve shows. docs/planning.md derives both, and the cost of coarsening.

Atoms are runs of neighboring gradients that are ready at almost the same time, and pieces of large gradients. A window lies
between two cuts. Windows are arrays over all pairs of cuts: how each changes the time at which the lane is free.

With shards the same buckets are reduced under backward and gathered under the next forward. Reductions and gathers each have the
lane to themselves, but share one grouping. Two numbers describe a prefix of buckets: the time at which its reductions end (F),
and the stall it would cause by itself (K). The period is max(0, K[n]) + F[n], and both terms are monotonic in the prefix's. So
among all prefixes up to a cut it is enough to keep the ones that no other prefix beats in both numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undertow.cost.costs import Costs, Floats
from undertow.errors import require
from undertow.plan.layout import GroupEntry, Kind, ParamSpec, Piece, member_of, num_bytes_of, piece_of, share_numel
from undertow.plan.timing import StepTiming, check_timing, finish_us, limit_us

Ints = NDArray[np.int64]

_FINEST = 16.0  # cells to try first, per atom; finer ones would save less than the slack of a plan
_COARSER = 0.8  # factor to the next number of cells
_MOST_PIECES = 64  # of all parameters together, unless the cap on buckets requires more
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
    bucket_us: float = 0.0,
) -> Optimum:
    """Groups parameters into the buckets that end first, with as few buckets as come close to that.

    Each bucket has consecutive parameters of `order`. With shards it minimizes the period
    instead, and cuts large parameters into pieces. With several dtypes it minimizes the number of
    windows, each with one bucket per dtype in it.

    Args:
        params: The parameters, in the order of their registration.
        order: Indices of the parameters in the order their gradients become ready.
        timing: Ready times of gradients, and with shards first uses of parameters, in
            microseconds.
        costs: The time of a collective by kind and bytes. It must not decrease with the size;
            for any other curve the plan is still the best one, but `limit_us` may be as high as
            `best_us`.
        num_ranks: Ranks that the buckets are reduced over.
        has_shards: True plans a reduce-scatter and an all-gather for each bucket.
        max_bucket_bytes: A parameter above it travels alone, or is cut.
        bucket_us: Processor time of a bucket, if fewer buckets that end later by no more than that
            are to be preferred.

    Returns:
        The buckets, their time, and lower bounds of it.

    Raises:
        ConfigError: If `order` is not a permutation of the parameters, a time is missing,
            `max_bucket_bytes` is too small for a plan, or no plan has a finite cost.
    """
    check_timing(params, timing, has_shards=has_shards)
    require(
        sorted(order) == list(range(len(params))),
        f"an order must hold each of the {len(params)} parameters exactly once.",
        where=f"got {len(order)} indices, {len(set(order) & set(range(len(params))))} of them different parameters",
        remedy="Give a permutation of range(len(params)).",
    )
    limit = limit_us(params, timing, costs, has_shards=has_shards)
    if not params:
        finish = finish_us(params, (), timing, costs, has_shards=has_shards)
        return Optimum(groups=(), finish_us=finish, best_us=finish, limit_us=min(limit, finish))
    max_atoms, pieces = _MAX_ATOMS, [piece_of(param, params) for param in order]
    if has_shards:
        max_atoms = _MAX_ATOMS_WITH_SHARDS
        pieces = small_pieces(params, order, num_ranks=num_ranks, max_bucket_bytes=max_bucket_bytes)
    atoms = atoms_of(params, pieces, timing, max_atoms=max_atoms, has_shards=has_shards, max_bucket_bytes=max_bucket_bytes)
    chosen, best = _chosen_cuts(atoms, costs, has_shards=has_shards, max_bucket_bytes=max_bucket_bytes, bucket_us=bucket_us)
    require(
        math.isfinite(best),
        f"no plan has a finite time: a collective costs {best}.",
        where=f"costs of {'reduce_scatter and all_gather' if has_shards else 'all_reduce'}",
        remedy="Give finite costs for all sizes up to the size of all gradients together.",
    )
    groups = groups_of(atoms, params, chosen)
    finish = finish_us(params, groups, timing, costs, has_shards=has_shards)
    # Atoms hide the finest plan where messages cost next to nothing: a plan is not to be slower than that one.
    alone = tuple((param,) for param in order)
    alone_us = finish_us(params, alone, timing, costs, has_shards=has_shards)
    is_faster = alone_us * SLACK + bucket_us * (len(alone) - len(groups)) < finish
    if is_faster and (not has_shards or max(spec.num_bytes for spec in params) <= max_bucket_bytes):
        groups, finish = alone, alone_us
    best = min(best, finish)
    return Optimum(groups=groups, finish_us=finish, best_us=best, limit_us=min(limit, best))


@dataclass(frozen=True, slots=True, kw_only=True)
class Atoms:
    """Positions at which buckets may be cut, and totals of the pieces before each; a window lies between two cuts.

    Gradients of different kinds do not share a bucket: a window is one bucket per kind in it. Arrays have a row per kind and a
    column per cut; the first cut is before all pieces.
    """

    pieces: Sequence[Piece]  # of all parameters, in launch order
    cuts: Ints  # [num_cuts] pieces before each cut
    num_bytes: Floats  # [num_kinds, num_cuts] before the cut
    num_pieces: Ints  # [num_kinds, num_cuts] before the cut
    last: Ints  # [num_kinds, num_cuts] the last piece before the cut; -1 if none
    ready_us: Floats  # [num_kinds, num_cuts] when that piece and all before it of its kind are ready
    used_us: Floats  # [num_kinds, num_cuts] earliest use between the cut and the one before it; infinity if none
    kinds: Ints  # [num_pieces] kind of each piece


def atoms_of(
    params: Sequence[ParamSpec],
    pieces: Sequence[Piece],
    timing: StepTiming,
    *,
    max_atoms: int,
    has_shards: bool = False,
    max_bucket_bytes: float = math.inf,
) -> Atoms:
    """Returns at most `max_atoms` atoms, one per piece if possible.

    If `max_bucket_bytes` requires it, up to twice as many; raises ConfigError if that is not enough.
    """
    index_of_kind: dict[Kind, int] = {}
    kinds = np.array([index_of_kind.setdefault(params[it.param].kind, len(index_of_kind)) for it in pieces], dtype=np.int64)
    sizes = np.array([num_bytes_of(piece, params) for piece in pieces], dtype=np.float64)
    ready = np.array([timing.ready_us[piece.param] for piece in pieces], dtype=np.float64)
    used = np.array([timing.used_us[piece.param] if has_shards else math.inf for piece in pieces])  # only known with shards
    cuts = _cuts(sizes, np.maximum.accumulate(ready), used, max_atoms=max_atoms, max_bucket_bytes=max_bucket_bytes)

    require(
        len(cuts) - 1 <= 2 * max_atoms,
        f"buckets of at most {max_bucket_bytes:.0f} bytes are too small to be planned.",
        where=f"{sizes.sum():.0f} bytes of gradients, in at most {2 * max_atoms} parts that no bucket may cut",
        remedy=f"Allow buckets of {math.ceil(8 * sizes.sum() / max_atoms)} bytes.",
    )

    is_of = kinds == np.arange(len(index_of_kind))[:, None]
    ready_at = _before(np.maximum.accumulate(np.where(is_of, ready, 0.0), axis=1), cuts, first=0.0)
    ready_at[kinds[-1], -1] = max(ready_at[kinds[-1], -1], timing.backward_end_us)
    use = np.where(is_of, used, math.inf)
    no_use = np.full((len(index_of_kind), 1), math.inf)
    return Atoms(
        pieces=pieces,
        cuts=cuts,
        num_bytes=_before(np.cumsum(np.where(is_of, sizes, 0.0), axis=1), cuts, first=0.0),
        num_pieces=_before(np.cumsum(is_of, axis=1, dtype=np.int64), cuts, first=0),
        last=_before(np.maximum.accumulate(np.where(is_of, np.arange(len(pieces)), -1), axis=1), cuts, first=-1),
        ready_us=ready_at,
        used_us=np.hstack([no_use, np.minimum.reduceat(use, cuts[:-1], axis=1)]),
        kinds=kinds,
    )


def small_pieces(params: Sequence[ParamSpec], order: Sequence[int], *, num_ranks: int, max_bucket_bytes: float) -> list[Piece]:
    """Cuts large parameters into even pieces that begin at multiples of 16 bytes and of the number of ranks.

    A piece is at most as large as a bucket may be. It is also at most a share of all bytes so small that it hardly matters
    whether the piece travels in this bucket or the next.
    """
    most_bytes = min(sum(spec.num_bytes for spec in params) / _MOST_PIECES, max_bucket_bytes)
    return [piece for param in order for piece in _cut_evenly(piece_of(param, params), params[param], num_ranks, most_bytes)]


def groups_of(atoms: Atoms, params: Sequence[ParamSpec], chosen: Sequence[int]) -> tuple[tuple[GroupEntry, ...], ...]:
    """Returns the buckets of the windows between `chosen` cuts, in launch order."""
    groups = (
        _members(atoms, params, range(atoms.cuts[begin], atoms.cuts[end]), kind)
        for begin, end in pairwise(chosen)
        for kind in np.argsort(atoms.last[:, end], kind="stable")
    )
    return tuple(filter(None, groups))


def _members(atoms: Atoms, params: Sequence[ParamSpec], window: range, kind: int) -> tuple[GroupEntry, ...]:
    pieces = (atoms.pieces[at] for at in window if atoms.kinds[at] == kind)
    runs = [list(run) for _, run in groupby(pieces, key=attrgetter("param"))]  # consecutive pieces of a parameter
    return tuple(member_of(replace(run[0], stop=run[-1].stop), params) for run in runs)


def _cut_evenly(piece: Piece, spec: ParamSpec, num_ranks: int, most_bytes: float) -> list[Piece]:
    if spec.num_bytes <= most_bytes:
        return [piece]
    share = share_numel(piece.numel, itemsize=spec.itemsize, num_ranks=num_ranks, most_bytes=most_bytes)
    return [replace(piece, first=first, stop=min(first + share, piece.stop)) for first in range(0, piece.stop, share)]


def _before(values: NDArray[Any], cuts: Ints, *, first: float) -> NDArray[Any]:
    return np.hstack([np.full((len(values), 1), first, dtype=values.dtype), values[:, cuts[1:] - 1]])


def _cuts(sizes: Floats, ready: Floats, used: Floats, *, max_atoms: int, max_bucket_bytes: float) -> Ints:
    """Returns the number of pieces before each cut.

    If there are at most `max_atoms` pieces, each is an atom. Else cuts are where a ready time, an end in bytes, or a use enters
    another cell. The cells are as fine as `max_atoms` allows. Cells of bytes are at most half a bucket, and a larger piece is an
    atom by itself, so that every atom of several pieces fits into a bucket.
    """
    ends = np.cumsum(sizes)
    is_large = sizes > max_bucket_bytes / 2
    forced = is_large[1:] | is_large[:-1] | (np.diff(ends // (max_bucket_bytes / 2)) > 0)
    num_cells = _FINEST * max_atoms
    is_cut = np.ones(len(sizes) - 1, dtype=bool)
    while np.count_nonzero(is_cut) >= max_atoms and num_cells >= 1:
        is_cut = np.any([np.diff(_cell(signal, int(num_cells))) != 0 for signal in (ready, ends, used)], axis=0)
        num_cells *= _COARSER
    return np.concatenate([[0], np.flatnonzero(is_cut | forced) + 1, [len(sizes)]]).astype(np.int64)


def _cell(signal: Floats, num_cells: int) -> Floats:
    low, high = float(signal.min()), float(signal.max())
    return (
        np.zeros(len(signal)) if high <= low else np.minimum(np.floor((signal - low) * (num_cells / (high - low))), num_cells - 1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """A lane that is free at F ends the window from cut j to cut i at max(F + time[i, j], earliest[i, j]).

    A single bucket has time = C and earliest = ready + C. Several in a row have the same form. Windows that no plan may use are
    infinite.
    """

    time_us: Floats  # [num_cuts, num_cuts] end, begin
    earliest_us: Floats  # [num_cuts, num_cuts] end, begin

    def through_us(self, free_us: Floats, end: int) -> Floats:
        """Returns when each window up to cut `end` ends, if the lane is free at `free_us` of its begin."""
        return _later(free_us[:end] + self.time_us[end, :end], self.earliest_us[end, :end])


def _later(one: Floats, other: Floats) -> Floats:
    later: Floats = np.maximum(one, other)
    return later


def _windows(atoms: Atoms, released_us: Floats, costs: Costs, kind: str, max_bucket_bytes: float) -> Windows:
    # Of each kind of gradients [num_kinds, num_cuts, num_cuts] kind, end, begin
    num_bytes = np.maximum(0.0, atoms.num_bytes[:, :, None] - atoms.num_bytes[:, None, :])
    num_pieces = atoms.num_pieces[:, :, None] - atoms.num_pieces[:, None, :]
    bucket_us = np.where(num_pieces > 0, costs.collective_us(kind, num_bytes), 0.0)
    released_us = np.where(num_pieces > 0, released_us, -math.inf)
    time = np.zeros(num_bytes.shape[1:])
    earliest = np.full(num_bytes.shape[1:], -math.inf)
    for kinds in np.argsort(-atoms.last, axis=0, kind="stable"):  # by their last piece, the latest first
        place = kinds[None, :, None]
        time += np.take_along_axis(bucket_us, place, axis=0)[0]
        earliest = np.maximum(earliest, np.take_along_axis(released_us, place, axis=0)[0] + time)
    is_barred = ~np.tri(len(atoms.cuts), k=-1, dtype=bool) | ((num_bytes > max_bucket_bytes) & (num_pieces > 1)).any(axis=0)
    time[is_barred] = earliest[is_barred] = math.inf
    return Windows(time_us=time, earliest_us=earliest)


def _chosen_cuts(
    atoms: Atoms, costs: Costs, *, has_shards: bool, max_bucket_bytes: float, bucket_us: float
) -> tuple[list[int], float]:
    """Returns the cuts of the plan, and the end of the best one."""
    kind = "reduce_scatter" if has_shards else "all_reduce"
    reductions = _windows(atoms, atoms.ready_us[:, :, None], costs, kind, max_bucket_bytes)
    if not has_shards:
        best = _best_us(reductions)
        return _fewest_cuts(reductions, enough_us=best * SLACK, bucket_us=bucket_us), best
    # Gathers go from last to first: F is the stall that later buckets cause if nothing else does.
    is_inside = np.tri(len(atoms.cuts), k=-1, dtype=bool).T  # [begin, end]: the atom before `end` comes after `begin`
    used = np.minimum.accumulate(np.where(is_inside, atoms.used_us[:, None, :], math.inf), axis=2)
    gathers = _windows(atoms, -used.transpose(0, 2, 1), costs, "all_gather", max_bucket_bytes)
    return best_with_shards(reductions, gathers, slack=SLACK, bucket_us=bucket_us)


def _best_us(windows: Windows) -> float:
    """Returns F[n]."""
    through = np.zeros(len(windows.time_us))
    for end in range(1, len(through)):
        through[end] = windows.through_us(through, end).min()
    return float(through[-1])


def _fewest_cuts(windows: Windows, *, enough_us: float, bucket_us: float) -> list[int]:
    """Returns the cuts of the fewest windows that end by `enough_us`; among those, of the plan that ends first.

    Fewer windows are taken if that saves more than it costs, at `bucket_us` for each.
    """
    through = np.full(len(windows.time_us), math.inf)
    through[0] = 0.0
    tables = [through]
    while tables[-1][-1] > enough_us:
        tables.append(np.maximum(tables[-1] + windows.time_us, windows.earliest_us).min(axis=1))
        tables[-1][0] = 0.0
    num_windows = int(np.argmin([max(table[-1], enough_us) + num * bucket_us for num, table in enumerate(tables)]))
    cuts = [len(through) - 1]
    for table in reversed(tables[:num_windows]):
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
        return _Prefixes(self.cut[which], self.reduced_us[which], self.stall_us[which], self.parent[which])


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
        return _later(_later(us + self._time[end, begin], self._earliest[end, begin]), self._floor[end])

    def at_least(self, us: Floats, cut: Ints) -> Floats:
        """Returns a lower bound for the end of any continuation of such prefixes."""
        return _later(us + self._rest_time[cut], self._rest_earliest[cut])


def best_with_shards(reductions: Windows, gathers: Windows, *, slack: float, bucket_us: float = 0.0) -> tuple[list[int], float]:
    """Returns the cuts of the fewest windows whose period is within `slack` of the best one, and the best period in us.

    Fewer windows are taken if that saves more than it costs, at `bucket_us` for each.
    """
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
    num_windows = int(np.argmin([max(us, best * slack) + num * bucket_us for num, (us, _) in enumerate(found)]))
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
    return longer, np.maximum(0.0, gather.at_least(longer.stall_us, end)) + reduction.at_least(longer.reduced_us, end)


def _unbeaten(new: _Prefixes, kept: _Prefixes) -> tuple[_Prefixes, _Prefixes]:
    """Returns the members of `new` that no other prefix beats in both times, and all such prefixes."""
    every = _Prefixes(
        cut=np.concatenate([kept.cut, new.cut]),
        reduced_us=np.concatenate([kept.reduced_us, new.reduced_us]),
        stall_us=np.concatenate([kept.stall_us, new.stall_us]),
        parent=np.concatenate([kept.parent, new.parent]),
    )
    is_new = np.arange(len(every.cut)) >= len(kept.cut)
    order = np.lexsort((is_new, every.stall_us, every.reduced_us, every.cut))
    stall = every.stall_us[order]
    # Levels are lower for every later cut than for any earlier one, so that one running minimum serves all cuts.
    level = stall - stall.min() - every.cut[order] * (1.0 + stall.max() - stall.min())
    unbeaten = order[~np.append(False, np.minimum.accumulate(level)[:-1] <= level[1:])]
    return every.take(unbeaten[is_new[unbeaten]]), every.take(unbeaten)
