"""Chooses one owner for each parameter of the buckets whose optimizer needs whole parameters.

    owners = owners_of(params, groups, num_ranks=4)  # owners[bucket][slot] is a rank of the axis

It needs the plan's parameters, its groups in launch order, and the number of ranks of the shard
axis. A bucket in equal parts has an empty group here. The result has the form of `groups`, with
ranks instead of parameters. It depends on the arguments alone, and its arithmetic is exact or
IEEE's, so that every rank finds the same owners.

Owners meet three aims:

*   Every rank has about the same work in its updates, and about the same bytes. Parameters are
    placed largest first. The least loaded rank would make this "longest processing time first",
    which is at most a third above the best maximum (Graham 1969, "Bounds on Multiprocessing Timing
    Anomalies": 4/3 - 1/(3 ranks)).
*   The largest part of each bucket, and of two neighbors together, is small: the network takes as
    long as the largest part. So a parameter goes to the rank with the fewest bytes in its bucket
    and the neighbors, among the ranks that stay within a limit on their load. The limit is tried at
    several values. The assignment with the smallest parts wins among the balanced ones.
*   Gathers leave in the order of the forward. They leave by bucket, so owners cannot change their
    order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from undertow.plan.layout import Groups, ParamSpec

LIMITS = (1.0, 1.02, 1.05, 1.1, 1.2)  # of a rank's load relative to the lower bound
# Of a bucket's largest part: above it, ranks exchange equal pieces, and send the owners theirs.
MOST_OVER_MEAN = 2
BALANCED = 1.05  # up to this maximum load, smaller parts count more than a lower maximum


def update_work(spec: ParamSpec) -> int:
    """Returns the work of one update relative to other parameters.

    An iteration of Newton-Schulz multiplies a matrix by its Gram matrix on the short side: the long
    side times the short one squared. A tensor of more axes counts as a matrix, flattened from its
    second axis on. Anything else counts by its elements.
    """
    if len(spec.shape) < 2:
        return spec.numel
    rows, columns = spec.shape[0], math.prod(spec.shape[1:])
    return max(rows, columns) * min(rows, columns) ** 2


def lower_bound(sizes: Sequence[int], num_ranks: int) -> float:
    """Returns a bound that the largest rank's total cannot be below.

    It is the mean, the largest size, or the sum of the sizes that two of `num_ranks` + 1 must
    share, whichever is largest.
    """
    falling = sorted(sizes, reverse=True)
    shared = sum(falling[num_ranks - 1 : num_ranks + 1]) if len(falling) > num_ranks else 0
    return max(sum(falling) / num_ranks, shared, *falling[:1])


def owners_of(
    params: Sequence[ParamSpec],
    groups: Sequence[Sequence[int]],
    *,
    num_ranks: int,
) -> Groups:
    """Returns the owner of each parameter in `groups`, a rank below `num_ranks`.

    Args:
        params: The parameters of the plan.
        groups: The parameters of each bucket, by index, in launch order. Empty for a bucket that
            is cut into equal parts.
        num_ranks: The ranks that share the parameters.
    """
    slots = [(bucket, param) for bucket, group in enumerate(groups) for param in group]
    work = [update_work(params[param]) for _, param in slots]
    num_bytes = [params[param].num_bytes for _, param in slots]
    work_bound = lower_bound(work, num_ranks) or 1.0
    bytes_bound = lower_bound(num_bytes, num_ranks) or 1.0
    items = [
        _Update(
            param=param,
            bucket=bucket,
            num_bytes=size,
            load=np.array([done / work_bound, size / bytes_bound]),
        )
        for (bucket, param), done, size in zip(slots, work, num_bytes, strict=True)
    ]
    items.sort(key=lambda item: -item.load.max())  # equal ones in launch order
    tried = [_assigned(items, len(groups), num_ranks, limit) for limit in LIMITS]
    enough = max(BALANCED, min(one.load for one in tried))
    best = min((one for one in tried if one.load <= enough), key=lambda one: one.parts)
    return tuple(tuple(best.owners[param] for param in group) for group in groups)


def largest_over_mean(
    params: Sequence[ParamSpec],
    group: Sequence[int],
    owners: Sequence[int] | None,
    *,
    num_ranks: int,
    wire: str | None = None,
    is_gather: bool = False,
) -> float:
    """Returns the bytes that the busiest rank exchanges of a bucket over those of equal parts.

    These are the largest part's over the mean. If that is above `MOST_OVER_MEAN`, they are those
    of equal pieces, and the largest part once more: of means in the dtype that they were added up
    in, of a gather as it is. `wire` is the format of gradients. A bucket without `owners` is in
    equal parts.
    """
    sizes = [params[param].num_bytes for param in group if params[param].is_whole]
    if owners is None or not sum(sizes):
        return 1.0
    largest = max(totals_by_rank(sizes, [range(len(sizes))], [owners], num_ranks=num_ranks))
    over_mean = largest * num_ranks / sum(sizes)
    if over_mean <= MOST_OVER_MEAN:
        return over_mean
    width = 1.0 if is_gather else _width_of_means([params[param] for param in group], wire)
    return 1.0 + width * largest / sum(sizes)


def _width_of_means(specs: Sequence[ParamSpec], wire: str | None) -> float:
    """Returns the bytes of means, as owners get them, over those of gradients in a format."""
    num_bytes = sum(spec.num_bytes * (2 if spec.itemsize == 2 else 1) for spec in specs)
    return num_bytes / sum(spec.sent_bytes(wire) for spec in specs)


def totals_by_rank(
    sizes: Sequence[int],
    groups: Sequence[Sequence[int]],
    owners: Sequence[Sequence[int]],
    *,
    num_ranks: int,
) -> list[int]:
    """Returns the sum of `sizes`, which are by parameter, over each rank's own parameters.

    A bucket without owners is left out.
    """
    totals = [0] * num_ranks
    for group, ranks in zip(groups, owners, strict=True):
        for param, rank in zip(group, ranks, strict=False):
            totals[rank] += sizes[param]
    return totals


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    param: int
    bucket: int
    num_bytes: int
    load: NDArray[np.float64]  # its work and its bytes, relative to the lower bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assignment:
    owners: dict[int, int]  # by parameter
    load: float  # the largest rank's work or bytes, relative to the lower bound
    parts: int  # bytes of the largest part, summed over buckets and over neighbors together


def _assigned(
    items: Sequence[_Update], num_buckets: int, num_ranks: int, limit: float
) -> _Assignment:
    """Places items one after another; if no rank stays within `limit`, on the least loaded."""
    owners = {}
    loads = np.zeros((num_ranks, 2))
    # bytes by bucket and rank; an empty bucket before the first, and one after the last
    parts = np.zeros((num_buckets + 2, num_ranks), dtype=np.int64)
    for item in items:
        load = (loads + item.load).max(axis=1)
        before, own, after = parts[item.bucket : item.bucket + 3]
        nearby = np.where(load <= limit, before + 2 * own + after, np.iinfo(np.int64).max)
        rank = int(np.lexsort((load, nearby))[0])
        owners[item.param] = rank
        loads[rank] += item.load
        parts[item.bucket + 1, rank] += item.num_bytes
    largest = parts.max(axis=1).sum() + (parts[:-1] + parts[1:]).max(axis=1).sum()
    return _Assignment(owners=owners, load=float(loads.max()), parts=int(largest))
