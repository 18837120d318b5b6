"""Prints the reasons for a plan in the terminal."""

from __future__ import annotations

from rich.console import Console

from undertow.report.shown import print_line
from undertow.tune import Explanation
from undertow.tune.explain import num_buckets_text

__all__ = ["print_explanation"]


def print_explanation(explanation: Explanation, console: Console | None = None) -> None:
    """Prints the plan, its times and their lower bound, the effect of other plans, and the decisions so far."""
    console = Console() if console is None else console
    for line in _lines(explanation):
        print_line(console, line)


def _lines(it: Explanation) -> list[str]:
    sizes = ", ".join(f"{megabytes:.2f}" for megabytes in it.bucket_mb)
    lines = [f"The plan: {num_buckets_text(len(it.bucket_mb))} of {sizes} MB, {it.strategy}, {it.num_ranks} ranks", f"  {it.why}"]
    times = (
        ("achieved", it.achieved_ms),
        ("predicted", it.predicted_ms),
        ("the best plan", it.best_ms),
        ("limit", it.limit_ms),
    )
    known = [f"{name} {milliseconds:.2f}" for name, milliseconds in times if milliseconds is not None]
    if known:
        lines += [f"Until gradients are through, ms since the step began: {', '.join(known)}"]
    sections = (("Other plans:", it.alternatives), ("The network, as measured:", it.network), ("Decisions:", it.decisions))
    for title, rows in sections:
        lines += [title, *(f"  {row}" for row in rows)] if rows else []
    return lines
