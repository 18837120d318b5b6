"""Curves through measured times of one kind of collective, by size."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.errors import ConfigError, require
from undertow.foreign import as_float

Floats = NDArray[np.float64]

# Sizes that differ by less count as one size: buckets cut at slightly different places, paddings.
_SAME_SIZE = 1.02
# Latency and bandwidth cannot be told apart if sizes are closer than this ratio.
_LEAST_RATIO = 1.5
# Lines are tried through pairs of at most this many points: the work grows with the square.
_MAX_FIT_POINTS = 48


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """A cost curve of points (bytes, microseconds), by increasing bytes.

    Decreasing times are evened out, so that a larger payload never costs less. Raises ConfigError
    unless there is a point and sizes increase.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = [_checked_point(point, index) for index, point in enumerate(self.points)]
        require(
            points, "a cost curve needs at least one point.", remedy="Measure one size or more."
        )
        for index, ((before, _), (size, _)) in enumerate(pairwise(points), 1):
            require(
                before < size,
                f"point {index} of a cost curve has {size:g} bytes and follows one of {before:g}.",
                remedy="Sort the points by size, each size once.",
            )
        times = _never_decreasing([[time] for _, time in points])
        sizes = [size for size, _ in points]
        object.__setattr__(self, "points", tuple(zip(sizes, times, strict=True)))

    @cached_property
    def _interpolated(self) -> tuple[Floats, Floats, float]:
        """Sizes and times that `us` interpolates, from zero bytes on, and the microseconds per byte
        beyond the last point."""
        (first_size, first_time), (last_size, last_time) = self.points[0], self.points[-1]
        # If sizes are too few or too close, a smaller payload is assumed to be no cheaper, and a
        # larger one no faster per byte.
        latency = first_time
        us_per_byte = last_time / last_size if last_size else 0.0
        if self.is_enough:
            # If points do not lie on one line, the ones closer to the extrapolated end count more.
            ranks = range(1, len(self.points) + 1)
            latency = min(line_through(self.points, weights=ranks[::-1])[0], first_time)
            # Two points always lie on a line, which confirms nothing: three must be apart before a
            # slope is trusted.
            if any(
                size >= _LEAST_RATIO * first_size and last_size >= _LEAST_RATIO * size
                for size, _ in self.points[1:-1]
            ):
                _, us_per_byte = line_through(self.points, weights=ranks)
        points = self.points if first_size == 0 else ((0.0, latency), *self.points)
        sizes, times = np.array(points, dtype=np.float64).T
        return sizes, times, us_per_byte

    @property
    def is_enough(self) -> bool:
        """True if its sizes are far enough apart to show how costs grow, so that a plan may be
        based on it."""
        (first, _), (last, _) = self.points[0], self.points[-1]
        return last > 0 and last >= _LEAST_RATIO * first

    def us(self, num_bytes: ArrayLike) -> Floats:
        """Returns the microseconds of payloads of `num_bytes`, in an array of the same shape; not
        decreasing in the size.

        The curve is linear between two points. Beyond the last point it continues with the slope of
        `line_through` all points, which gives larger ones more weight. With fewer than three sizes
        that are far enough apart it continues in proportion to the last point. Below the first
        point it runs towards the latency of a line that gives smaller points more weight.
        """
        wanted = np.asarray(num_bytes, dtype=np.float64)
        sizes, times, us_per_byte = self._interpolated
        return np.asarray(
            np.interp(wanted, sizes, times) + us_per_byte * np.maximum(wanted - sizes[-1], 0.0)
        )


def curve_from_samples(samples: Iterable[tuple[float, float]]) -> CostCurve:
    """Fits a curve to measured pairs (bytes, microseconds), in any order.

    Less than half of the samples of each size may be outliers. Samples of one size, up to 2 %,
    become one point at their median. If medians decrease, samples of neighboring sizes are pooled
    until they do not (isotonic regression of medians), so that larger sizes outvote a single
    outlier at its size. Raises ConfigError if `samples` is empty, or for an impossible sample.
    """
    ordered = sorted(_checked_point(sample, index) for index, sample in enumerate(samples))
    require(ordered, "a cost curve needs samples.", remedy="Measure one size or more.")
    groups: list[list[tuple[float, float]]] = []
    for sample in ordered:
        if not groups or sample[0] > _SAME_SIZE * groups[-1][0][0]:
            groups.append([])
        groups[-1].append(sample)
    sizes = (median_low([size for size, _ in group]) for group in groups)
    times = _never_decreasing([time for _, time in group] for group in groups)
    return CostCurve(points=tuple(zip(sizes, times, strict=True)))


def line_through(
    points: Sequence[tuple[float, float]], *, weights: Sequence[int] | None = None
) -> tuple[float, float]:
    """Returns latency in us, and us per byte, of the line through points (bytes, microseconds) of
    different sizes.

    It has the least sum of weight * |log(line / time)|. Ratios count, so that small sizes determine
    the latency and large ones the bandwidth. They are not squared, so that outliers matter little.
    Candidates are lines through two points, and lines through one point without a latency or
    without a slope; neither number is negative.
    """
    sizes, times = np.array(points, dtype=np.float64).T
    chosen = np.unique(np.linspace(0, len(sizes) - 1, _MAX_FIT_POINTS).round().astype(int))
    latencies, slopes = _lines(sizes[chosen], times[chosen])
    # A line without a latency is zero at zero bytes, infinitely far from any time: such a line
    # loses.
    with np.errstate(divide="ignore"):
        distances = np.abs(np.log((latencies[:, None] + slopes[:, None] * sizes) / times))
    best = int(np.average(distances, axis=1, weights=weights).argmin())
    return float(latencies[best]), float(slopes[best])


def _lines(sizes: Floats, times: Floats) -> tuple[Floats, Floats]:
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
    """Returns one time per group.

    Its median if no later one is less, else the median of all samples that had to be pooled.
    """
    pools: list[tuple[list[float], int]] = []  # samples, and the number of groups in them
    for samples in groups:
        num_groups = 1
        # Of two middle values the lower one counts: disturbances only make measurements longer.
        while pools and median_low(pools[-1][0]) > median_low(samples):
            earlier, num_earlier = pools.pop()
            samples, num_groups = earlier + samples, num_earlier + num_groups
        pools.append((samples, num_groups))
    return [median_low(samples) for samples, num_groups in pools for _ in range(num_groups)]


def _checked_point(point: Any, index: int) -> tuple[float, float]:
    try:
        size, time = map(as_float, point)
    except (TypeError, ValueError):
        size, time = math.nan, math.nan
    if 0 <= size < math.inf and 0 < time < math.inf:
        return size, time
    raise ConfigError(
        f"point {index} of a cost curve is impossible: {point!r}.",
        remedy="A point is a size of zero bytes or more and a time of more than zero microseconds.",
    )
