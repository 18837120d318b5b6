"""Prints a report as tables in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from undertow.report.shown import cell
from undertow.trace import BucketReport, StepReport

_NUM_NAMES = 3


def print_report(report: StepReport, console: Console | None = None) -> None:
    """Prints where the time of a step went, one line per bucket, and one per gather under a sharded optimizer."""
    console = Console() if console is None else console
    if report.num_steps == 0:
        console.print("Undertow: no step recorded yet; run a training step, and leave record on.")
        return
    console.print(_step_table(report))
    if report.buckets:
        console.print(_bucket_table(report))
    if report.gathers:
        console.print(_gather_table(report))
    if report.is_one_graph:
        console.print(
            "The model is compiled as one graph, for none of its buckets has 1 MiB: its gradients come all at once.\n"
            "Set bucket_cap_mb to 1 or more, or compile its layers one by one."
        )
    if report.num_skipped:
        console.print(f"Optimizer steps skipped so far, for gradients were not finite: {report.num_skipped}")


def _step_table(report: StepReport) -> Table:
    table = Table(title=f"Where a step goes: rank {report.rank}, median of {report.num_steps} steps", title_justify="left")
    table.add_column("")
    table.add_column("ms", justify="right")
    table.add_column("")
    for name, milliseconds, note in _step_rows(report):
        table.add_row(name, f"{milliseconds:.1f}", note)
    return table


def _step_rows(report: StepReport) -> list[tuple[str, float, str]]:
    overlap = "no communication" if report.overlap is None else f"{report.overlap:.0%} hidden"
    rows = [
        ("step", report.step_ms, ""),
        ("forward", report.forward_ms, ""),
        ("backward", report.backward_ms, ""),
        ("communication", report.communication_ms, overlap),
    ]
    if report.overlap is None:
        return rows
    slowest = "" if report.slowest_rank is None else f"slowest is rank {report.slowest_rank}"
    achieved = f"achieved / limit {report.synchronized_ms / report.limit_ms:.3f}" if report.limit_ms > 0 else ""
    return [
        *rows,
        *_gather_rows(report),
        ("  hidden", report.hidden_ms, ""),
        ("  exposed", report.exposed_ms, ""),
        ("    the network", report.wire_ms, ""),
        ("    a late rank", report.late_rank_ms, slowest),
        ("synchronized after", report.synchronized_ms, achieved),
        ("  limit", report.limit_ms, "for these buckets and ready times"),
        *_step_limit_rows(report),
    ]


def _step_limit_rows(report: StepReport) -> list[tuple[str, float, str]]:
    if report.step_limit_ms == 0:
        return []
    return [("limit of the step", report.step_limit_ms, f"achieved / limit {report.step_ms / report.step_limit_ms:.3f}")]


def _gather_rows(report: StepReport) -> list[tuple[str, float, str]]:
    if report.gather_overlap is None:
        return []
    num_bytes = sum(gather.num_bytes for gather in report.gathers)
    return [("  of it gathers", report.gather_ms, f"{num_bytes / 1e6:.1f} MB, {report.gather_overlap:.0%} hidden")]


def _bucket_table(report: StepReport) -> Table:
    of_gradients = " of gradients" if report.gathers else ""
    table = Table(title=f"Buckets{of_gradients}, ms since the step began", title_justify="left")
    # Without compression the trailer makes sent bytes exceed the gradients, which is not of interest; a hook's bytes are not
    # known.
    is_compressed = any(0 < bucket.sent_bytes < bucket.num_bytes for bucket in report.buckets)
    for name in ("bucket", "MB", *(["sent"] if is_compressed else []), "ready", "launched", "done", "wire", "waited"):
        table.add_column(name, justify="right")
    table.add_column("parameters", overflow="fold")
    worst = report.worst_bucket
    for bucket in report.buckets:
        cells = (bucket.ready_ms, bucket.launched_ms, bucket.done_ms, bucket.wire_ms, bucket.waited_ms)
        table.add_row(
            str(bucket.index),
            f"{bucket.num_bytes / 1e6:.2f}",
            *([f"{bucket.sent_bytes / 1e6:.2f}"] if is_compressed else []),
            *(f"{cell:.1f}" for cell in cells),
            cell(_names(bucket)),
            style="bold" if bucket is worst else None,
        )
    return table


def _gather_table(report: StepReport) -> Table:
    table = Table(title="Gathers of parameters, ms since the step began", title_justify="left")
    for name in ("bucket", "MB", "launched", "done", "wire", "waited"):
        table.add_column(name, justify="right")
    worst = report.worst_bucket
    for gather in report.gathers:
        cells = (gather.launched_ms, gather.done_ms, gather.wire_ms, gather.waited_ms)
        table.add_row(
            str(gather.bucket),
            f"{gather.num_bytes / 1e6:.2f}",
            *(f"{cell:.1f}" for cell in cells),
            style="bold" if worst is not None and gather.bucket == worst.index else None,
        )
    return table


def _names(bucket: BucketReport) -> str:
    shown = ", ".join(bucket.params[:_NUM_NAMES])
    more = len(bucket.params) - _NUM_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
