"""The buckets with which reductions are through first, for any cost curve.

Over the cuts 0..n between atoms, with F[i] the earliest time at which everything before cut i is through:

    F[0] = 0,   F[i] = min over j < i of  max(F[j], r_i) + C(B_i - B_j)

It is optimal because a bucket starts at max(F[j], r_i), which only grows with F[j]. With at most k windows,

    F_k[i] = min over j < i of  max(F_{k-1}[j], r_i) + C(B_i - B_j)

and the plan is that of the least k whose F_k[n] is within a small slack of F[n]: every collective has a price on the host,
and on a network that other jobs use, that no curve shows. docs/planning.md derives both, and what coarsening costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from undertow.cost.costs import Costs
from undertow.errors import ConfigError
from undertow.plan.atoms import Atoms, Floats, atoms_of, groups_of, small_pieces, whole_pieces
from undertow.plan.layout import GroupEntry, ParamSpec
from undertow.plan.optimal_shards import best_with_shards
from undertow.plan.timing import StepTiming, check_timing, finish_us, limit_us
from undertow.plan.windows import Windows, gather_windows, reduction_windows

SLACK = 1.002  # how much later than the optimum a plan of fewer buckets may be through
_MAX_ATOMS = 512
_MAX_ATOMS_WITH_SHARDS = 128  # docs/planning.md says what twice as many would gain, and how long they would take


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The plan of fewest buckets within the slack of the best one; microseconds, as `finish_us` counts."""

    groups: tuple[tuple[GroupEntry, ...], ...]  # what `plan_from_groups` makes a plan of
    finish_us: float  # under these groups
    best_us: float  # under the best ones, however many
    limit_us: float  # no grouping, order or splitting is through earlier


def optimal_groups(  # noqa: PLR0913  # what is planned, what it is planned for, and the one limit of memory
    params: Sequence[ParamSpec],
    order: Sequence[int],
    timing: StepTiming,
    costs: Costs,
    *,
    num_ranks: int,
    has_shards: bool = False,
    max_bucket_bytes: float = math.inf,
) -> Optimum:
    """The buckets of consecutive parameters of `order` that are through first, and as few as come close to that.

    With shards those of the shortest period, large parameters in pieces. A parameter above `max_bucket_bytes` travels alone,
    or is cut; with several dtypes the windows are fewest, each a bucket for every dtype in it. Costs do not decrease with the
    size; the plan is the best one for any other curve too, but then `limit_us` may be as high as `best_us`.
    """
    check_timing(params, timing, has_shards=has_shards)
    _check_order(order, len(params))
    limit = limit_us(params, timing, costs, has_shards=has_shards)
    if not params:
        finish = finish_us(params, (), timing, costs, has_shards=has_shards)
        return Optimum(groups=(), finish_us=finish, best_us=finish, limit_us=min(limit, finish))
    if has_shards:
        pieces = small_pieces(params, order, num_ranks=num_ranks, max_bucket_bytes=max_bucket_bytes)
    else:
        pieces = whole_pieces(params, order)
    max_atoms = _MAX_ATOMS_WITH_SHARDS if has_shards else _MAX_ATOMS
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
    """Cuts of the plan, and the finish of the best one."""
    if not has_shards:
        windows = reduction_windows(atoms, costs, "all_reduce", max_bucket_bytes=max_bucket_bytes)
        best = _best_us(windows)
        return _fewest_cuts(windows, enough_us=best * SLACK), best
    reductions = reduction_windows(atoms, costs, "reduce_scatter", max_bucket_bytes=max_bucket_bytes)
    gathers = gather_windows(atoms, costs, max_bucket_bytes=max_bucket_bytes)
    return best_with_shards(reductions, gathers, slack=SLACK)


def _best_us(windows: Windows) -> float:
    """F[n]."""
    through = np.zeros(len(windows.time_us))
    for end in range(1, len(through)):
        through[end] = np.maximum(through[:end] + windows.time_us[end, :end], windows.earliest_us[end, :end]).min()
    return float(through[-1])


def _fewest_cuts(windows: Windows, *, enough_us: float) -> list[int]:
    """Cuts of the fewest windows that are through by `enough_us`, and of those of the first to be through."""
    through = np.full(len(windows.time_us), math.inf)
    through[0] = 0.0
    tables = [through]
    while tables[-1][-1] > enough_us:
        tables.append(np.maximum(tables[-1] + windows.time_us, windows.earliest_us).min(axis=1))
        tables[-1][0] = 0.0
    cuts = [len(through) - 1]
    for table in reversed(tables[:-1]):
        end = cuts[-1]
        if end > 0:
            cuts.append(int(np.argmin(_through(table, windows, end))))
    return cuts[::-1]


def _through(table: Floats, windows: Windows, end: int) -> Floats:
    return np.maximum(table[:end] + windows.time_us[end, :end], windows.earliest_us[end, :end])


def _check_order(order: Sequence[int], num_params: int) -> None:
    if sorted(order) != list(range(num_params)):
        raise ConfigError(
            f"an order must hold each of the {num_params} parameters exactly once.",
            where=f"got {len(order)} indices, {len(set(order) & set(range(num_params)))} of them different parameters",
            remedy="Give a permutation of range(len(params)).",
        )
