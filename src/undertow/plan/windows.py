"""Computes how every window between two cuts changes the time at which the lane is free."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from undertow.cost.costs import Costs
from undertow.plan.atoms import Atoms, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """A lane that is free at F ends the window from cut j to cut i at max(F + time[i, j], earliest[i, j]).

    A single bucket has time = C and earliest = ready + C. Several in a row have the same form. Windows that no plan may use are
    infinite.
    """

    time_us: Floats  # [num_cuts, num_cuts] end, begin
    earliest_us: Floats  # [num_cuts, num_cuts] end, begin


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The windows of each kind separately."""

    num_bytes: Floats  # [num_kinds, num_cuts, num_cuts] kind, end, begin
    is_there: NDArray[np.bool_]  # the same shape
    by_last: Ints  # [num_kinds, num_cuts] kinds by their last piece, the latest first
    is_barred: NDArray[np.bool_]  # [num_cuts, num_cuts]


def reduction_windows(atoms: Atoms, costs: Costs, kind: str, *, max_bucket_bytes: float) -> Windows:
    """Returns the windows of the reductions, in order."""
    parts = _parts(atoms, max_bucket_bytes)
    released = np.broadcast_to(atoms.ready_us[:, :, None], parts.is_there.shape)
    return _windows(parts, released, costs, kind)


def gather_windows(atoms: Atoms, costs: Costs, *, max_bucket_bytes: float) -> Windows:
    """Returns the windows of the gathers, last to first: F is the stall that later buckets cause if nothing else does."""
    parts = _parts(atoms, max_bucket_bytes)
    is_inside = np.tri(atoms.num_cuts, k=-1, dtype=bool).T  # [begin, end]: the atom before `end` comes after `begin`
    used = np.minimum.accumulate(np.where(is_inside, atoms.used_us[:, None, :], math.inf), axis=2)
    return _windows(parts, -used.transpose(0, 2, 1), costs, "all_gather")


def _parts(atoms: Atoms, max_bucket_bytes: float) -> _Parts:
    is_window = np.tri(atoms.num_cuts, k=-1, dtype=bool)
    num_bytes = np.maximum(0.0, atoms.num_bytes[:, :, None] - atoms.num_bytes[:, None, :])
    num_pieces = atoms.num_pieces[:, :, None] - atoms.num_pieces[:, None, :]
    is_too_large = ((num_bytes > max_bucket_bytes) & (num_pieces > 1)).any(axis=0)
    return _Parts(
        num_bytes=num_bytes,
        is_there=num_pieces > 0,
        by_last=np.argsort(-atoms.last, axis=0, kind="stable"),
        is_barred=~is_window | is_too_large,
    )


def _windows(parts: _Parts, released_us: Floats, costs: Costs, kind: str) -> Windows:
    bucket_us = np.where(parts.is_there, costs.collective_us(kind, parts.num_bytes), 0.0)
    released_us = np.where(parts.is_there, released_us, -math.inf)
    time = np.zeros(parts.is_barred.shape)
    earliest = np.full(parts.is_barred.shape, -math.inf)
    for kinds in parts.by_last:
        place = kinds[None, :, None]
        time += np.take_along_axis(bucket_us, place, axis=0)[0]
        earliest = np.maximum(earliest, np.take_along_axis(released_us, place, axis=0)[0] + time)
    time[parts.is_barred] = math.inf
    earliest[parts.is_barred] = math.inf
    return Windows(time_us=time, earliest_us=earliest)
