"""The time of collectives as a function of their payload: one interface for measured curves and for formulas.

The formulas are from Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, over n
ranks, with M bytes, latency a of one message and inverse bandwidth b in seconds per byte:

             all_reduce                     reduce_scatter           all_gather
    ring     2(n-1)a + 2(n-1)/n Mb          (n-1)a + (n-1)/n Mb      (n-1)a + (n-1)/n Mb
    nodes    reduce_scatter inside + all_reduce across of M/g + all_gather inside, with g ranks per node
    mesh     the same                       all but the gather       the all_gather inside
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.cost.curve import CostCurve
from undertow.cost.link import COLLECTIVES, Link
from undertow.errors import ConfigError


class Costs(Protocol):
    """Times on the communication stream. A bucket without bytes is not free: it is still a collective."""

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Returns the microseconds of one collective for each size, in an array of the shape of `num_bytes`.

        - `kind`: "all_reduce", "reduce_scatter" or "all_gather".
        - `num_bytes`: the whole payload in bytes, the size of the full tensor. The time does not decrease with it.
        """
        ...


@final
class RingCosts:
    """Ring algorithms over `num_ranks` ranks, each with its own `link`. Raises ConfigError unless `num_ranks` is positive."""

    def __init__(self, link: Link, *, num_ranks: int) -> None:
        self._link = link
        self._num_ranks = _checked_num_ranks(num_ranks)

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Implements `Costs` for any kind in COLLECTIVES."""
        _check_kind(kind, COLLECTIVES, "a ring")
        hops, share = COLLECTIVES[kind](self._num_ranks) if self._num_ranks > 1 else (0, 0.0)
        return 1e6 * (hops * self._link.hop_s + share / self._link.bytes_per_s * _sizes(num_bytes))


# The collectives inside a node that are part of a collective over all nodes.
_INSIDE = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",),
}


@final
class NodeCosts:
    """Costs on nodes of `per_node` ranks: `inside` one node, and `across` nodes.

    Across nodes, one rank of each node takes part, with 1/`per_node` of the payload. With `is_mesh` only ranks of one node have
    different shards, and nodes are replicas. A reduce_scatter is then one inside a node, followed by the all_reduce of each
    rank's shard across nodes; an all_gather runs inside only.
    """

    def __init__(self, *, inside: Costs, across: Costs, per_node: int, is_mesh: bool = False) -> None:
        self._inside = inside
        self._across = across
        self._per_node = _checked_num_ranks(per_node)
        self._is_mesh = is_mesh

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Implements `Costs`."""
        _check_kind(kind, _INSIDE, "nodes")
        sizes = _sizes(num_bytes)
        crossing = np.zeros_like(sizes)
        if not self._is_mesh:
            crossing = self._across.collective_us(kind, sizes / self._per_node)
        elif kind != "all_gather":
            crossing = self._across.collective_us("all_reduce", sizes / self._per_node)
        return sum((self._inside.collective_us(phase, sizes) for phase in _INSIDE[kind]), start=crossing)


# Substitutes for a kind that was not measured, best first, as in a ring: an all-reduce is a reduce-scatter and an all-gather,
# which take equally long. (Inside a node of NVSwitches this does not hold: there both take 1.33 times an all-reduce.)
_STANDS_FOR: Mapping[str, tuple[tuple[float, tuple[str, ...]], ...]] = {
    "all_reduce": ((1.0, ("reduce_scatter", "all_gather")), (2.0, ("reduce_scatter",)), (2.0, ("all_gather",))),
    "reduce_scatter": ((1.0, ("all_gather",)), (0.5, ("all_reduce",))),
    "all_gather": ((1.0, ("reduce_scatter",)), (0.5, ("all_reduce",))),
}


@final
class MeasuredCosts:
    """Measured costs by kind; all_reduce, reduce_scatter and all_gather substitute for each other if one was not measured."""

    def __init__(self, curves: Mapping[str, CostCurve]) -> None:
        self._curves = dict(curves)

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Implements `Costs`; raises ConfigError if neither the kind nor a substitute was measured."""
        for factor, kinds in ((1.0, (kind,)), *_STANDS_FOR.get(kind, ())):
            if self._curves.keys() >= set(kinds):
                return factor * sum((self._curves[measured].us(num_bytes) for measured in kinds), start=np.zeros(()))
        known = ", ".join(sorted(self._curves)) or "nothing"
        raise ConfigError(
            f"what {kind} costs was not measured.", where=f"measured: {known}", remedy="Measure it, or name a link."
        )


def _sizes(num_bytes: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(num_bytes, dtype=np.float64)


def _checked_num_ranks(num_ranks: int) -> int:
    if num_ranks < 1:
        raise ConfigError(f"a collective is one of one rank or more, got {num_ranks}.", remedy="Give a positive number of ranks.")
    return num_ranks


def _check_kind(kind: str, known: Iterable[str], what: str) -> None:
    if kind not in known:
        raise ConfigError(f"there is no {kind} over {what}.", remedy=f"Choose one of: {', '.join(known)}.")
