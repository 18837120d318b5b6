"""Derives the cost of single collectives from the times of many that shared the link."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LEAST_US = 1e-3  # of a sample: no transfer takes zero time, whatever the clock says
# An interval of the link being busy without a pause: the bytes of each collective in it, and the microseconds until it ended
# since the link became busy; in the order they ended.
_Spell = Sequence[tuple[int, float]]
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
    alone. So the samples come from the intervals that keep the link busy without a pause. Each interval is divided among its
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


def _spells(transfers: Sequence[Transfer]) -> list[_Spell]:
    together: list[list[Transfer]] = []
    busy_until_us = float("-inf")
    for transfer in sorted(transfers, key=lambda it: it.start_us):
        if transfer.start_us >= busy_until_us:
            together.append([])
        together[-1].append(transfer)
        busy_until_us = max(busy_until_us, transfer.stop_us)
    return [
        [(it.num_bytes, max(0.0, it.stop_us - run[0].start_us)) for it in sorted(run, key=lambda it: it.stop_us)]
        for run in together
    ]


def _fit(spells: Sequence[_Spell]) -> tuple[float, float]:
    """Returns latency and microseconds per byte, neither below zero: least squares, repeated without the worst tenth."""
    counts = np.array([[len(spell), sum(size for size, _ in spell)] for spell in spells], dtype=np.float64)
    rows, wanted = _relative(counts, np.array([spell[-1][1] for spell in spells]))
    if not _are_apart(rows):
        every = [np.cumsum([[1, size] for size, _ in spell], axis=0, dtype=np.float64) for spell in spells]
        rows, wanted = _relative(np.concatenate(every), np.array([us for spell in spells for _, us in spell]))
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
    shares = [latency_us + us_per_byte * size for size, _ in spell]
    if sum(shares) == 0:  # nothing is known of either: divide by bytes
        shares = [size + 1.0 for size, _ in spell]
    us_per_share = spell[-1][1] / sum(shares)
    return [(float(size), max(_LEAST_US, us_per_share * share)) for (size, _), share in zip(spell, shares, strict=True)]
