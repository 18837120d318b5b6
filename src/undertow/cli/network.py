"""The cost of communication, from the options of a command line and from a profile."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.cost import NODE_LINK, Costs, RingCosts, costs_for, link_from_curve
from undertow.errors import ConfigError
from undertow.profile import Profile
from undertow.schedule import Strategy, strategy_named

__all__ = ["Network", "NetworkOptions"]

_KINDS = ("all_reduce", "reduce_scatter", "all_gather")  # kinds whose curve may determine the link


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Costs over a number of ranks, and a description of their source."""

    costs: Costs
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """The options that describe a network. Raises ConfigError for options without effect."""

    link: str | None = None
    per_node: int | None = None
    node_link: str | None = None

    def __post_init__(self) -> None:
        if self.link is None and (self.per_node is not None or self.node_link is not None):
            raise _unused("--per-node and --node-link" if self.per_node and self.node_link else self._given, "--link")
        if self.node_link is not None and self.per_node is None:
            raise _unused("--node-link", "--per-node")

    @property
    def _given(self) -> str:
        return "--node-link" if self.per_node is None else "--per-node"

    def network(self, profile: Profile, strategy: Strategy, *, num_ranks: int) -> Network:
        """Returns the network of the options; without a link the profile's network, or one like it over other ranks.

        Raises ConfigError for a strategy over two axes on a network without nodes: a measured mesh says nothing about other
        meshes, nor about a network that is not a mesh.
        """
        is_mesh = strategy.crossing is not None
        if self.link is not None and (self.per_node is not None or not is_mesh):
            return self._named(self.link, num_ranks=num_ranks, is_mesh=is_mesh)
        needs_nodes = is_mesh or strategy_named(profile.strategy).crossing is not None
        is_measured = num_ranks == profile.num_ranks and bool(profile.curves)
        if self.link is None and is_measured and (strategy.name == profile.strategy or not needs_nodes):
            return Network(costs=profile.costs(), source=f"as measured over {num_ranks} ranks")
        if needs_nodes:
            measured = f"measured: {profile.strategy!r} over {profile.num_ranks} ranks"
            raise ConfigError(
                f"nothing says what strategy {strategy.name!r} costs over {num_ranks} ranks.",
                where=f"{self.link} has no nodes" if self.link else measured,
                remedy='Give the network with its nodes, such as --ranks 64 --per-node 8 --link "100gbit,5us".',
            )
        kind = next((kind for kind in _KINDS if kind in profile.curves), None)
        if kind is None:
            raise ConfigError(
                f"nothing says what communication over {num_ranks} ranks costs.",
                where=f"the profile {profile.name!r} has no costs",
                remedy='Give the network, such as --ranks 64 --link "100gbit,5us".',
            )
        link = link_from_curve(profile.curves[kind], kind, num_ranks=profile.num_ranks, name="measured")
        found = f"{link.bytes_per_s * 8e-9:.3g} Gb/s and {link.hop_s * 1e6:.3g} us a message"
        return Network(
            costs=RingCosts(link, num_ranks=num_ranks),
            source=f"a ring over {num_ranks} ranks, each with the link that explains what {profile.num_ranks} measured: {found}",
        )

    def _named(self, link: str, *, num_ranks: int, is_mesh: bool) -> Network:
        if self.per_node is None:
            return Network(costs=costs_for(link, num_ranks=num_ranks), source=f"{link}, {num_ranks} ranks")
        # If there are fewer ranks than a node has, all of them are on one node.
        per_node, inside = min(self.per_node, num_ranks), self.node_link or NODE_LINK
        costs = costs_for(link, num_ranks=num_ranks, per_node=per_node, inside=inside, is_mesh=is_mesh)
        return Network(costs=costs, source=f"{link} between nodes of {per_node} ranks, {inside} inside; {num_ranks} ranks")


def _unused(option: str, needed: str) -> ConfigError:
    return ConfigError(f"{option} says nothing without {needed}.", where="the network", remedy=f"Give {needed} too.")
