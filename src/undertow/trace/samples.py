"""Derives the cost of single collectives from the times of many that shared the link."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LEAST_US = 1e-3  # of a sample: no transfer takes zero time, whatever the clock says
# An interval of the link being busy without a pause: the bytes of each collective in it, and the
# microseconds until it ended since the link became busy; in the order they ended.
_Spell = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective of a step; times on any clock, the same one for all transfers of a step."""

    num_bytes: int
    start_us: float  # when the last rank launched it
    stop_us: float


def cost_samples(steps: Sequence[Sequence[Transfer]]) -> tuple[tuple[float, float], ...]:
    """Returns a pair (bytes, microseconds of the link) for each collective of these steps.

    A backend may carry several at a time, a small one between the parts of a large one; then each
    takes longer than it would alone. So the samples come from the intervals that keep the link busy
    without a pause. Each interval is divided among its collectives in proportion to latency +
    bytes / bandwidth, with the latency and bandwidth that explain all intervals best.
    """
    spells = [spell for step in steps for spell in _spells(step)]
    if not spells:
        return ()
    latency_us, us_per_byte = _fit(spells)
    samples: list[tuple[float, float]] = []
    for spell in spells:
        shares = [latency_us + us_per_byte * size for size, _ in spell]
        if sum(shares) == 0:  # nothing is known of either: divide by bytes
            shares = [size + 1.0 for size, _ in spell]
        us_per_share = spell[-1][1] / sum(shares)
        for (size, _), share in zip(spell, shares, strict=True):
            samples.append((float(size), max(_LEAST_US, us_per_share * share)))
    return tuple(samples)


def _spells(transfers: Sequence[Transfer]) -> list[_Spell]:
    together: list[list[Transfer]] = []
    busy_until_us = float("-inf")
    for transfer in sorted(transfers, key=lambda each: each.start_us):
        if transfer.start_us >= busy_until_us:
            together.append([])
        together[-1].append(transfer)
        busy_until_us = max(busy_until_us, transfer.stop_us)
    spells: list[_Spell] = []
    for run in together:
        begin_us = run[0].start_us
        run.sort(key=lambda each: each.stop_us)
        spells.append([(each.num_bytes, max(0.0, each.stop_us - begin_us)) for each in run])
    return spells


def _fit(spells: Sequence[_Spell]) -> tuple[float, float]:
    """Returns latency and microseconds per byte, neither below zero: least squares, repeated without the worst tenth.

    The time from the start of an interval to the end of each of its collectives counts, because
    whole intervals often contain about the same mix. All errors are relative to the times.
    """
    rows: list[tuple[float, float]] = []  # collectives and bytes, over the time
    times: list[float] = []
    for spell in spells:
        num_bytes = 0
        for number, (size, time_us) in enumerate(spell, 1):
            num_bytes += size
            scale = max(1.0, time_us)
            rows.append((number / scale, num_bytes / scale))
            times.append(time_us / scale)
    counts, wanted = np.array(rows), np.array(times)
    errors = np.abs(counts @ _least_squares(counts, wanted) - wanted)
    # Fewer than ten are all kept: a dropped one may be the only one that separates bytes from latency.
    is_usual = errors <= np.sort(errors)[len(errors) - 1 - len(errors) // 10]
    latency_us, us_per_byte = _least_squares(counts[is_usual], wanted[is_usual]).tolist()
    return latency_us, us_per_byte


def _least_squares(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    solution = np.asarray(np.linalg.lstsq(rows, wanted, rcond=None)[0], dtype=np.float64)
    if (solution >= 0).all():
        return solution
    # One of the two explains everything.
    alone = [float(column @ wanted / max(column @ column, 1e-300)) for column in rows.T]
    candidates = [np.array([max(0.0, alone[0]), 0.0]), np.array([0.0, max(0.0, alone[1])])]
    return min(candidates, key=lambda candidate: float(np.square(rows @ candidate - wanted).sum()))
