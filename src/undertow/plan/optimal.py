"""Finds the buckets whose reductions end first, for any cost curve.

Over the cuts 0..n between atoms, let F[i] be the earliest time at which everything before cut i is reduced:

    F[0] = 0,   F[i] = min over j < i of  max(F[j], r_i) + C(B_i - B_j)

This is optimal because a bucket starts at max(F[j], r_i), which is monotonic in F[j]. With at most k windows,

    F_k[i] = min over j < i of  max(F_{k-1}[j], r_i) + C(B_i - B_j)

The plan uses the least k whose F_k[n] is within a small slack of F[n], because every collective has a cost on the host, and on a
network that other jobs use, that no curve shows. docs/planning.md derives both, and the cost of coarsening.
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
        through[end] = np.maximum(through[:end] + windows.time_us[end, :end], windows.earliest_us[end, :end]).min()
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
