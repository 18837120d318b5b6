"""Predicts the step of a model on a network that may not exist, for several groupings of its
gradients."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from undertow.cost import NODE_LINK, Costs, costs_for
from undertow.errors import require
from undertow.plan import Choice, Groups, Plan, SizeCaps, group_by_size, plan_from_groups
from undertow.profile import Profile
from undertow.report.comparison import SimulatedStep
from undertow.schedule import Strategy, strategy_named
from undertow.simulate import Conditions, simulate
from undertow.tune import bucket_us_of, choice_for

_MIB = 1024 * 1024
PER_PARAMETER, FIXED, PLANNED, MEASURED = (
    "per parameter",
    "25 MiB buckets",
    "planned buckets",
    "buckets of the profile",
)
_TORCH_CAPS = SizeCaps(cap_bytes=25.0 * _MIB, first_bytes=(1.0 * _MIB,))
_NEEDS_LINK = 'Give the network, such as --ranks 64 --per-node 8 --link "100gbit,5us".'


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A profile under a strategy, on a number of ranks and their network.

    Raises ConfigError for a model without parameters, and for options without effect.
    """

    profile: Profile
    strategy: Strategy
    num_ranks: int
    link: str | None = None  # None: the network of the profile
    per_node: int | None = None
    node_link: str | None = None
    conditions: Conditions = field(default_factory=Conditions)

    def __post_init__(self) -> None:
        require(
            self.profile.params,
            "a model without parameters communicates nothing.",
            where=f"the profile {self.profile.name!r}",
            remedy="Give it the parameters of the model.",
        )
        require(
            self.link is not None or self.per_node is None,
            "--per-node has no effect without --link.",
            where="the network",
            remedy="Give --link too.",
        )
        require(
            self.per_node is not None or self.node_link is None,
            "--node-link has no effect without --per-node.",
            where="the network",
            remedy="Give --per-node too.",
        )

    @classmethod
    def of(
        cls, profile: Profile, strategy: str | None = None, num_ranks: int | None = None
    ) -> Self:
        """Takes the profile's strategy and number of ranks if they are None, and its network."""
        return cls(
            profile=profile,
            strategy=strategy_named(strategy or profile.strategy),
            num_ranks=num_ranks or profile.num_ranks,
        )

    @cached_property
    def costs(self) -> Costs:
        """The costs on the network; without a link those of the profile.

        Raises ConfigError if the profile has no costs for these ranks and this strategy, and for a
        strategy over two axes on a network without nodes.
        """
        profile = self.profile
        is_mesh = self.strategy.crossing is not None
        if self.link is None:
            was_mesh = strategy_named(profile.strategy).crossing is not None
            require(
                profile.curves and self.num_ranks == profile.num_ranks and is_mesh == was_mesh,
                f"the costs of {self.strategy.name!r} over {self.num_ranks} ranks are unknown.",
                where=f"the profile {profile.name!r} has costs of "
                f"{', '.join(profile.curves) or 'nothing'}, {profile.strategy!r} over "
                f"{profile.num_ranks} ranks",
                remedy=_NEEDS_LINK,
            )
            return profile.costs()
        require(
            self.per_node is not None or not is_mesh,
            f"the strategy {self.strategy.name!r} needs a network of nodes.",
            where=f"--link {self.link}",
            remedy="Give --per-node too.",
        )
        # Measured on processors, collectives are gloo's.
        is_gloo = profile.is_measured and all(spec.device == "cpu" for spec in profile.params)
        return costs_for(
            self.link,
            num_ranks=self.num_ranks,
            per_node=self._per_node,
            inside=self.node_link or NODE_LINK,
            is_mesh=is_mesh,
            has_trees=not is_gloo,
        )

    @property
    def network(self) -> str:
        """Describes the network in words."""
        link, per_node = self.link, self._per_node
        if link is None:
            return f"as measured over {self.num_ranks} ranks"
        if per_node is None:
            return f"{link}, {self.num_ranks} ranks"
        inside = self.node_link or NODE_LINK
        return f"{link} between nodes of {per_node} ranks, {inside} inside; {self.num_ranks} ranks"

    @property
    def _per_node(self) -> int | None:
        # If there are fewer ranks than a node has, all of them are on one node.
        per_node = self.per_node
        return None if per_node is None else min(per_node, self.num_ranks)

    @cached_property
    def choice(self) -> Choice:
        """The plan that training would choose."""
        bucket_us = self.conditions.of(self.profile)["launch_us"]
        if self.profile.is_measured and self.conditions.launch_us is None:
            bucket_us = bucket_us_of(self.profile)
        has_shards = self.strategy.gather is not None
        return choice_for(self.profile, self.costs, has_shards=has_shards, bucket_us=bucket_us)

    @property
    def compute_us(self) -> float:
        """Time of a step without communication."""
        return self.profile.forward_us + self.profile.backward_us + self.profile.update_us

    @cached_property
    def planned(self) -> Plan:
        """The best plan, which knows nothing of skew, contention and copies.

        A row of fixed sizes may be faster.
        """
        return self._plan(self.choice.best.groups)

    def steps(self) -> tuple[SimulatedStep, ...]:
        """Returns the step under every grouping."""
        profile = self.profile
        found = []
        if profile.groups is not None and self.strategy.name == profile.strategy:
            found.append(self.step(MEASURED, self._plan(profile.groups)))
        alone = self._plan(tuple((param,) for param in profile.order))
        fixed = self._plan(group_by_size(profile.params, profile.order, _TORCH_CAPS))
        found.append(self.step(PER_PARAMETER, alone))
        found.append(self.step(FIXED, fixed))
        found.append(self.step(PLANNED, self.planned))
        return tuple(found)

    def step(self, method: str, plan: Plan) -> SimulatedStep:
        """Simulates a step under `plan`."""
        record = simulate(self.profile, plan, self.strategy, self.costs, self.conditions)
        return SimulatedStep(
            method=method,
            num_buckets=len(plan.buckets),
            trace=record.trace(),
            step_us=record.step_us,
            compute_us=self.compute_us,
            late_rank_us=record.late_rank_us(),
        )

    def _plan(self, groups: Groups) -> Plan:
        return plan_from_groups(self.profile.params, groups, num_ranks=self.num_ranks)
