"""How sure the ratio of two systems of a cell is: a bootstrap over their turns. Pure.

Turn i of one system ran next to turn i of the other, so a machine that drifts slows both. Turns are therefore drawn in pairs, and
the interval holds the middle 95 % of the medians of their ratios. Systems of different runs were never in turn: their turns are
drawn separately, and the interval does not contain how the machine drifted from one run to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ALIKE = 0.03  # a smaller difference says nothing here
# The range of fewer values contains their true median less often than 95 % of the time: 1 - 2 * 0.5**5 is 0.94.
LEAST_TURNS = 6
_NUM_RESAMPLES = 10_000
_PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The time of one system over the time of another, less than 1 if the first is faster."""

    value: float
    interval: tuple[float, float] | None = None
    remark: str = ""  # why there is no interval, or what it lacks

    @property
    def verdict(self) -> str:
        """Returns won, lost, level (not lost), or undecided (perhaps lost) by the interval; "" without one."""
        if self.interval is None:
            return ""
        low, high = self.interval
        if low > 1 + ALIKE:
            return "lost"
        if high > 1 + ALIKE:
            return "undecided"
        return "won" if high < 1 - ALIKE else "level"

    def __str__(self) -> str:
        limits = "" if self.interval is None else "{:.2f} to {:.2f}".format(*self.interval)
        return f"{self.value:.2f} ({', '.join(filter(None, (limits, self.remark)))}) {self.verdict}".strip()


def ratio_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> Ratio:
    """Compares the whole steps of two rows of a cell."""
    value = one["step_ms"]["median"] / other["step_ms"]["median"]
    if not ("turns_ms" in one and "turns_ms" in other):
        return Ratio(value=value, remark="not in turn")
    turns = [np.array(row["turns_ms"]) for row in (one, other)]
    num_turns = min(map(len, turns))
    if num_turns < LEAST_TURNS:
        return Ratio(value=value, remark=f"{num_turns} turns")
    generator = np.random.default_rng(0)  # the same rows have the same interval
    if one["runs"] == other["runs"] and (len(one["runs"]) == 1 or len(turns[0]) == len(turns[1])):
        pairs = turns[0][:num_turns] / turns[1][:num_turns]  # a slow system has fewer turns, the first ones
        return Ratio(value=float(np.median(pairs)), interval=_middle(_medians(pairs, generator)))
    ratios = _medians(turns[0], generator) / _medians(turns[1], generator)
    return Ratio(value=value, interval=_middle(ratios), remark="another run")


def _medians(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Medians of as many values, drawn again and again with replacement."""
    return np.median(generator.choice(values, size=(_NUM_RESAMPLES, len(values))), axis=1)


def _middle(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, _PERCENTILES)
    return float(low), float(high)
