"""Atoms of a plan: runs of neighboring gradients that are ready at almost the same time, and pieces of large gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from undertow.errors import ConfigError
from undertow.plan.layout import GroupEntry, Kind, ParamSpec, Piece, piece_of, unit_numel
from undertow.plan.timing import StepTiming

Floats = NDArray[np.float64]
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

    @property
    def num_cuts(self) -> int:
        return len(self.cuts)


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
    at = 0
    while at < len(pieces):
        first, stop = pieces[at], pieces[at].stop
        at += 1
        while at < len(pieces) and pieces[at].param == first.param:
            stop = pieces[at].stop
            at += 1
        is_whole = first.first == 0 and stop == params[first.param].slot_numel
        yield first.param if is_whole else Piece(param=first.param, first=first.first, stop=stop)


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
    signals = [signal for signal in (ready, ends, used) if len(signal)]
    num_cells = _FINEST * max_atoms
    is_cut = np.ones(len(sizes) - 1, dtype=bool)
    while np.count_nonzero(is_cut) >= max_atoms and num_cells >= 1:
        is_cut = np.zeros(len(sizes) - 1, dtype=bool)
        for signal in signals:
            is_cut |= np.diff(_cell(signal, int(num_cells))) != 0
        num_cells *= _COARSER
    return np.concatenate([[0], np.flatnonzero(is_cut | forced) + 1, [len(sizes)]]).astype(np.int64)


def _cell(signal: Floats, num_cells: int) -> Floats:
    low, high = float(signal.min()), float(signal.max())
    if high <= low:
        return np.zeros(len(signal))
    return np.minimum(np.floor((signal - low) * (num_cells / (high - low))), num_cells - 1)
