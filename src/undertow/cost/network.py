"""Networks as a command line names them, and as a measured curve explains them."""

from __future__ import annotations

import math

from undertow.cost.costs import Costs, NodeCosts, RingCosts
from undertow.cost.curve import CostCurve, line_through
from undertow.cost.link import COLLECTIVES, Link, link_from_text
from undertow.errors import ConfigError

# NVLink 3 of an A100 carries 300 GB/s in each direction.
NODE_LINK = "2400gbit,3us"


def costs_for(text: str, *, num_ranks: int, per_node: int | None = None, inside: str = NODE_LINK, is_mesh: bool = False) -> Costs:
    """Returns the costs of ring collectives over `num_ranks` ranks, each with its own link as named by `text`.

    - `text`: a link, see `link_from_text`. With `per_node` it is each rank's link to other nodes: its share, if the ranks of a
      node share one.
    - `per_node`: ranks per node, which are connected by links `inside`. None: all ranks are connected by `text`.
    - `is_mesh`: only ranks of one node have different shards, and nodes are replicas; see `NodeCosts`.

    Raises ConfigError for an unknown link or impossible numbers of ranks.

    ```python
    costs = costs_for("25gbit", num_ranks=16, per_node=8)
    costs.collective_us("all_reduce", [25e6])  # microseconds
    ```
    """
    if num_ranks < 1:
        raise ConfigError(f"a network has one rank or more, got {num_ranks}.", remedy="Give a positive number of ranks.")
    if per_node is not None:
        if per_node < 1 or num_ranks % per_node:
            raise ConfigError(
                f"{num_ranks} ranks cannot be on nodes of {per_node} ranks each.",
                remedy=f"Give a number of ranks per node that divides {num_ranks}.",
            )
        across = costs_for(text, num_ranks=num_ranks // per_node)
        return NodeCosts(inside=costs_for(inside, num_ranks=per_node), across=across, per_node=per_node, is_mesh=is_mesh)
    return RingCosts(link_from_text(text), num_ranks=num_ranks)


def link_from_curve(curve: CostCurve, kind: str, *, num_ranks: int, name: str) -> Link:
    """Returns the link on which a ring of `num_ranks` matches `curve` for collectives of that kind as closely as possible.

    So a measurement between two ranks predicts 64 ranks on the same network. It uses the line of `line_through`. Raises
    ConfigError for fewer than two ranks, or if the curve's sizes are too close together.
    """
    if num_ranks < 2 or not curve.is_enough:
        reason = f"num_ranks={num_ranks}" if num_ranks < 2 else "its sizes lie too close together"
        raise ConfigError(
            f"no link can be made of the curve of {kind}: {reason}.",
            remedy="Measure between two ranks or more, and sizes of which one is half as large again as another.",
        )
    hops, share = COLLECTIVES[kind](num_ranks)
    line = line_through(curve.points)
    bytes_per_s = share / (line.us_per_byte * 1e-6) if line.us_per_byte > 0 else math.inf
    return Link(name=name, hop_s=line.latency_us * 1e-6 / hops, bytes_per_s=bytes_per_s)
