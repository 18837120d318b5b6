"""Prints a plan as a table in the terminal, and its schedule as text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from undertow.plan import Bucket, Plan
from undertow.report.shown import cell
from undertow.schedule import OpKind, Schedule, Strategy

__all__ = ["print_plan"]


def print_plan(
    plan: Plan, strategy: Strategy, schedule: Schedule, console: Console | None = None, *, num_nodes: int | None = None
) -> None:
    """Prints totals, then one line per bucket, then one line per op of `schedule`.

    `num_nodes` is for a strategy over two axes, whose shards lie within one node; without it sizes of shards are left out.
    """
    console = Console() if console is None else console
    megabytes = sum(bucket.num_bytes for bucket in plan.buckets) / 1e6
    sizes = f"parameters: {len(plan.params)}, MB: {megabytes:.2f}, buckets: {len(plan.buckets)}"
    console.print(f"{strategy.name}, ranks: {plan.num_ranks}, {sizes}", highlight=False)
    console.print(_bucket_table(plan, strategy, num_nodes=num_nodes))
    console.print()
    # Unformatted, so that a copy of this text parses.
    console.print(schedule.to_text(), end="", markup=False, highlight=False, soft_wrap=True)


def _bucket_table(plan: Plan, strategy: Strategy, *, num_nodes: int | None) -> Table:
    table = Table()
    table.add_column("bucket", justify="right")
    table.add_column("parameters", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("dtype")
    table.add_column("MB", justify="right")
    num_replicas = 1 if strategy.crossing is None else num_nodes
    is_sharded = strategy.reduction is OpKind.REDUCE_SCATTER and num_replicas is not None
    if is_sharded:
        table.add_column("MB per shard", justify="right")
    for bucket in plan.buckets:
        shard = [f"{bucket.shard_numel * (num_replicas or 1) * bucket.itemsize / 1e6:.2f}"] if is_sharded else []
        table.add_row(*_cells(bucket, plan), *shard)
    return table


def _cells(bucket: Bucket, plan: Plan) -> tuple[str | Text, ...]:
    dtype = f"{bucket.dtype}, sparse" if bucket.is_sparse else bucket.dtype
    return str(bucket.index), cell(_names(bucket, plan)), str(len(bucket.slots)), cell(dtype), f"{bucket.num_bytes / 1e6:.2f}"


def _names(bucket: Bucket, plan: Plan) -> str:
    """Returns the first and the last name in packing order."""
    names = [plan.params[param].name for param in bucket.params]
    return " ... ".join(dict.fromkeys((*names[:1], *names[-1:])))
