"""Derives the cost of single collectives from the times of many that shared the link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LEAST_US = 1e-3  # of a sample: no transfer takes zero time, whatever the clock says
# Limits how much an error in a time is amplified in the cost of a collective: by 1 / this.
_LEAST_APART = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective of a step; times on any clock, the same one for all transfers of a step."""

    num_bytes: int
    start_us: float  # when the last rank launched it
    stop_us: float


def cost_samples(steps: Sequence[Sequence[Transfer]]) -> tuple[tuple[float, float], ...]:
    """Returns a pair (bytes, microseconds of the link) for each collective of these steps.

    A backend may carry several at a time, a small one between the parts of a large one; then each takes longer than it would
    alone. So the samples come from the intervals in which the link was busy without a pause. Each interval is divided among its
    collectives in proportion to latency + bytes / bandwidth, with the latency and bandwidth that explain all intervals best.

    If all intervals contain about the same mix, they cannot separate latency from bandwidth. Then the time from the start of an
    interval to the end of each of its collectives counts as well. These times are less certain, because other collectives may be
    running.
    """
    spells = [spell for step in steps for spell in _spells(step)]
    if not spells:
        return ()
    latency_us, us_per_byte = _fit(spells)
    return tuple(sample for spell in spells for sample in _divided(spell, latency_us, us_per_byte))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spell:
    """An interval in which the link was busy without a pause, and the collectives in it."""

    sizes: tuple[int, ...]  # in the order in which they ended
    through_us: tuple[float, ...]  # when each ended, since the link became busy

    @property
    def duration_us(self) -> float:
        return self.through_us[-1]


def _spells(transfers: Sequence[Transfer]) -> list[_Spell]:
    spells: list[_Spell] = []
    together: list[Transfer] = []
    busy_until_us = float("-inf")
    for transfer in sorted(transfers, key=lambda it: it.start_us):
        if together and transfer.start_us >= busy_until_us:
            spells.append(_spell(together))
            together = []
        together.append(transfer)
        busy_until_us = max(busy_until_us, transfer.stop_us)
    return [*spells, _spell(together)] if together else spells


def _spell(together: Sequence[Transfer]) -> _Spell:
    through = sorted(together, key=lambda it: it.stop_us)
    begin_us = min(it.start_us for it in together)
    return _Spell(
        sizes=tuple(it.num_bytes for it in through), through_us=tuple(max(0.0, it.stop_us - begin_us) for it in through)
    )


def _fit(spells: Sequence[_Spell]) -> tuple[float, float]:
    """Returns latency and microseconds per byte, neither below zero: least squares, repeated without the worst tenth."""
    counts = np.array([[len(spell.sizes), sum(spell.sizes)] for spell in spells], dtype=np.float64)
    times = np.array([spell.duration_us for spell in spells])
    rows, wanted = _relative(counts, times)
    if not _are_apart(rows):
        every = [np.cumsum([[1, size] for size in spell.sizes], axis=0, dtype=np.float64) for spell in spells]
        rows, wanted = _relative(np.concatenate(every), np.concatenate([spell.through_us for spell in spells]))
    errors = np.abs(rows @ _least_squares(rows, wanted) - wanted)
    # Fewer than ten are all kept: a dropped one may be the only one that separates bytes from latency.
    is_usual = errors <= np.sort(errors)[len(errors) - 1 - len(errors) // 10]
    latency_us, us_per_byte = _least_squares(rows[is_usual], wanted[is_usual])
    return float(latency_us), float(us_per_byte)


def _relative(counts: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scales the equations so that a short time counts as much as a long one."""
    scales = np.maximum(times, 1.0)
    return counts / scales[:, None], times / scales


def _are_apart(rows: NDArray[np.float64]) -> bool:
    """Returns True if the numbers of collectives and of bytes vary enough between rows to separate their costs."""
    lengths = np.linalg.norm(rows, axis=0)
    if not lengths.all():
        return True  # without any bytes there is nothing to separate
    singular = np.linalg.svd(rows / lengths, compute_uv=False)
    return len(singular) == 2 and bool(singular[1] >= _LEAST_APART * singular[0])


def _least_squares(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    solution = np.asarray(np.linalg.lstsq(rows, wanted, rcond=None)[0], dtype=np.float64)
    if (solution >= 0).all():
        return solution
    # One of the two explains everything.
    alone = [float(column @ wanted / max(column @ column, 1e-300)) for column in rows.T]
    candidates = [np.array([max(0.0, alone[0]), 0.0]), np.array([0.0, max(0.0, alone[1])])]
    return min(candidates, key=lambda candidate: float(np.square(rows @ candidate - wanted).sum()))


def _divided(spell: _Spell, latency_us: float, us_per_byte: float) -> list[tuple[float, float]]:
    shares = [latency_us + us_per_byte * size for size in spell.sizes]
    if sum(shares) == 0:  # nothing is known of either: divide by bytes
        shares = [size + 1.0 for size in map(float, spell.sizes)]
    us_per_share = spell.duration_us / sum(shares)
    return [(float(size), max(_LEAST_US, us_per_share * share)) for size, share in zip(spell.sizes, shares, strict=True)]
