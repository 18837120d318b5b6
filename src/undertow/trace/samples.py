"""What collectives cost, from the times of many that shared the link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective of a step; times on any clock, the same one for a step."""

    num_bytes: int
    start_us: float  # the last rank had launched it
    stop_us: float


def cost_samples(steps: Sequence[Sequence[Transfer]]) -> tuple[tuple[float, float], ...]:
    """A pair (bytes, microseconds of the link) for each collective of these steps.

    A backend may carry several at a time, a small one between the parts of a large one: then each takes longer than it
    would alone. So what counts is how long the link was busy without a pause. That time is divided among the collectives in
    it as latency + bytes / bandwidth would have it, with the two that explain all such times best.
    """
    spells = [spell for step in steps for spell in _spells(step)]
    if not spells:
        return ()
    latency_us, us_per_byte = _fit(spells)
    return tuple(sample for spell in spells for sample in _divided(spell, latency_us, us_per_byte))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spell:
    """A time in which the link was busy without a pause, and what it carried."""

    sizes: tuple[int, ...]
    duration_us: float


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
    duration_us = max(it.stop_us for it in together) - min(it.start_us for it in together)
    return _Spell(sizes=tuple(it.num_bytes for it in together), duration_us=duration_us)


def _fit(spells: Sequence[_Spell]) -> tuple[float, float]:
    """Latency and microseconds per byte, neither below zero: least squares, and once more without the worst tenth."""
    counts = np.array([[len(spell.sizes), sum(spell.sizes)] for spell in spells], dtype=np.float64)
    durations = np.array([spell.duration_us for spell in spells])
    solution = _least_squares(counts, durations)
    errors = np.abs(counts @ solution - durations)
    is_usual = errors <= np.quantile(errors, 0.9)
    latency_us, us_per_byte = _least_squares(counts[is_usual], durations[is_usual])
    return float(latency_us), float(us_per_byte)


def _least_squares(counts: NDArray[np.float64], durations: NDArray[np.float64]) -> NDArray[np.float64]:
    """In relative terms: a short spell counts as much as a long one."""
    weights = 1 / np.maximum(durations, 1.0)
    rows, wanted = counts * weights[:, None], durations * weights
    solution = np.asarray(np.linalg.lstsq(rows, wanted, rcond=None)[0], dtype=np.float64)
    if (solution >= 0).all():
        return solution
    # One of the two explains everything.
    alone = [float(column @ wanted / max(column @ column, 1e-300)) for column in rows.T]
    candidates = [np.array([max(0.0, alone[0]), 0.0]), np.array([0.0, max(0.0, alone[1])])]
    return min(candidates, key=lambda candidate: float(np.square(rows @ candidate - wanted).sum()))


def _divided(spell: _Spell, latency_us: float, us_per_byte: float) -> list[tuple[float, float]]:
    shares = [latency_us + us_per_byte * size for size in spell.sizes]
    if sum(shares) == 0:  # nothing is known of the two: by the bytes
        shares = [size + 1.0 for size in map(float, spell.sizes)]
    return [(float(size), spell.duration_us * share / sum(shares)) for size, share in zip(spell.sizes, shares, strict=True)]
