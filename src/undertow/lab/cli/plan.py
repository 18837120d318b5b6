"""Implements `undertow plan`; does not import torch."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from undertow.config import SyncConfig
from undertow.errors import require
from undertow.lab.planning import Candidate
from undertow.lab.what_if import WhatIf
from undertow.plan import Plan
from undertow.schedule import lower_data_parallel
from undertow.shown import counted, print_line, table_of
from undertow.tune import formats_text
from undertow.whole_file import write_whole

_COLUMNS = {
    "bucket": ("bucket", "d"),
    "parameters": ("parameters", ""),
    "count": ("count", "d"),
    "dtype": ("dtype", ""),
    "mb": ("MB", ".2f"),
}


def show_plan(
    what_if: WhatIf,
    *,
    bucket_cap_mb: float | None,
    has_schedule: bool,
    is_json: bool,
    out: Path | None = None,
) -> None:
    """Prints the buckets of a profile, the plans that they were chosen from unless there is a
    `bucket_cap_mb`, and with `has_schedule` the ops of a step; or the plan as JSON. Writes the plan
    into the file `out` too.

    Raises ConfigError for a network without costs, an impossible size, and a file that cannot be
    written.
    """
    chosen = what_if.strategy
    if bucket_cap_mb is None:
        plan = what_if.planned
    else:
        plan = what_if.sized(SyncConfig(bucket_cap_mb=bucket_cap_mb))
    if out is not None:
        require(
            out.suffix != ".gz",
            f"a plan is plain text, and '{out}' would be compressed.",
            where=f"undertow plan -o {out}",
            remedy="Name a file such as plan.json.",
        )
        write_whole(out, f"{plan.to_json()}\n".encode(), where=f"undertow plan -o {out}")
    if is_json:
        print(plan.to_json())
        return
    console = Console()
    megabytes = sum(bucket.num_bytes for bucket in plan.buckets) / 1e6
    sizes = f"parameters: {len(plan.params)}, MB: {megabytes:.2f}, buckets: {len(plan.buckets)}"
    console.print(f"{chosen.name}, ranks: {plan.num_ranks}, {sizes}", highlight=False)
    console.print(_bucket_table(plan))
    if bucket_cap_mb is None:
        print_line(console, f"Network: {what_if.network}")
        print_line(
            console,
            "The fastest plans of each number of buckets, by the predicted time of a step:",
        )
        for candidate in what_if.choice.candidates:
            print_line(console, f"  {_candidate_text(candidate, plan)}")
    if out is not None:
        print_line(console, f"The plan is in {out}: SyncConfig(plan='{out}') trains with it.")
    if has_schedule:
        schedule = lower_data_parallel(len(plan.buckets), chosen)
        # Unformatted, so that a copy of this text parses.
        console.print(
            f"\n{schedule.to_text()}", end="", markup=False, highlight=False, soft_wrap=True
        )


def _bucket_table(plan: Plan) -> Table:
    columns = dict(_COLUMNS)
    if any(plan.wires):
        columns["sent"] = ("sent, MB", ">")
    rows = []
    for bucket in plan.buckets:
        names = [plan.params[param].name for param in bucket.params]  # in packing order
        row = {
            "bucket": bucket.index,
            "parameters": " ... ".join(dict.fromkeys((names[0], names[-1]))),
            "count": len(names),
            "dtype": f"{bucket.dtype}, sparse" if bucket.is_sparse else bucket.dtype,
            "mb": bucket.num_bytes / 1e6,
            "sent": f"{bucket.wire_bytes / 1e6:.2f} {bucket.wire or ''}",
        }
        rows.append(row)
    return table_of(columns, rows)


def _candidate_text(candidate: Candidate, present: Plan) -> str:
    """Returns the line of a candidate; the present plan is marked."""
    row = f"{candidate.step_us / 1e3:.2f} ms: {counted(len(candidate.plan.buckets), 'bucket')}"
    if candidate.last_share != 1:
        row += f", the last one {candidate.last_share:g} of the others"
    row += formats_text(candidate.plan.wires)
    if present.is_alike(candidate.plan.groups, candidate.plan.wires):
        row += " (this plan)"
    return row
