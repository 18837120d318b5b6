"""What collectives take, as a function of their payload: one interface for measured curves and for formulas.

The formulas are those of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005, over n ranks, with M bytes, latency a of one message, inverse bandwidth b and reduction c, both in seconds per byte:

                      all_reduce                                   reduce_scatter                 all_gather
    ring              2(n-1)a + 2(n-1)/n Mb + (n-1)/n Mc           (n-1)a + (n-1)/n M(b+c)        (n-1)a + (n-1)/n Mb
    halving-doubling  2log2(n)a + 2(n-1)/n Mb + (n-1)/n Mc         log2(n)a + (n-1)/n M(b+c)      log2(n)a + (n-1)/n Mb
    hierarchical      reduce_scatter inside + all_reduce across of M/g + all_gather inside, with g ranks per node
    mesh              the same                                     all of it but the all_gather   the all_gather inside
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.cost.curve import CostCurve, never_decreasing
from undertow.cost.link import COLLECTIVES, Link
from undertow.errors import ConfigError

_Floats = NDArray[np.float64]


class Costs(Protocol):
    """Time on the communication lane. A bucket without bytes is not free: it still is a collective."""

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Microseconds of one collective of that kind ("all_reduce", "reduce_scatter", "all_gather"), of any shape of sizes.

        `num_bytes` is the whole payload, as the full tensor has it. Not decreasing in it.
        """
        ...


# Whether a collective adds: to each rank comes (n-1)/n of the payload that it adds to its own.
_REDUCES = {"all_reduce": True, "reduce_scatter": True, "all_gather": False}


@final
class RingCosts:
    """Ring algorithms over `num_ranks` ranks, each with its own `link`; a byte is added to another in `reduction_s_per_byte`."""

    def __init__(self, link: Link, *, num_ranks: int, reduction_s_per_byte: float = 0.0) -> None:
        self._link = link
        self._num_ranks = _checked_num_ranks(num_ranks)
        self._reduction_s_per_byte = _checked_reduction(reduction_s_per_byte)

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """See `Costs`; of any kind in COLLECTIVES."""
        _check_kind(kind, COLLECTIVES, "a ring")
        hops, share = COLLECTIVES[kind](self._num_ranks) if self._num_ranks > 1 else (0, 0.0)
        per_byte = share / self._link.bytes_per_s
        if _REDUCES.get(kind, False):
            per_byte += (self._num_ranks - 1) / self._num_ranks * self._reduction_s_per_byte
        return 1e6 * (hops * self._link.hop_s + per_byte * _sizes(num_bytes))


@final
class HalvingDoublingCosts:
    """Recursive halving and doubling: as many bytes as in a ring in fewer messages, over a power of two of ranks."""

    def __init__(self, link: Link, *, num_ranks: int, reduction_s_per_byte: float = 0.0) -> None:
        if not is_power_of_two(_checked_num_ranks(num_ranks)):
            raise ConfigError(
                f"halving and doubling needs a power of two of ranks, got num_ranks={num_ranks}.", remedy="Use RingCosts."
            )
        self._link = link
        self._num_ranks = num_ranks
        self._reduction_s_per_byte = _checked_reduction(reduction_s_per_byte)

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """See `Costs`."""
        _check_kind(kind, _REDUCES, "halving and doubling")
        share = (self._num_ranks - 1) / self._num_ranks
        num_times = 2 if kind == "all_reduce" else 1
        fixed = num_times * (self._num_ranks.bit_length() - 1) * self._link.hop_s
        per_byte = num_times * share / self._link.bytes_per_s
        if _REDUCES[kind]:
            per_byte += share * self._reduction_s_per_byte
        return 1e6 * (fixed + per_byte * _sizes(num_bytes))


@final
class HierarchicalCosts:
    """Nodes of `per_node` ranks: `inside` one node, and `across` of one rank of each node, each with a part of the payload."""

    def __init__(self, *, inside: Costs, across: Costs, per_node: int) -> None:
        self._inside = inside
        self._across = across
        self._per_node = _checked_num_ranks(per_node)

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """See `Costs`."""
        _check_kind(kind, _REDUCES, "nodes")
        sizes = _sizes(num_bytes)
        return _with_inside_us(self._across.collective_us(kind, sizes / self._per_node), self._inside, kind, sizes)


@final
class MeshCosts:
    """A mesh whose rows of `per_node` ranks have shards of one another, `inside` a node, and are replicas `across` nodes.

    A reduce_scatter is one inside and, behind it, the all_reduce of each rank's shard across; an all_gather is inside alone, an
    all_reduce both.
    """

    def __init__(self, *, inside: Costs, across: Costs, per_node: int) -> None:
        self._inside = inside
        self._across = across
        self._per_node = _checked_num_ranks(per_node)

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """See `Costs`."""
        _check_kind(kind, _REDUCES, "a mesh")
        sizes = _sizes(num_bytes)
        across = self._across.collective_us("all_reduce", sizes / self._per_node) if _REDUCES[kind] else np.zeros_like(sizes)
        return _with_inside_us(across, self._inside, kind, sizes)


# What stands for a kind that was not measured, the best first: as in a ring, where an all-reduce is a reduce-scatter and
# an all-gather, which take the same. (Inside a node of NVSwitches it is not: there both take 1.33 times an all-reduce.)
_STANDS_FOR: Mapping[str, tuple[tuple[float, tuple[str, ...]], ...]] = {
    "all_reduce": ((1.0, ("reduce_scatter", "all_gather")), (2.0, ("reduce_scatter",)), (2.0, ("all_gather",))),
    "reduce_scatter": ((1.0, ("all_gather",)), (0.5, ("all_reduce",))),
    "all_gather": ((1.0, ("reduce_scatter",)), (0.5, ("all_reduce",))),
}


@final
class MeasuredCosts:
    """What was measured, by kind; of all_reduce, reduce_scatter and all_gather one stands for the others where it must."""

    def __init__(self, curves: Mapping[str, CostCurve]) -> None:
        self._curves = dict(curves)

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """See `Costs`; ConfigError for a kind that nothing measured stands for."""
        factor, curves = self._standing_for(kind)
        return factor * sum((curve.us(num_bytes) for curve in curves), start=np.zeros(()))

    def sizes(self, kind: str) -> NDArray[np.float64]:
        """The payloads in bytes, increasing, at which what is said of `kind` was measured; raises as `collective_us`."""
        _, curves = self._standing_for(kind)
        return np.unique([size for curve in curves for size, _ in curve.points])

    def _standing_for(self, kind: str) -> tuple[float, list[CostCurve]]:
        """Curves whose sum, times the factor, is what `kind` costs."""
        for factor, kinds in ((1.0, (kind,)), *_STANDS_FOR.get(kind, ())):
            if self._curves.keys() >= set(kinds):
                return factor, [self._curves[measured] for measured in kinds]
        known = ", ".join(sorted(self._curves)) or "nothing"
        raise ConfigError(
            f"what {kind} costs was not measured.", where=f"measured: {known}", remedy="Measure it, or name a link."
        )


@final
class TransferredCosts:
    """What was `measured` on one network, on another: `wanted` in place of `was`, the formulas of both.

    What the sizes that were measured took longer than their formula is software, and stays: evened out where a larger one
    took less of it, that of the smallest for smaller ones, and beyond the largest more where the measured curve is steeper.
    """

    def __init__(self, *, measured: MeasuredCosts, was: Costs, wanted: Costs) -> None:
        self._measured = measured
        self._was = was
        self._wanted = wanted

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """See `Costs`."""
        knots, sizes = self._measured.sizes(kind), _sizes(num_bytes)
        last = knots[-1]
        overhead = never_decreasing([[max(0.0, above)] for above in self._above(kind, knots).tolist()])
        at_last, beyond = self._above(kind, [last, 2 * last + 1])
        us_per_byte = max(0.0, beyond - at_last) / (last + 1)
        overheads: _Floats = np.interp(sizes, knots, overhead) + us_per_byte * np.maximum(sizes - last, 0.0)
        return overheads + self._wanted.collective_us(kind, sizes)

    def _above(self, kind: str, num_bytes: ArrayLike) -> _Floats:
        return self._measured.collective_us(kind, num_bytes) - self._was.collective_us(kind, num_bytes)


def _with_inside_us(across: _Floats, inside: Costs, kind: str, sizes: _Floats) -> _Floats:
    """With what a node takes, where an all-reduce is a reduce-scatter before what crosses and an all-gather behind it."""
    phases = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
    return sum((inside.collective_us(phase, sizes) for phase in phases), start=across)


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _sizes(num_bytes: ArrayLike) -> _Floats:
    return np.asarray(num_bytes, dtype=np.float64)


def _checked_num_ranks(num_ranks: int) -> int:
    if num_ranks < 1:
        raise ConfigError(f"a collective is one of one rank or more, got {num_ranks}.", remedy="Give a positive number of ranks.")
    return num_ranks


def _checked_reduction(s_per_byte: float) -> float:
    if not 0 <= s_per_byte < math.inf:
        raise ConfigError(f"to add a byte cannot take {s_per_byte} s.", remedy="Give seconds per byte, zero or more.")
    return s_per_byte


def _check_kind(kind: str, known: Iterable[str], what: str) -> None:
    if kind not in known:
        raise ConfigError(f"there is no {kind} over {what}.", remedy=f"Choose one of: {', '.join(known)}.")
