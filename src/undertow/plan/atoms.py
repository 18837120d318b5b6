"""Atoms of a plan: runs of neighboring gradients that are ready at almost the same time, and pieces of large gradients.

A window lies between two cuts between atoms. Windows are arrays over all pairs of cuts: how each changes the time at which the
lane is free.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from undertow.cost.costs import Costs
from undertow.errors import ConfigError
from undertow.plan.layout import GroupEntry, Kind, ParamSpec, Piece, member_of, piece_of, unit_numel
from undertow.plan.timing import Floats, StepTiming

Ints = NDArray[np.int64]

_Number = TypeVar("_Number", np.float64, np.int64)

_FINEST = 16.0  # cells to try first, per atom; finer ones would save less than the slack of a plan
_COARSER = 0.8  # factor to the next number of cells
_MOST_PIECES = 64  # of all parameters together, unless the cap on buckets requires more


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
    specs = [params[piece.param] for piece in pieces]
    index_of_kind: dict[Kind, int] = {}
    kinds = np.array([index_of_kind.setdefault(spec.kind, len(index_of_kind)) for spec in specs], dtype=np.int64)
    sizes = np.array([piece.numel * spec.itemsize for piece, spec in zip(pieces, specs, strict=True)], dtype=np.float64)
    ready = np.array([timing.ready_us[piece.param] for piece in pieces], dtype=np.float64)
    used = np.array([timing.used_us[piece.param] for piece in pieces] if has_shards else [], dtype=np.float64)
    cuts = _cuts(sizes, np.maximum.accumulate(ready), used, max_atoms=max_atoms, max_bucket_bytes=max_bucket_bytes)

    if len(cuts) - 1 > 2 * max_atoms:
        raise ConfigError(
            f"buckets of at most {max_bucket_bytes:.0f} bytes are too small to be planned.",
            where=f"{sizes.sum():.0f} bytes of gradients, in at most {2 * max_atoms} parts that no bucket may cut",
            remedy=f"Allow buckets of {math.ceil(8 * sizes.sum() / max_atoms)} bytes.",
        )

    is_of = kinds == np.arange(len(index_of_kind))[:, None]
    last = _before(np.maximum.accumulate(np.where(is_of, np.arange(len(pieces)), -1), axis=1), cuts, first=-1)
    ready_at = _before(np.maximum.accumulate(np.where(is_of, ready, 0.0), axis=1), cuts, first=0.0)
    ready_at[kinds[-1], -1] = max(ready_at[kinds[-1], -1], timing.backward_end_us)
    use = np.where(is_of, used, math.inf) if len(used) else np.full(is_of.shape, math.inf)
    no_use = np.full((len(index_of_kind), 1), math.inf)
    return Atoms(
        pieces=pieces,
        cuts=cuts,
        num_bytes=_before(np.cumsum(np.where(is_of, sizes, 0.0), axis=1), cuts, first=0.0),
        num_pieces=_before(np.cumsum(is_of, axis=1, dtype=np.int64), cuts, first=0),
        last=last,
        ready_us=ready_at,
        used_us=np.hstack([no_use, np.minimum.reduceat(use, cuts[:-1], axis=1)]),
        kinds=kinds,
    )


def whole_pieces(params: Sequence[ParamSpec], order: Sequence[int]) -> list[Piece]:
    """Returns every parameter as one piece."""
    return [piece_of(param, params) for param in order]


def small_pieces(params: Sequence[ParamSpec], order: Sequence[int], *, num_ranks: int, max_bucket_bytes: float) -> list[Piece]:
    """Cuts large parameters into even pieces that begin at multiples of 16 bytes and of the number of ranks.

    A piece is at most as large as a bucket may be. It is also at most a share of all bytes so small that it hardly matters
    whether the piece travels in this bucket or the next.
    """
    share_bytes = sum(spec.num_bytes for spec in params) / _MOST_PIECES
    pieces: list[Piece] = []
    for param in order:
        pieces += _cut_evenly(piece_of(param, params), params[param], num_ranks, min(share_bytes, max_bucket_bytes))
    return pieces


def groups_of(atoms: Atoms, params: Sequence[ParamSpec], chosen: Sequence[int]) -> tuple[tuple[GroupEntry, ...], ...]:
    """Returns the buckets of the windows between `chosen` cuts, in launch order."""
    groups: list[tuple[GroupEntry, ...]] = []
    for begin, end in pairwise(chosen):
        inside = atoms.pieces[atoms.cuts[begin] : atoms.cuts[end]]
        kinds = atoms.kinds[atoms.cuts[begin] : atoms.cuts[end]]
        for kind in np.argsort(atoms.last[:, end], kind="stable"):
            pieces = [inside[at] for at in np.flatnonzero(kinds == kind).tolist()]
            if pieces:
                groups.append(tuple(_members(pieces, params)))
    return tuple(groups)


def _cut_evenly(piece: Piece, spec: ParamSpec, num_ranks: int, most_bytes: float) -> list[Piece]:
    unit = unit_numel(itemsize=spec.itemsize, num_ranks=num_ranks)
    num_units = -(-piece.numel // unit)
    if num_units <= 1 or spec.num_bytes <= most_bytes:
        return [piece]
    num_shares = -(-num_units // max(1, int(most_bytes // (unit * spec.itemsize))))
    share = unit * -(-num_units // num_shares)
    return [Piece(param=piece.param, first=first, stop=min(first + share, piece.stop)) for first in range(0, piece.stop, share)]


def _members(pieces: Sequence[Piece], params: Sequence[ParamSpec]) -> Iterator[GroupEntry]:
    """Joins consecutive pieces of one parameter."""
    for param, same in groupby(pieces, key=lambda piece: piece.param):
        run = list(same)
        yield member_of(Piece(param=param, first=run[0].first, stop=run[-1].stop), params)


def _before(values: NDArray[_Number], cuts: Ints, *, first: float) -> NDArray[_Number]:
    """Returns the last value before each cut, and `first` for the first cut."""
    return np.hstack([np.full((len(values), 1), first, dtype=values.dtype), values[:, cuts[1:] - 1]])


def _cuts(sizes: Floats, ready: Floats, used: Floats, *, max_atoms: int, max_bucket_bytes: float) -> Ints:
    """Returns the number of pieces before each cut.

    If there are at most `max_atoms` pieces, each is an atom. Else cuts are where a ready time, an end in bytes, or a use enters
    another cell. The cells are as fine as `max_atoms` allows. Cells of bytes are at most half a bucket, and a larger piece is an
    atom by itself, so that every atom of several pieces fits into a bucket.
    """
    ends = np.cumsum(sizes)
    forced = np.zeros(len(sizes) - 1, dtype=bool)
    if math.isfinite(max_bucket_bytes):
        is_large = sizes > max_bucket_bytes / 2
        forced = is_large[1:] | is_large[:-1] | (np.diff(ends // (max_bucket_bytes / 2)) > 0)
    signals = [signal for signal in (ready, ends, used) if len(signal)]  # uses are not known without shards
    num_cells = _FINEST * max_atoms
    is_cut = np.ones(len(sizes) - 1, dtype=bool)
    while np.count_nonzero(is_cut) >= max_atoms and num_cells >= 1:
        is_cut = np.any([np.diff(_cell(signal, int(num_cells))) != 0 for signal in signals], axis=0)
        num_cells *= _COARSER
    return np.concatenate([[0], np.flatnonzero(is_cut | forced) + 1, [len(sizes)]]).astype(np.int64)


def _cell(signal: Floats, num_cells: int) -> Floats:
    low, high = float(signal.min()), float(signal.max())
    if high <= low:
        return np.zeros(len(signal))
    return np.minimum(np.floor((signal - low) * (num_cells / (high - low))), num_cells - 1)


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
        through: Floats = np.maximum(free_us[:end] + self.time_us[end, :end], self.earliest_us[end, :end])
        return through


def reduction_windows(atoms: Atoms, costs: Costs, kind: str, *, max_bucket_bytes: float) -> Windows:
    """Returns the windows of the reductions, in order."""
    return _windows(atoms, atoms.ready_us[:, :, None], costs, kind, max_bucket_bytes)


def gather_windows(atoms: Atoms, costs: Costs, *, max_bucket_bytes: float) -> Windows:
    """Returns the windows of the gathers, last to first: F is the stall that later buckets cause if nothing else does."""
    is_inside = np.tri(len(atoms.cuts), k=-1, dtype=bool).T  # [begin, end]: the atom before `end` comes after `begin`
    used = np.minimum.accumulate(np.where(is_inside, atoms.used_us[:, None, :], math.inf), axis=2)
    return _windows(atoms, -used.transpose(0, 2, 1), costs, "all_gather", max_bucket_bytes)


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
    is_window = np.tri(len(atoms.cuts), k=-1, dtype=bool)
    is_barred = ~is_window | ((num_bytes > max_bucket_bytes) & (num_pieces > 1)).any(axis=0)
    time[is_barred] = earliest[is_barred] = math.inf
    return Windows(time_us=time, earliest_us=earliest)
