"""Predicts the step of a model on a network that may not exist, for several groupings of its
gradients.

Reasons: docs/design/records.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from undertow.config import SyncConfig
from undertow.errors import one_of, require
from undertow.lab.cost import NODE_LINK, Costs, costs_for
from undertow.lab.planning import Choice, choose, family
from undertow.lab.profile import Profile
from undertow.lab.simulate import Conditions, simulate, with_divided_update
from undertow.plan import (
    Groups,
    ParamSpec,
    Plan,
    SizeCaps,
    group_by_size,
    plan_from_groups,
    plan_in_order,
)
from undertow.schedule import Strategy, strategy_named
from undertow.shown import counted
from undertow.trace import StepRecord
from undertow.tune.trials import wires_of_last
from undertow.wire import AUTO, AUTO_WIRE

_MIB = 1024 * 1024
PER_PARAMETER, FIXED, PLANNED, MEASURED = (
    "per parameter",
    "25 MiB buckets",
    "planned buckets",
    "measured buckets",
)
_TORCH_CAPS = SizeCaps(cap_bytes=25.0 * _MIB, first_bytes=(1.0 * _MIB,))
_MUON, _ELEMENTWISE = "muon", ("adamw", "sgd")
_NOT_HIDDEN = ("emb", "wte", "wpe", "head")  # in names of embeddings and heads
# Processor time of a bucket if processors are the bottleneck: the host packs, launches and binds
# it, and the backend's threads copy and add. 0.2 to 0.5 ms on the machine of docs/benchmarks.md.
_HOST_US = 200.0
# Formats that the model chooses must shorten the step by this share: they cost precision.
_LEAST_GAIN = 0.01
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
    wire: str | None = None  # the format of gradients, or "auto"
    param_wire: str | None = None  # the format of gathered parameters
    # the optimizer whose update is divided over ranks; None: an update takes as in the profile
    optimizer: str | None = None

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
        require(
            self.strategy.gather is not None or self.param_wire is None,
            "--param-wire has no effect without shards.",
            where=f"--strategy {self.strategy.name}",
            remedy="Give --strategy zero1, zero2 or hybrid too.",
        )

    @classmethod
    def of(  # noqa: PLR0913  # one argument per question
        cls,
        profile: Profile,
        *,
        strategy: str | None = None,
        num_ranks: int | None = None,
        wire: str | None = None,
        param_wire: str | None = None,
        optimizer: str | None = None,
        link: str | None = None,
        per_node: int | None = None,
        node_link: str | None = None,
    ) -> Self:
        """Takes the profile's strategy, number of ranks and formats if they are None, and its
        network without a link.

        The format "none" is full width. With "muon" and shards, hidden matrices have one owner
        each. Whole parameters of the profile are cut if every rank updates everything, or if the
        optimizer is another one.
        """
        chosen = strategy_named(strategy or profile.strategy)
        known = (_MUON, *_ELEMENTWISE)
        require(
            optimizer is None or optimizer in known,
            f"optimizer {optimizer!r} cannot be simulated.",
            where="--optimizer",
            remedy=one_of(optimizer, known),
        )
        if chosen.gather is None or optimizer in _ELEMENTWISE:
            cut = (replace(spec, is_whole=False) for spec in profile.params)
            profile = replace(profile, params=tuple(cut))
        elif optimizer == _MUON:
            profile = _with_hidden_matrices_whole(profile)
        gathered = None if chosen.gather is None else profile.param_wire
        formats = SyncConfig(
            wire=_format(wire, profile.wire), param_wire=_format(param_wire, gathered)
        )
        num_ranks = num_ranks or profile.num_ranks
        if num_ranks == 1:  # nothing is sent
            formats = SyncConfig()
        return cls(
            optimizer=optimizer,
            profile=profile,
            strategy=chosen,
            num_ranks=num_ranks,
            wire=formats.wire,
            param_wire=formats.param_wire,
            link=link,
            per_node=per_node,
            node_link=node_link,
        )

    @cached_property
    def costs(self) -> Costs:
        """The costs on the network, or the profile's if no link is given.

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
        link, per_node, ranks = self.link, self._per_node, counted(self.num_ranks, "rank")
        if link is None:
            return f"as measured over {ranks}"
        if per_node is None:
            return f"{link}, {ranks}"
        inside = self.node_link or NODE_LINK
        return f"{link} between nodes of {counted(per_node, 'rank')}, {inside} inside; {ranks}"

    @property
    def _per_node(self) -> int | None:
        # If there are fewer ranks than a node has, all of them are on one node.
        per_node = self.per_node
        return None if per_node is None else min(per_node, self.num_ranks)

    @cached_property
    def choice(self) -> Choice:
        """The plan that is predicted to be the fastest, and those that it was chosen from."""
        plans = family(
            self.profile.params,
            self.profile.order,
            num_ranks=self.num_ranks,
            num_shards=self._num_shards,
            wire=None if self.wire == AUTO else self.wire,
        )
        return self._choice(list(plans))

    @property
    def compute_us(self) -> float:
        """Time of a step without communication."""
        return self.profile.compute_us

    @cached_property
    def planned(self) -> Plan:
        """The fastest plan of the family; a row of fixed sizes may be faster.

        With whole parameters, the plan that training begins with, because it stays.
        """
        if any(spec.is_whole for spec in self.profile.params):
            return self.sized(SyncConfig())
        return self.choice.best.plan

    def plans(self) -> dict[str, Plan]:
        """Returns the compared plans, by the name of their buckets."""
        profile = self.profile
        found = {}
        if profile.groups is not None and self.strategy.name == profile.strategy:
            measured = self._plan(profile.groups, profile.wires)
            if self.wire != profile.wire:
                measured = self.in_formats(measured.groups)
            found[MEASURED] = measured
        found[PER_PARAMETER] = self.in_formats(tuple((param,) for param in profile.order))
        fixed = group_by_size(profile.params, profile.order, _TORCH_CAPS)
        found[FIXED] = self.in_formats(fixed)
        found[PLANNED] = self.planned
        return found

    def step(self, plan: Plan) -> StepRecord:
        """Returns the record of a simulated step under `plan`."""
        return simulate(
            self.divided(plan),
            plan,
            self.strategy,
            self.costs,
            self.conditions,
            param_wire=self.param_wire,
        )

    def divided(self, plan: Plan) -> Profile:
        """Returns the profile with the update of the rank that has the most work under `plan`."""
        if self.optimizer is None:
            return self.profile
        return with_divided_update(self.profile, plan, self.strategy)

    def sized(self, config: SyncConfig) -> Plan:
        """Returns the plan that training begins with under `config`, in this profile's order."""
        first = plan_in_order(
            self.profile.params,
            self.profile.order,
            config,
            num_ranks=self.num_ranks,
            num_shards=self._num_shards,
            has_shards=self.strategy.gather is not None,
        )
        return self.in_formats(first.groups)

    def in_formats(self, groups: Groups) -> Plan:
        """Returns the plan of these buckets, in the formats that are predicted to be the
        fastest."""
        if self.wire != AUTO:
            return self._plan(groups, self.wire)
        return self._choice([(1.0, self._plan(groups))]).best.plan

    def _choice(self, plans: Sequence[tuple[float, Plan]]) -> Choice:
        """Returns the choice among these plans, which are in the format `wire`.

        With "auto" they are in full width. The choice is int8, in all buckets or in the last ones
        as training tries it, if a step is then 1 % faster.
        """
        found = choose(plans, self._predicted_us)
        if self.wire != AUTO:
            return found
        if self.link is None and self.profile.is_bound_by_processors:
            return found  # encoding takes more processor time
        narrow = choose(
            [
                (share, self._plan(plan.groups, wires))
                for share, plan in plans
                for wires in (AUTO_WIRE, wires_of_last(plan))
            ],
            self._predicted_us,
        )
        is_faster = narrow.best.step_us <= (1 - _LEAST_GAIN) * found.best.step_us
        return narrow if is_faster else found

    def _predicted_us(self, plan: Plan) -> float:
        return self._compared.step(plan).step_us

    @cached_property
    def _compared(self) -> Self:
        """The steps by which plans are compared: if processors are the bottleneck, each bucket
        costs more of their time than was measured."""
        is_own = self.profile.is_measured and self.conditions.launch_us is None
        if is_own and self.profile.is_bound_by_processors:
            return replace(self, conditions=replace(self.conditions, launch_us=_HOST_US))
        return self

    def _plan(self, groups: Groups, wires: str | Sequence[str | None] | None = None) -> Plan:
        return plan_from_groups(
            self.profile.params,
            groups,
            num_ranks=self.num_ranks,
            num_shards=self._num_shards,
            wires=wires,
        )

    @property
    def _num_shards(self) -> int | None:
        """The ranks of a replica; None is all ranks."""
        return None if self.strategy.crossing is None else self._per_node


def _format(asked: str | None, of_profile: str | None) -> str | None:
    """Returns the format that is asked for, by default the profile's."""
    if asked is None:
        return of_profile
    return None if asked == "none" else asked


def _with_hidden_matrices_whole(profile: Profile) -> Profile:
    """Returns the profile with an owner for each hidden matrix, as names and shapes tell them.

    A profile that has whole parameters stays as it is. Any other loses its buckets, which may hold
    matrices and other parameters.
    """
    if any(spec.is_whole for spec in profile.params):
        return profile
    params = tuple(replace(spec, is_whole=_is_hidden(spec)) for spec in profile.params)
    return replace(profile, params=params, groups=None, wires=None)


def _is_hidden(spec: ParamSpec) -> bool:
    is_matrix = len(spec.shape) == 2 and not spec.is_sparse
    return is_matrix and not any(part in spec.name.lower() for part in _NOT_HIDDEN)
