"""The cost of a collective as it was measured: a curve through what was seen, and a line for what was not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.errors import ConfigError

_Floats = NDArray[np.float64]

# Sizes that differ by less are one size: ranges of buckets that were cut a little differently, paddings.
_SAME_SIZE = 1.02
# A latency and a bandwidth cannot be told apart from sizes that are closer than this.
_LEAST_RATIO = 1.5
# Sizes so far apart that a slope may be believed beyond the last one: two always lie on a line, and nothing confirms it.
_LEAST_SIZES = 3
# Lines are tried through pairs of at most so many points: the work grows with the square.
_MAX_FIT_POINTS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A cost that grows evenly: neither number is negative."""

    latency_us: float  # of no bytes
    us_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """Points (bytes, microseconds), by increasing bytes.

    Times that decrease are evened out, so that a larger payload never costs less.
    """

    points: tuple[tuple[float, float], ...]
    _sizes: _Floats = field(init=False, repr=False, compare=False)
    _times: _Floats = field(init=False, repr=False, compare=False)
    _us_per_byte: float = field(init=False, repr=False, compare=False)  # beyond the last point

    def __post_init__(self) -> None:
        points = [_checked_point(point, index) for index, point in enumerate(self.points)]
        if not points:
            raise ConfigError("a cost curve needs one point at least.", remedy="Measure one size or more.")
        for index, ((before, _), (size, _)) in enumerate(pairwise(points), 1):
            if size <= before:
                raise ConfigError(
                    f"point {index} of a cost curve has {_number(size)} bytes and follows one of {_number(before)}.",
                    remedy="Sort the points by size, each size once.",
                )
        times = _never_decreasing([[time] for _, time in points])
        points = [(size, time) for (size, _), time in zip(points, times, strict=True)]
        object.__setattr__(self, "points", tuple(points))
        self._prepare()

    def _prepare(self) -> None:
        """What `us` interpolates: the points, and where the first is not of zero bytes, one of zero bytes before it."""
        (first_size, first_time), (last_size, last_time) = self.points[0], self.points[-1]
        # What sizes too few or too close do not show: a smaller one is thought no cheaper, a larger one no faster per byte.
        latency, us_per_byte = first_time, last_time / last_size if last_size else 0.0
        if self.is_enough:
            # Where points do not lie on one line, those nearer to where it is needed know more.
            ranks = range(1, len(self.points) + 1)
            latency = min(line_through(self.points, weights=ranks[::-1]).latency_us, first_time)
            if self._num_apart >= _LEAST_SIZES:
                us_per_byte = line_through(self.points, weights=ranks).us_per_byte
        points = self.points if first_size == 0 else ((0.0, latency), *self.points)
        sizes, times = np.array(points, dtype=np.float64).T
        object.__setattr__(self, "_sizes", sizes)
        object.__setattr__(self, "_times", times)
        object.__setattr__(self, "_us_per_byte", us_per_byte)

    @property
    def is_enough(self) -> bool:
        """Whether a plan may be made from it: its sizes lie far enough apart to show how costs grow."""
        (first, _), (last, _) = self.points[0], self.points[-1]
        return last > 0 and last >= _LEAST_RATIO * first

    @property
    def _num_apart(self) -> int:
        """The most sizes of which each is so much larger than the one before."""
        num_apart, last = 0, -math.inf
        for size, _ in self.points:
            if size >= _LEAST_RATIO * last:
                num_apart, last = num_apart + 1, size
        return num_apart

    def us(self, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Microseconds of payloads of these bytes; not decreasing in them.

        Between two points linear. Beyond the last one it goes on with the slope of `line_through` all points, where larger
        ones count more, and with fewer than three sizes that lie apart in proportion to the last point; below the first one
        towards the latency of that line where smaller ones count more.
        """
        sizes = np.asarray(num_bytes, dtype=np.float64)
        beyond = np.maximum(sizes - self._sizes[-1], 0.0)
        return np.asarray(np.interp(sizes, self._sizes, self._times) + self._us_per_byte * beyond)


def curve_from_samples(samples: Iterable[tuple[float, float]]) -> CostCurve:
    """The curve of measured pairs (bytes, microseconds), in any order, of which less than half of each size are outliers.

    Samples of one size, up to 2 %, are one point at their median. Where medians decrease, samples of neighboring sizes are
    pooled until they do not: isotonic regression of medians, so that an outlier alone at its size is outvoted by larger sizes.
    """
    ordered = sorted(_checked_point(sample, index, of="samples") for index, sample in enumerate(samples))
    if not ordered:
        raise ConfigError("there are no samples to make a cost curve of.", remedy="Measure one size or more.")
    sizes: list[list[float]] = []
    times: list[list[float]] = []
    for size, time in ordered:
        if not sizes or size > _SAME_SIZE * sizes[-1][0]:
            sizes.append([])
            times.append([])
        sizes[-1].append(size)
        times[-1].append(time)
    middles = (_lower_median(group) for group in sizes)
    return CostCurve(points=tuple(zip(middles, _never_decreasing(times), strict=True)))


def line_through(points: Sequence[tuple[float, float]], *, weights: Sequence[int] | None = None) -> Line:
    """The line with the least sum of weight * |log(line / time)| over these points (bytes, microseconds) of different sizes.

    Ratios count, so that small sizes decide on the latency and large ones on the bandwidth, and not their squares, so that
    outliers matter little. Lines through two points are tried, and such through one without a latency or without a slope.
    """
    sizes, times = np.array(points, dtype=np.float64).T
    chosen = np.unique(np.linspace(0, len(sizes) - 1, _MAX_FIT_POINTS).round().astype(int))
    latencies, slopes = _candidates(sizes[chosen], times[chosen])
    # A line without a latency is zero at zero bytes, infinitely far from any time: such a line loses.
    with np.errstate(divide="ignore"):
        distances = np.abs(np.log((latencies[:, None] + slopes[:, None] * sizes) / times))
    sums = np.average(distances, axis=1, weights=weights)
    best = int(sums.argmin())
    return Line(latency_us=float(latencies[best]), us_per_byte=float(slopes[best]))


def _candidates(sizes: _Floats, times: _Floats) -> tuple[_Floats, _Floats]:
    i, j = np.triu_indices(len(sizes), 1)
    slopes = (times[j] - times[i]) / (sizes[j] - sizes[i])
    latencies = times[i] - slopes * sizes[i]
    possible = (slopes >= 0) & (latencies >= 0)
    has_bytes = sizes > 0
    rates = times[has_bytes] / sizes[has_bytes]
    return (
        np.concatenate([latencies[possible], np.zeros_like(rates), times]),
        np.concatenate([slopes[possible], rates, np.zeros_like(times)]),
    )


def _never_decreasing(groups: Iterable[list[float]]) -> list[float]:
    """One time for each group, its median if no later one is less; else that of all samples that had to be pooled."""
    pools: list[tuple[list[float], int]] = []  # sorted samples, and of how many groups
    for group in groups:
        samples, num_groups = sorted(group), 1
        while pools and _lower_median(pools[-1][0]) > _lower_median(samples):
            earlier, num_earlier = pools.pop()
            samples, num_groups = sorted(earlier + samples), num_earlier + num_groups
        pools.append((samples, num_groups))
    return [_lower_median(samples) for samples, num_groups in pools for _ in range(num_groups)]


def _lower_median(ordered: Sequence[float]) -> float:
    """Of an even number of values the lesser of the two in the middle: what disturbs a measurement makes it longer."""
    return ordered[(len(ordered) - 1) // 2]


def _checked_point(point: Any, index: int, *, of: str = "a cost curve") -> tuple[float, float]:
    try:
        size, time = map(float, point)
    except (TypeError, ValueError, OverflowError):
        size, time = math.nan, math.nan
    if 0 <= size < math.inf and 0 < time < math.inf:
        return size, time
    raise ConfigError(
        f"point {index} of {of} is impossible: {point!r}.",
        remedy="A point is a size of zero bytes or more and a time of more than zero microseconds.",
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else str(value)
