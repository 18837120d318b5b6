"""The time of collectives as a function of their payload: one interface for measured curves, and
for formulas of links.

The formulas are from Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005, over n ranks, with M bytes, latency a of one message and inverse
bandwidth b in seconds per byte:

             all_reduce                     reduce_scatter           all_gather
    ring     2(n-1)a + 2(n-1)/n Mb          (n-1)a + (n-1)/n Mb      (n-1)a + (n-1)/n Mb
    tree     2 log2(n)a + 2Mb
    nodes    reduce_scatter inside + all_reduce across of M/g + all_gather inside, g ranks per node
    mesh     the same                       all but the gather       the all_gather inside

NCCL takes the faster of ring and tree for an all-reduce (since its version 2.4; src/graph/tuning.cc
counts log2 of the ranks for a tree, and half of a ring's bandwidth as a bus has it), and gloo
always the ring. log2 is taken of any number: nothing jumps.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median_low
from typing import Any, Protocol

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

# NVLink 3 of an A100 carries 300 GB/s in each direction. NCCL's src/graph/tuning.cc has, for rings
# of its protocol Simple, 3.4 us of latency a hop over NVLink, and 5.7 us over PCI.
_NVLINK_LATENCY = "3us"
NODE_LINK = f"2400gbit,{_NVLINK_LATENCY}"
# Share of the line rate that is payload: iperf3 over TCP on a link shaped to 1 Gb/s carries 956
# Mb/s.
TCP_PAYLOAD_SHARE = 0.956
_ETHERNET_HOP_S = 100e-6
_UNITS = {"m": 1e6, "g": 1e9, "t": 1e12, "us": 1e-6, "ms": 1e-3}  # bits per second, and seconds
_OF_NVLINK = "latency of NCCL's tuning model, rounded"
# Fitted to a whole all-reduce and what launches it: a wire alone has a fraction of that latency.
_OF_NETWORKS = (
    "nodes of 4 V100s: ddl-benchmarks, rate of fused rows of BERT, latency fitted to "
    "rows of a message per tensor"
)
# Links by name: their rate and latency as text, and where these are from.
LINKS: Mapping[str, tuple[str, str]] = {
    "nvlink2": (
        f"1200gbit,{_NVLINK_LATENCY}",
        f"V100: 6 links of 25 GB/s in each direction; {_OF_NVLINK}",
    ),
    "nvlink3": (NODE_LINK, f"A100: 12 links of 25 GB/s in each direction; {_OF_NVLINK}"),
    "nvlink4": (
        f"3600gbit,{_NVLINK_LATENCY}",
        f"H100: 18 links of 25 GB/s in each direction; {_OF_NVLINK}",
    ),
    "pcie3": (
        "40gbit,5.7us",
        "4 V100s of a node: ddl-benchmarks, fused rows of BERT; latency of NCCL's tuning model",
    ),
    "infiniband100": ("40gbit,58us", f"100 Gb/s InfiniBand; {_OF_NETWORKS}"),
    "tcp100": ("19gbit,72us", f"100 GbE with TCP; {_OF_NETWORKS}"),
    "tcp10": ("9.6gbit,57us", f"10 GbE with TCP; {_OF_NETWORKS}"),
}
_LINK_TEXT = re.compile(
    r"(?P<rate>\d+(?:\.\d+)?)(?P<rate_unit>[mMgGtT])(?:bits?(?:/s)?|bps|b/s|b[eE]?|BE)"
    r"(?:,(?P<latency>\d+(?:\.\d+)?)(?P<latency_unit>us|ms))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A full-duplex link of each rank to the network."""

    name: str
    hop_s: float  # latency of one message between two ranks
    bytes_per_s: float  # payload, per direction; infinity for a link that costs nothing


def link_from_text(text: str) -> Link:
    """Parses a link from `text`; the payload is 95.6 % of any rate.

    - "1gbit" or "200mbit": a rate, with the latency of Ethernet carrying TCP, 100 us.
    - "100gbit,5us" or "1gbit,20ms": a rate and another latency.
    - "none": a link that costs nothing.
    - The name of an entry of `LINKS`, such as "nvlink3".

    "25gbps", "25 Gb/s", "25 Gbit/s" and "25GbE" are other spellings of "25gbit". Raises ConfigError
    for any other text.
    """
    if text == "none":
        return Link(name="none", hop_s=0.0, bytes_per_s=math.inf)
    match = _LINK_TEXT.fullmatch(
        LINKS[text.lower()][0] if text.lower() in LINKS else text.replace(" ", "")
    )
    if match is None or float(match["rate"]) == 0:
        raise ConfigError(
            f"link {text!r} is not known.",
            remedy='Write a rate such as "1gbit", "2.5gbit" or "200mbit", a rate and a latency '
            'such as "100gbit,5us", '
            'or "none" for the bare loopback.',
        )
    line_rate = float(match["rate"]) * _UNITS[match["rate_unit"].lower()] / 8
    hop_s = (
        float(match["latency"]) * _UNITS[match["latency_unit"]]
        if match["latency"]
        else _ETHERNET_HOP_S
    )
    return Link(name=text, hop_s=hop_s, bytes_per_s=line_rate * TCP_PAYLOAD_SHARE)


# Ring algorithms over n ranks: (messages one after another, share of the payload that crosses each
# rank's link). The arithmetic of the reduction is left out, because the processor does it and not
# the link.
COLLECTIVES: Mapping[str, Callable[[int], tuple[int, float]]] = {
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
    "all_gather": lambda n: (n - 1, (n - 1) / n),
    "all_to_all": lambda n: (n - 1, (n - 1) / n),
    "broadcast": lambda n: (math.ceil(math.log2(n)), 1.0),
    "reduce": lambda n: (math.ceil(math.log2(n)), 1.0),
    "gather": lambda n: (n - 1, (n - 1) / n),
    "scatter": lambda n: (n - 1, (n - 1) / n),
    "send": lambda n: (1, 1.0),
    "barrier": lambda n: (math.ceil(math.log2(n)), 0.0),
}


def collective_seconds(link: Link, kind: str, *, num_bytes: int, num_ranks: int) -> float:
    """Returns the seconds that one collective occupies the link; `num_bytes` is the whole
    payload."""
    hops, share = _ring(kind, num_ranks)
    return hops * link.hop_s + share * num_bytes / link.bytes_per_s


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
            # If points do not lie on one line, the ones closer to the extrapolated end know more.
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


class Costs(Protocol):
    """Times on the communication stream. A bucket without bytes is not free.

    It is still a collective.
    """

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> Floats:
        """Returns the microseconds of one collective for each size.

        Args:
            kind: "all_reduce", "reduce_scatter" or "all_gather".
            num_bytes: The whole payload in bytes, the size of the full tensor. The time does not
                decrease with it.

        Returns:
            An array of the shape of `num_bytes`.
        """


@dataclass(frozen=True, slots=True)
class RingCosts:
    """Ring algorithms over `num_ranks` ranks, each with its own `link`; of any kind in COLLECTIVES.

    With `has_trees` an all-reduce goes through trees where that is faster, as in NCCL; without,
    through a ring, as in gloo.
    """

    link: Link
    num_ranks: int = field(kw_only=True)
    has_trees: bool = field(default=True, kw_only=True)

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> Floats:
        """Implements `Costs`."""
        hops, share = _ring(kind, self.num_ranks)
        sizes = np.asarray(num_bytes, dtype=np.float64)
        times_s = hops * self.link.hop_s + share / self.link.bytes_per_s * sizes
        if kind == "all_reduce" and self.has_trees:
            tree_s = 2 * math.log2(self.num_ranks) * self.link.hop_s
            times_s = np.minimum(times_s, tree_s + 2.0 / self.link.bytes_per_s * sizes)
        return 1e6 * times_s


def _ring(kind: str, num_ranks: int) -> tuple[float, float]:
    """Returns messages one after another, and the share of the payload that crosses a link."""
    return COLLECTIVES[kind](num_ranks) if num_ranks > 1 else (0, 0.0)


# The collectives inside a node that are part of a collective over all nodes.
_INSIDE = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCosts:
    """Costs on nodes of `per_node` ranks: `inside` one node, and `across` nodes.

    Across nodes, one rank of each node takes part, with 1/`per_node` of the payload. With `is_mesh`
    only ranks of one node have different shards, and nodes are replicas. A reduce_scatter is then
    one inside a node, followed by the all_reduce of each rank's shard across nodes; an all_gather
    runs inside only.
    """

    inside: Costs
    across: Costs
    per_node: int
    is_mesh: bool = False

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> Floats:
        """Implements `Costs`."""
        sizes = np.asarray(num_bytes, dtype=np.float64)
        times_us = np.zeros_like(sizes)
        for phase in _INSIDE[kind]:
            times_us = times_us + self.inside.collective_us(phase, sizes)
        if self.is_mesh and kind == "all_gather":
            return times_us
        crossing = "all_reduce" if self.is_mesh else kind
        return times_us + self.across.collective_us(crossing, sizes / self.per_node)


# Substitutes for a kind that was not measured, best first, as in a ring: an all-reduce is a
# reduce-scatter and an all-gather, which take equally long. (Inside a node of NVSwitches this does
# not hold: there both take 1.33 times an all-reduce.)
_STANDS_FOR: Mapping[str, tuple[tuple[float, tuple[str, ...]], ...]] = {
    "all_reduce": (
        (1.0, ("reduce_scatter", "all_gather")),
        (2.0, ("reduce_scatter",)),
        (2.0, ("all_gather",)),
    ),
    "reduce_scatter": ((1.0, ("all_gather",)), (0.5, ("all_reduce",))),
    "all_gather": ((1.0, ("reduce_scatter",)), (0.5, ("all_reduce",))),
}


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Measured costs by kind.

    All_reduce, reduce_scatter and all_gather substitute for each other if one was not measured.
    `wires` has the format of each kind when it was measured: its times contain encoding and
    decoding.
    """

    curves: Mapping[str, CostCurve]
    wires: Mapping[str, str | None] = field(default_factory=dict)

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> Floats:
        """Implements `Costs`; raises ConfigError if neither the kind nor a substitute was
        measured."""
        for factor, kinds in ((1.0, (kind,)), *_STANDS_FOR.get(kind, ())):
            if self.curves.keys() >= set(kinds):
                return factor * sum(
                    (self.curves[measured].us(num_bytes) for measured in kinds), start=np.zeros(())
                )
        known = ", ".join(sorted(self.curves)) or "nothing"
        raise ConfigError(
            f"the cost of {kind} was not measured.",
            where=f"measured: {known}",
            remedy="Measure it, or name a link.",
        )


def costs_for(  # a network, and how its collectives go
    text: str,
    *,
    num_ranks: int,
    per_node: int | None = None,
    inside: str = NODE_LINK,
    is_mesh: bool = False,
    has_trees: bool = True,
) -> Costs:
    """Returns the costs of collectives over `num_ranks` ranks, each with its own link.

    Args:
        text: A link, see `link_from_text`. With `per_node` it is each rank's link to other
            nodes: its share, if the ranks of a node share one.
        num_ranks: Ranks of the collective.
        per_node: Ranks per node. None: all ranks are connected by `text`.
        inside: The link between ranks of a node, as `text`.
        is_mesh: True if only ranks of one node have different shards, and nodes are replicas;
            see `NodeCosts`.
        has_trees: True for NCCL's collectives, False for gloo's; see `RingCosts`.

    Raises:
        ConfigError: For an unknown link or impossible numbers of ranks.

    ```python
    costs = costs_for("25gbit", num_ranks=16, per_node=8)
    costs.collective_us("all_reduce", [25e6])  # microseconds
    ```
    """
    if per_node is None:
        return RingCosts(link_from_text(text), num_ranks=num_ranks, has_trees=has_trees)
    require(
        per_node >= 1 and num_ranks % per_node == 0,
        f"{num_ranks} ranks cannot be on nodes of {per_node} ranks each.",
        remedy=f"Give a number of ranks per node that divides {num_ranks}.",
    )
    return NodeCosts(
        inside=costs_for(inside, num_ranks=per_node, has_trees=has_trees),
        across=costs_for(text, num_ranks=num_ranks // per_node, has_trees=has_trees),
        per_node=per_node,
        is_mesh=is_mesh,
    )
