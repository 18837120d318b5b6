"""Predicts the step of a model on a network that may not exist, for several groupings of its
gradients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from undertow.cost import NODE_LINK, Costs, MeasuredCosts, costs_for, scaled_curve
from undertow.errors import ConfigError, require
from undertow.plan import Choice, Groups, Plan, SizeCaps, group_by_size, plan_from_groups
from undertow.profile import Profile
from undertow.report.comparison import Outcome
from undertow.schedule import Strategy, strategy_named
from undertow.simulate import Conditions, simulate
from undertow.tune import bucket_us_of, choice_for

_KINDS = ("all_reduce", "reduce_scatter", "all_gather")  # kinds whose curve may determine the link
_MIB = 1024 * 1024
PER_PARAMETER, FIXED, PLANNED, MEASURED = (
    "per parameter",
    "25 MiB buckets",
    "planned buckets",
    "buckets of the profile",
)
# p10 and p90 of steps beside their predictions, of the published rows in docs/fidelity.md. Measured
# profiles know the spread of their steps and how far their own step is missed. What remains is the
# model's.
BAND, _MODEL, _P90 = (
    (0.88, 1.09),
    0.03,
    1.2816,
)  # the last two: a standard deviation, and the number of them up to p90


def require_rank(num_ranks: int | None, *, of: str, where: str) -> None:
    """Raises ConfigError if the option --ranks is given and below 1; `of` begins the text."""
    require(
        num_ranks is None or num_ranks >= 1,
        f"{of} one rank or more, got --ranks {num_ranks}.",
        where=where,
        remedy="Give one or more, or leave it out.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Costs over a number of ranks, and a description of their source."""

    costs: Costs
    source: str
    is_measured: bool = False  # in the run of the profile


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """The options that describe a network. Raises ConfigError for options without effect."""

    link: str | None = None
    per_node: int | None = None
    node_link: str | None = None

    def __post_init__(self) -> None:
        for option, value, needed, given in (
            ("--per-node", self.per_node, "--link", self.link),
            ("--node-link", self.node_link, "--link", self.link),
            ("--node-link", self.node_link, "--per-node", self.per_node),
        ):
            require(
                value is None or given is not None,
                f"{option} has no effect without {needed}.",
                where="the network",
                remedy=f"Give {needed} too.",
            )

    def network(self, profile: Profile, strategy: Strategy, *, num_ranks: int) -> Network:
        """Returns the network of the options; without a link the profile's network, or one like it
        over other ranks.

        Raises ConfigError for a strategy over two axes on a network without nodes: a measured mesh
        says nothing about other meshes, nor about a network that is not a mesh.
        """
        is_mesh = strategy.crossing is not None
        # Measured on processors, collectives are gloo's.
        has_trees = not (
            profile.is_measured and all(spec.device == "cpu" for spec in profile.params)
        )
        if self.link is not None and (self.per_node is not None or not is_mesh):
            # If there are fewer ranks than a node has, all of them are on one node.
            per_node, inside = (
                self.per_node and min(self.per_node, num_ranks),
                self.node_link or NODE_LINK,
            )
            costs = costs_for(
                self.link,
                num_ranks=num_ranks,
                per_node=per_node,
                inside=inside,
                is_mesh=is_mesh,
                has_trees=has_trees,
            )
            nodes = (
                ","
                if per_node is None
                else (f" between nodes of {per_node} ranks, {inside} inside;")
            )
            return Network(costs=costs, source=f"{self.link}{nodes} {num_ranks} ranks")
        needs_nodes = is_mesh or strategy_named(profile.strategy).crossing is not None
        is_measured = num_ranks == profile.num_ranks and bool(profile.curves)
        if (
            self.link is None
            and is_measured
            and (strategy.name == profile.strategy or not needs_nodes)
        ):
            return Network(
                costs=profile.costs(),
                source=f"as measured over {num_ranks} ranks",
                is_measured=True,
            )
        if needs_nodes:
            measured = f"measured: {profile.strategy!r} over {profile.num_ranks} ranks"
            raise ConfigError(
                f"the costs of strategy {strategy.name!r} over {num_ranks} ranks are unknown.",
                where=f"{self.link} has no nodes" if self.link else measured,
                remedy="Give the network with its nodes, such as --ranks 64 --per-node 8 --link "
                '"100gbit,5us".',
            )
        curves = {kind: profile.curves[kind] for kind in _KINDS if kind in profile.curves}
        if not curves:
            raise ConfigError(
                f"the costs of communication over {num_ranks} ranks are unknown.",
                where=f"the profile {profile.name!r} has no costs",
                remedy='Give the network, such as --ranks 64 --link "100gbit,5us".',
            )
        if num_ranks == 1:
            return Network(costs=costs_for("none", num_ranks=1), source="none: a single rank")
        scaled = {}
        for kind, curve in curves.items():
            scaled[kind] = scaled_curve(
                curve, kind, num_ranks=profile.num_ranks, to=num_ranks, has_trees=has_trees
            )
        source = f"as measured over {profile.num_ranks} ranks, scaled to {num_ranks} ranks"
        return Network(costs=MeasuredCosts(scaled), source=source)


def caps_of(mebibytes: float) -> SizeCaps:
    """Returns the caps of torch's DistributedDataParallel for that size.

    The first bucket has 1 MiB.
    """
    return SizeCaps(cap_bytes=mebibytes * _MIB, first_bytes=(min(mebibytes, 1.0) * _MIB,))


_FIXED_CAPS: Mapping[str, SizeCaps] = {
    FIXED: caps_of(25.0),
    "40 MB buckets": SizeCaps(cap_bytes=40e6),
}


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A profile under a strategy, on a number of ranks and their network."""

    profile: Profile
    strategy: Strategy
    num_ranks: int
    options: NetworkOptions
    conditions: Conditions

    @classmethod
    def of(
        cls,
        profile: Profile,
        strategy: str | None,
        num_ranks: int | None,
        options: NetworkOptions,
        conditions: Conditions,
    ) -> Self:
        """Takes the profile's strategy and number of ranks if they are None."""
        require(
            profile.params,
            "a model without parameters communicates nothing.",
            where=f"the profile {profile.name!r}",
            remedy="Give it the parameters of the model.",
        )
        return cls(
            profile=profile,
            strategy=strategy_named(profile.strategy if strategy is None else strategy),
            num_ranks=profile.num_ranks if num_ranks is None else num_ranks,
            options=options,
            conditions=conditions,
        )

    @cached_property
    def network(self) -> Network:
        return self.options.network(self.profile, self.strategy, num_ranks=self.num_ranks)

    @cached_property
    def choice(self) -> Choice:
        """The plan that training would choose."""
        is_as_measured = self.profile.is_measured and self.conditions.launch_us is None
        launch_us = self.conditions.of(self.profile)["launch_us"]
        return choice_for(
            self.profile,
            self.network.costs,
            has_shards=self.strategy.gather is not None,
            bucket_us=bucket_us_of(self.profile) if is_as_measured else launch_us,
        )

    @property
    def compute_us(self) -> float:
        """Time of a step without communication."""
        return self.profile.forward_us + self.profile.backward_us + self.profile.update_us

    @property
    def limit_us(self) -> float:
        """Lower bound of the step time for any grouping, on equal ranks without contention."""
        return self.profile.update_us + max(
            self.profile.timing.backward_end_us, self.choice.limit_us
        )

    @cached_property
    def planned(self) -> Plan:
        """The best plan, which knows nothing of skew, contention and copies.

        A row of fixed sizes may be faster.
        """
        return self._plan(self.choice.best.groups)

    def plan_of_size(self, caps: SizeCaps) -> Plan:
        """Returns buckets of fixed size, in ready order."""
        return self._plan(group_by_size(self.profile.params, self.profile.order, caps))

    def outcomes(self) -> tuple[Outcome, ...]:
        """Returns the outcome of every method."""
        own = self.profile.groups if self.strategy.name == self.profile.strategy else None
        measured = [] if own is None else [self.outcome(MEASURED, self._plan(own))]
        alone = self.outcome(
            PER_PARAMETER, self._plan(tuple((param,) for param in self.profile.order))
        )
        fixed = [self.outcome(name, self.plan_of_size(caps)) for name, caps in _FIXED_CAPS.items()]
        return (*measured, alone, *fixed, self.outcome(PLANNED, self.planned))

    def outcome(self, method: str, plan: Plan) -> Outcome:
        """Simulates a step under `plan`."""
        record = simulate(self.profile, plan, self.strategy, self.network.costs, self.conditions)
        low, high = self._band
        return Outcome(
            method=method,
            num_buckets=len(plan.buckets),
            trace=record.trace(),
            step_us=record.step_us,
            compute_us=self.compute_us,
            limit_us=self.limit_us,
            # The limit is of ranks as slow as the profile's slowest: fewer of them may be faster.
            band_us=(
                min(record.step_us, max(self.limit_us, record.step_us * low)),
                record.step_us * high,
            ),
            late_rank_us=record.late_rank_us(),
        )

    @cached_property
    def _band(self) -> tuple[float, float]:
        """p10 and p90 of a step, relative to its prediction.

        Narrow only for the network on which the spread was measured.
        """
        profile, missed = self.profile, 0.0
        spread = profile.skew if profile.spread is None else profile.spread
        if spread is None or not self.network.is_measured:
            return BAND
        if profile.groups is not None and profile.step_us is not None:
            plan, conditions = self._plan(profile.groups), Conditions()
            own = simulate(
                profile, plan, strategy_named(profile.strategy), self.network.costs, conditions
            )
            missed = abs(profile.step_us / own.step_us - 1)
        width = _P90 * math.hypot(max(_MODEL, missed), spread)
        return 1 - width, 1 + width

    def _plan(self, groups: Groups) -> Plan:
        return plan_from_groups(self.profile.params, groups, num_ranks=self.num_ranks)
