"""Derives the cost of single collectives from the times of many that shared the link."""

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.lab.cost.curves import curve_from_samples, line_through

_LEAST_US = 1e-3  # of a sample: no transfer takes zero time, even if the clock says so
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
    # The time from the start of an interval to the end of each of its collectives counts, because
    # whole intervals often contain about the same mix. The mean of n collectives lies on the line
    # of single ones.
    means: list[tuple[float, float]] = []
    for spell in spells:
        num_bytes = 0
        for number, (size, until_us) in enumerate(spell, 1):
            num_bytes += size
            means.append((num_bytes / number, max(_LEAST_US, until_us / number)))
    latency_us, us_per_byte = line_through(curve_from_samples(means).points)
    samples: list[tuple[float, float]] = []
    for spell in spells:
        shares = [latency_us + us_per_byte * size for size, _ in spell]
        if sum(shares) == 0:  # neither is known: divide by bytes
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
