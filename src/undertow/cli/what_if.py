"""Predicts the step of a model on a network that may not exist, for several groupings of its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from undertow.cli.network import Network, NetworkOptions
from undertow.plan import GroupEntry, Plan, SizeCaps, group_by_size, group_in_pieces, plan_from_groups
from undertow.plan.optimal import Optimum, optimal_groups
from undertow.profile import Profile
from undertow.report.comparison import Outcome
from undertow.schedule import Strategy
from undertow.simulate import Conditions, simulate
from undertow.trace import summarize
from undertow.tune.tuner import best_groups_in_backward

__all__ = ["FIXED", "FIXED_CAPS", "OPTIMAL", "PER_PARAMETER", "WhatIf", "caps_of"]

_MIB = 1024 * 1024
PER_PARAMETER, FIXED, OPTIMAL = "per parameter", "25 MiB buckets", "optimal buckets"


def caps_of(mebibytes: float) -> SizeCaps:
    """Returns the caps of torch's DistributedDataParallel for that size: the first bucket has 1 MiB."""
    return SizeCaps(cap_bytes=mebibytes * _MIB, first_bytes=(min(mebibytes, 1.0) * _MIB,))


FIXED_CAPS: Mapping[str, SizeCaps] = {FIXED: caps_of(25.0), "40 MB buckets": SizeCaps(cap_bytes=40e6)}


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A profile under a strategy, on a number of ranks and their network."""

    profile: Profile
    strategy: Strategy
    num_ranks: int
    options: NetworkOptions
    conditions: Conditions

    @cached_property
    def network(self) -> Network:
        return self.options.network(self.profile, self.strategy, num_ranks=self.num_ranks)

    @cached_property
    def optimum(self) -> Optimum:
        profile = self.profile
        if self.conditions.in_backward:
            return best_groups_in_backward(
                profile, profile.order, self.network.costs, num_ranks=self.num_ranks, max_bytes=float("inf")
            )
        return optimal_groups(
            profile.params,
            profile.order,
            profile.timing,
            self.network.costs,
            num_ranks=self.num_ranks,
            has_shards=self._has_shards,
        )

    @property
    def compute_us(self) -> float:
        """Time of a step without communication."""
        return self.profile.forward_us + self.profile.backward_us + self.profile.update_us

    @property
    def limit_us(self) -> float:
        """Lower bound of the step time for any grouping, on equal ranks without contention."""
        if self.conditions.in_backward:
            return self.optimum.limit_us
        return self.profile.update_us + max(self.profile.timing.backward_end_us, self.optimum.limit_us)

    @property
    def optimal_plan(self) -> Plan:
        return self._plan(self.optimum.groups)

    def plan_of_size(self, caps: SizeCaps) -> Plan:
        """Returns buckets of fixed size, in ready order; with shards large parameters are cut."""
        params, order = self.profile.params, self.profile.order
        if self._has_shards:
            return self._plan(group_in_pieces(params, order, caps, num_ranks=self.num_ranks))
        return self._plan(group_by_size(params, order, caps))

    def outcomes(self) -> tuple[Outcome, ...]:
        """Returns the outcome of every method."""
        plans = {
            PER_PARAMETER: self._plan([[param] for param in self.profile.order]),
            **{name: self.plan_of_size(caps) for name, caps in FIXED_CAPS.items()},
            OPTIMAL: self.optimal_plan,
        }
        return tuple(self.outcome(method, plan) for method, plan in plans.items())

    def outcome(self, method: str, plan: Plan) -> Outcome:
        """Simulates a step under `plan`."""
        record = simulate(self.profile, plan, self.strategy, self.network.costs, self.conditions)
        return Outcome(
            method=method,
            num_buckets=len(plan.buckets),
            trace=record.trace(),
            step_us=record.step_us,
            compute_us=self.compute_us,
            limit_us=self.limit_us,
            late_rank_us=summarize([record], plan, rank=record.rank).late_rank_ms * 1e3,
        )

    @property
    def _has_shards(self) -> bool:
        return self.strategy.gather is not None

    def _plan(self, groups: Sequence[Sequence[GroupEntry]]) -> Plan:
        return plan_from_groups(self.profile.params, groups, num_ranks=self.num_ranks)
