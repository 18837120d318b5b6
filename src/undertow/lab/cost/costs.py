"""The time of collectives as a function of their payload: one interface for measured curves, and
for formulas of links.

The formulas are from Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005, over n ranks, with M bytes, latency a of one message and inverse
bandwidth b in seconds per byte:

             all_reduce                     reduce_scatter           all_gather
    ring     2(n-1)a + 2(n-1)/n Mb          (n-1)a + (n-1)/n Mb      (n-1)a + (n-1)/n Mb
    tree     2 log2(n)a + 2Mb                 log2(n)a + nc + (n-1)/n Mb (both)
    nodes    reduce_scatter inside + all_reduce across of M/g + all_gather inside, g ranks per node
    mesh     the same                       all but the gather       the all_gather inside
    direct   2a + 2(n-1)h + 2(n-1)/n Mb     a + (n-1)h + (n-1)/n Mb (both)

NCCL takes the faster of ring and tree for an all-reduce (since its version 2.4; src/graph/tuning.cc
counts log2 of the ranks for a tree, and half of a ring's bandwidth as a bus has it), and gloo
always the ring. Its trees for a reduce-scatter and an all-gather ("PAT", since 2.23) need one rank
on each node, and its model counts 2.8 us for each rank, c, beside log2 of them. log2 is taken of
any number: nothing jumps.

Over gloo, shards and formats are direct messages: each rank sends and receives n-1 of them, or
twice as many, at the same time. A processor takes h for each.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from undertow.errors import ConfigError, require
from undertow.lab.cost.curves import CostCurve, Floats
from undertow.lab.cost.links import NODE_LINK, Link, link_from_text

_TREE_RANK_S = 2.8e-6  # of a reduce-scatter or an all-gather through trees
# Of one processor for a message of gloo, of any size: a send takes 43 us and a receive 42
# (docs/studies.md, in a profile of 8 ranks).
_MESSAGE_US = 85.0

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

    def direct_us(self, kind: str, num_bytes: ArrayLike) -> Floats:
        """Like `collective_us`, for a collective that Undertow makes of direct messages: over gloo,
        those of shards and formats. Over other backends the two are equal."""


@dataclass(frozen=True, slots=True)
class RingCosts:
    """Ring algorithms over `num_ranks` ranks, each with its own `link`; of any kind in COLLECTIVES.

    With `has_trees` an all-reduce goes through trees where that is faster, as in NCCL; without,
    through a ring, as in gloo. With `has_all_trees` so do reduce-scatters and all-gathers.
    """

    link: Link
    num_ranks: int = field(kw_only=True)
    has_trees: bool = field(default=True, kw_only=True)
    has_all_trees: bool = field(default=False, kw_only=True)

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> Floats:
        """Implements `Costs`."""
        hops, share = _ring(kind, self.num_ranks)
        sizes = np.asarray(num_bytes, dtype=np.float64)
        times_s = hops * self.link.hop_s + share / self.link.bytes_per_s * sizes
        if kind == "all_reduce" and self.has_trees:
            tree_s = 2 * math.log2(self.num_ranks) * self.link.hop_s
            times_s = np.minimum(times_s, tree_s + 2.0 / self.link.bytes_per_s * sizes)
        if kind in ("reduce_scatter", "all_gather") and self.has_all_trees:
            saved_s = (hops - math.log2(self.num_ranks)) * self.link.hop_s
            times_s = times_s - max(0.0, saved_s - _TREE_RANK_S * self.num_ranks)
        return 1e6 * times_s

    def direct_us(self, kind: str, num_bytes: ArrayLike) -> Floats:
        """Implements `Costs`: as many messages as in a ring, but at the same time."""
        if self.has_trees:
            return self.collective_us(kind, num_bytes)
        num_messages, share = _ring(kind, self.num_ranks)
        rounds = num_messages / max(1, self.num_ranks - 1)
        fixed_us = 1e6 * rounds * self.link.hop_s + num_messages * _MESSAGE_US
        sizes = np.asarray(num_bytes, dtype=np.float64)
        return fixed_us + 1e6 * share / self.link.bytes_per_s * sizes


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
    runs inside only. Without a mesh, direct messages go from each rank to each other one.
    """

    inside: Costs
    across: Costs
    per_node: int
    is_mesh: bool = False
    num_nodes: int = 0  # of ranks that send direct messages; 0 if they send none

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> Floats:
        """Implements `Costs`."""
        return self._two_levels_us(
            kind, num_bytes, self.inside.collective_us, self.across.collective_us
        )

    def direct_us(self, kind: str, num_bytes: ArrayLike) -> Floats:
        """Implements `Costs`."""
        if self.is_mesh or not self.num_nodes:
            return self._two_levels_us(
                kind, num_bytes, self.inside.direct_us, self.across.direct_us
            )
        sizes = np.asarray(num_bytes, dtype=np.float64)
        # With the messages inside counted once for each node, all go to each other rank once.
        inside_us = self.inside.direct_us(kind, sizes / self.num_nodes**2)
        return self.num_nodes * inside_us + self.across.direct_us(kind, sizes)

    def _two_levels_us(
        self,
        kind: str,
        num_bytes: ArrayLike,
        inside_us: Callable[[str, ArrayLike], Floats],
        across_us: Callable[[str, ArrayLike], Floats],
    ) -> Floats:
        sizes = np.asarray(num_bytes, dtype=np.float64)
        times_us = np.zeros_like(sizes)
        for phase in _INSIDE[kind]:
            times_us = times_us + inside_us(phase, sizes)
        if self.is_mesh and kind == "all_gather":
            return times_us
        crossing = "all_reduce" if self.is_mesh else kind
        return times_us + across_us(crossing, sizes / self.per_node)


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

    def direct_us(self, kind: str, num_bytes: ArrayLike) -> Floats:
        """Implements `Costs`: the messages were measured."""
        return self.collective_us(kind, num_bytes)


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
        per_node: Ranks per node. None or 1: all ranks are connected by `text`.
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
    link = link_from_text(text)
    if per_node is None:
        return RingCosts(link, num_ranks=num_ranks, has_trees=has_trees, has_all_trees=has_trees)
    require(
        per_node >= 1 and num_ranks % per_node == 0,
        f"{num_ranks} ranks cannot be on nodes of {per_node} ranks each.",
        remedy=f"Give a number of ranks per node that divides {num_ranks}.",
    )
    inside_link = link_from_text(inside)
    if per_node == 1 and not is_mesh:  # the network of each rank is the node's
        return costs_for(text, num_ranks=num_ranks, has_trees=has_trees)
    return NodeCosts(
        inside=RingCosts(inside_link, num_ranks=per_node, has_trees=has_trees),
        across=RingCosts(link, num_ranks=num_ranks // per_node, has_trees=has_trees),
        per_node=per_node,
        is_mesh=is_mesh,
        num_nodes=0 if has_trees else num_ranks // per_node,
    )
