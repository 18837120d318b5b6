"""Implements `undertow plan`; imports torch only for the demo's model."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from undertow.cli.simulate import json_of, print_assumptions
from undertow.config import SyncConfig
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, Plan, first_plan, plan_from_groups, plan_in_order
from undertow.profile import Profile, source_from_file
from undertow.report.comparison import print_outcomes
from undertow.report.what_if import NetworkOptions, WhatIf, require_rank
from undertow.schedule import OpKind, Strategy, lower_data_parallel, strategy_named
from undertow.shown import cell, print_line
from undertow.simulate import Conditions


def show_plan(  # noqa: PLR0913  # one argument per option
    file: Path | None,
    *,
    strategy: str | None,
    num_ranks: int | None,
    bucket_cap_mb: float | None,
    conditions: Conditions,
    is_json: bool,
    has_schedule: bool,
    network: NetworkOptions,
) -> None:
    """Prints the requested buckets, with `has_schedule` the schedule, and for a profile the time of
    a step.

    Without `file` they are of the demo's model. Raises ConfigError for options that cannot be
    combined.
    """
    require_rank(num_ranks, of="a plan is for", where="undertow plan")
    what_if = None
    source: Profile | Plan | Sequence[ParamSpec]
    if file is None:
        from undertow.demo.model import demo_parameters

        source = demo_parameters()
    else:
        source = source_from_file(file)
    if isinstance(source, Profile):
        what_if = WhatIf.of(source, strategy, num_ranks, network, conditions)
        chosen, measured = what_if.strategy, what_if.network  # refused before anything is printed
        if bucket_cap_mb is None:
            plan = what_if.planned
        else:
            config, has_shards = SyncConfig(bucket_cap_mb=bucket_cap_mb), chosen.gather is not None
            plan = plan_in_order(
                source.params,
                source.order,
                config,
                num_ranks=what_if.num_ranks,
                has_shards=has_shards,
            )
    elif network.link is not None:
        raise ConfigError(
            "--link predicts the time of a step, which needs a profile.",
            where=f"{file or 'the model of undertow demo'} has no times",
            remedy="Give a profile that save_profile() has written, or leave --link, --per-node "
            "and --node-link out.",
        )
    else:
        chosen = strategy_named(strategy)
        plan = plan_from_source(
            source,
            num_ranks=num_ranks,
            bucket_cap_mb=bucket_cap_mb,
            has_shards=chosen.gather is not None,
        )
    if is_json:
        print(
            plan.to_json()
            if what_if is None
            else json_of(what_if, {str(plan.num_ranks): [what_if.outcome("as above", plan)]})
        )
        return
    num_nodes = (
        None
        if network.per_node is None
        else plan.num_ranks // min(network.per_node, plan.num_ranks)
    )
    console = Console()
    megabytes = sum(bucket.num_bytes for bucket in plan.buckets) / 1e6
    sizes = f"parameters: {len(plan.params)}, MB: {megabytes:.2f}, buckets: {len(plan.buckets)}"
    console.print(f"{chosen.name}, ranks: {plan.num_ranks}, {sizes}", highlight=False)
    console.print(_bucket_table(plan, chosen, num_nodes=num_nodes))
    if has_schedule:
        schedule = lower_data_parallel(len(plan.buckets), chosen, overlap=conditions.overlap)
        # Unformatted, so that a copy of this text parses.
        console.print(
            f"\n{schedule.to_text()}", end="", markup=False, highlight=False, soft_wrap=True
        )
    if what_if is not None:
        console.print()
        print_outcomes([what_if.outcome("as above", plan)], console)
        print_line(console, f"Network: {measured.source}")
        print_assumptions(what_if, console)


def plan_from_source(
    source: Plan | Sequence[ParamSpec],
    *,
    num_ranks: int | None,
    bucket_cap_mb: float | None,
    has_shards: bool,
) -> Plan:
    """Returns the plan of parameters without a profile, or the saved plan.

    A saved plan keeps its buckets, or with `bucket_cap_mb` only the order of its parameters.
    Without `num_ranks` it keeps its number of ranks; parameters are planned for two.
    """
    config = SyncConfig(order="reverse", bucket_cap_mb=bucket_cap_mb)
    if not isinstance(source, Plan):
        return first_plan(
            source, config, num_ranks=2 if num_ranks is None else num_ranks, has_shards=has_shards
        )
    num_ranks = source.num_ranks if num_ranks is None else num_ranks
    if bucket_cap_mb is None:
        return plan_from_groups(source.params, source.groups, num_ranks=num_ranks)
    order = [param for bucket in source.buckets for param in bucket.params]
    return plan_in_order(source.params, order, config, num_ranks=num_ranks, has_shards=has_shards)


def _bucket_table(plan: Plan, strategy: Strategy, *, num_nodes: int | None) -> Table:
    """Returns a table of one line per bucket.

    `num_nodes` is for a strategy over two axes, whose shards lie within one node; without it sizes
    of shards are left out.
    """
    num_replicas = 1 if strategy.crossing is None else num_nodes
    has_shards = strategy.reduction is OpKind.REDUCE_SCATTER and num_replicas is not None
    table = Table(
        Column("bucket", justify="right"),
        Column("parameters", overflow="fold"),
        Column("count", justify="right"),
        "dtype",
        *(
            Column(name, justify="right")
            for name in ("MB", *(["MB per shard"] if has_shards else []))
        ),
    )
    for bucket in plan.buckets:
        names = [plan.params[param].name for param in bucket.params]  # in packing order
        shard_bytes = bucket.shard_numel * (num_replicas or 1) * bucket.itemsize
        table.add_row(
            str(bucket.index),
            cell(" ... ".join(dict.fromkeys((*names[:1], *names[-1:])))),
            str(len(bucket.slots)),
            cell(f"{bucket.dtype}, sparse" if bucket.is_sparse else bucket.dtype),
            f"{bucket.num_bytes / 1e6:.2f}",
            *([f"{shard_bytes / 1e6:.2f}"] if has_shards else []),
        )
    return table
