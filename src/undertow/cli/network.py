"""What communication costs, from the options of a command line and from a profile."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.cost import (
    NODE_LINK,
    Costs,
    RingCosts,
    TransferredCosts,
    catalogue_names,
    costs_for,
    link_from_curve,
    link_from_text,
)
from undertow.errors import ConfigError
from undertow.profile import Profile
from undertow.schedule import Strategy, strategy_named

__all__ = ["Network", "NetworkOptions"]

_KINDS = ("all_reduce", "reduce_scatter", "all_gather")  # of which a curve may say what the link is


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Costs over a number of ranks, and in words where they come from."""

    costs: Costs
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """The options that describe a network. Raises ConfigError for those that do nothing."""

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
        """The network of the options; without a link that of the profile, or one like it over other ranks.

        What the profile has measured above the formula of its own link is software, which stays on a link of the options;
        but over other ranks nothing was measured, and a published curve has its own. ConfigError where a strategy over two
        axes is to be on a network without nodes.
        """
        if strategy.crossing is not None or (self.link is None and strategy_named(profile.strategy).crossing is not None):
            return self._mesh(profile, strategy, num_ranks=num_ranks)
        if self.link is not None:
            return self._on_link(self.link, profile, num_ranks=num_ranks)
        if num_ranks == profile.num_ranks and profile.curves:
            return Network(costs=profile.costs(), source=f"as measured over {num_ranks} ranks")
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

    def _mesh(self, profile: Profile, strategy: Strategy, *, num_ranks: int) -> Network:
        """Rows on nodes; what was measured on a mesh says nothing of other meshes, nor of what is none."""
        if self.link is not None and self.per_node is not None:
            return self._named(self.link, num_ranks=num_ranks, is_mesh=True)
        is_measured = (profile.strategy, profile.num_ranks) == (strategy.name, num_ranks) and bool(profile.curves)
        if self.link is None and is_measured:
            return Network(costs=profile.costs(), source=f"as measured over {num_ranks} ranks")
        raise ConfigError(
            f"nothing says what strategy {strategy.name!r} costs over {num_ranks} ranks.",
            where=f"{self.link} has no nodes" if self.link else f"measured: {profile.strategy!r} over {profile.num_ranks} ranks",
            remedy='Give the network with its nodes, such as --ranks 64 --per-node 8 --link "100gbit,5us".',
        )

    def _on_link(self, link: str, profile: Profile, *, num_ranks: int) -> Network:
        wanted = self._named(link, num_ranks=num_ranks)
        is_published = not {link, self.node_link}.isdisjoint(catalogue_names())
        is_measured = not profile.curves.keys().isdisjoint(_KINDS) and strategy_named(profile.strategy).crossing is None
        if profile.link is None or is_published or not is_measured or num_ranks != profile.num_ranks:
            return wanted
        return Network(
            costs=TransferredCosts(
                measured=profile.costs(),
                was=RingCosts(link_from_text(profile.link), num_ranks=num_ranks),
                wanted=wanted.costs if self.per_node else RingCosts(link_from_text(link), num_ranks=num_ranks),
            ),
            source=f"{wanted.source}, and on top what collectives took on {profile.link} above the formula of a ring",
        )

    def _named(self, link: str, *, num_ranks: int, is_mesh: bool = False) -> Network:
        if self.per_node is None:
            return Network(costs=costs_for(link, num_ranks=num_ranks), source=f"{link}, {num_ranks} ranks")
        # Fewer ranks than a node has are on one.
        per_node, inside = min(self.per_node, num_ranks), self.node_link or NODE_LINK
        costs = costs_for(link, num_ranks=num_ranks, per_node=per_node, inside=inside, is_mesh=is_mesh)
        return Network(costs=costs, source=f"{link} between nodes of {per_node} ranks, {inside} inside; {num_ranks} ranks")


def _unused(option: str, needed: str) -> ConfigError:
    return ConfigError(f"{option} says nothing without {needed}.", where="the network", remedy=f"Give {needed} too.")
