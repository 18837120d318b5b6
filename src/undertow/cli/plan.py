"""Implements `undertow plan`; imports torch only for the demo's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from undertow.cli.network import NetworkOptions
from undertow.cli.what_if import WhatIf
from undertow.config import SyncConfig
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, Plan, first_plan, plan_from_groups, plan_in_order
from undertow.profile import Profile
from undertow.profile.profile import source_from_file
from undertow.report.comparison import print_outcomes
from undertow.report.plan import print_plan
from undertow.report.shown import print_line
from undertow.schedule import Schedule, Strategy, lower_accumulation, lower_data_parallel, strategy_named, verify
from undertow.simulate import Conditions

__all__ = ["PlanRequest", "plan_from_source", "show_plan"]

_NUM_RANKS = 2  # of a plan if the number of ranks is not given


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of the command. Raises ConfigError for options that cannot be combined."""

    file: Path | None
    strategy: str | None  # None: the profile's strategy, else ddp
    num_ranks: int | None
    bucket_cap_mb: float | None
    has_overlap: bool
    is_accumulation: bool
    network: NetworkOptions

    def __post_init__(self) -> None:
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigError(
                f"a plan is for one rank or more, got --ranks {self.num_ranks}.",
                where="undertow plan",
                remedy="Give one or more, or leave it out.",
            )
        if self.is_accumulation and not self.has_overlap:
            raise ConfigError(
                "--accumulation and --no-overlap cannot go together.",
                where="undertow plan",
                remedy="Leave one of them out: a backward that only accumulates has one schedule.",
            )


def show_plan(request: PlanRequest) -> None:
    """Prints the requested buckets and schedule, and for a profile the time of a step."""
    source = _demo_parameters() if request.file is None else source_from_file(request.file)
    if isinstance(source, Profile):
        _show_plan_of_profile(request, source)
        return
    strategy = strategy_named(request.strategy)
    if request.network.link is not None:
        raise ConfigError(
            "--link says what a step takes, which needs a profile.",
            where=f"{request.file or 'the model of undertow demo'} has no times",
            remedy="Give a profile that save_profile() has written, or leave --link, --per-node and --node-link out.",
        )
    plan = plan_from_source(
        source, num_ranks=request.num_ranks, bucket_cap_mb=request.bucket_cap_mb, splits=strategy.gather is not None
    )
    print_plan(plan, strategy, _schedule(plan, strategy, request))


def plan_from_source(
    source: Plan | Sequence[ParamSpec], *, num_ranks: int | None, bucket_cap_mb: float | None, splits: bool
) -> Plan:
    """Returns the plan of parameters without a profile, or the saved plan.

    A saved plan keeps its buckets, or with `bucket_cap_mb` only the order of its parameters. Without `num_ranks` it keeps its
    number of ranks; parameters are planned for two. Only with `splits`, for sharded gradients, may a large parameter be spread
    over several buckets.
    """
    config = SyncConfig(order="reverse", bucket_cap_mb=bucket_cap_mb)
    if not isinstance(source, Plan):
        return first_plan(source, config, num_ranks=_NUM_RANKS if num_ranks is None else num_ranks, splits=splits)
    num_ranks = source.num_ranks if num_ranks is None else num_ranks
    if bucket_cap_mb is None and (splits or not source.split_params):
        return plan_from_groups(source.params, source.groups, num_ranks=num_ranks)
    order = tuple(dict.fromkeys(param for bucket in source.buckets for param in bucket.params))
    return plan_in_order(source.params, order, config, num_ranks=num_ranks, splits=splits)


def _show_plan_of_profile(request: PlanRequest, profile: Profile) -> None:
    what_if = WhatIf(
        profile=profile,
        strategy=strategy_named(profile.strategy if request.strategy is None else request.strategy),
        num_ranks=profile.num_ranks if request.num_ranks is None else request.num_ranks,
        options=request.network,
        conditions=Conditions(overlap=request.has_overlap),
    )
    num_ranks, strategy, per_node = what_if.num_ranks, what_if.strategy, request.network.per_node
    network = what_if.network
    if request.bucket_cap_mb is None:
        plan = what_if.optimal_plan
    else:
        config = SyncConfig(bucket_cap_mb=request.bucket_cap_mb)
        plan = plan_in_order(profile.params, profile.order, config, num_ranks=num_ranks, splits=strategy.gather is not None)
    num_nodes = None if per_node is None else num_ranks // min(per_node, num_ranks)
    print_plan(plan, strategy, _schedule(plan, strategy, request), num_nodes=num_nodes)
    if request.is_accumulation:
        return
    console = Console()
    console.print()
    print_outcomes([what_if.outcome("as above", plan)], console)
    print_line(console, f"Network: {network.source}")


def _schedule(plan: Plan, strategy: Strategy, request: PlanRequest) -> Schedule:
    num_buckets = len(plan.buckets)
    if request.is_accumulation:
        schedule = lower_accumulation(num_buckets, strategy)
    else:
        schedule = lower_data_parallel(num_buckets, strategy, overlap=request.has_overlap)
    return verify(schedule, strategy, num_buckets=num_buckets)


def _demo_parameters() -> Sequence[ParamSpec]:
    from undertow.demo.model import demo_parameters

    return demo_parameters()
