"""How outer synchronization changes the loss.

`outer-quality` trains the demo's GPT, as the study `quality` does, with as many tokens for each variant. `outer-docstrings` is
a shorter task, whose learning rate is as high as plain data parallelism bears: there it shows what an outer momentum and a
delay do. Steps are timed over shaped links (`benchmarks.shaped`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import quality
from benchmarks.part import Part, Row, Run, Table

NAME, DOCSTRINGS = "outer-quality", "outer-docstrings"
PERIODS = (10, 30, 100)
_NUM_STEPS, _NUM_DOCSTRING_STEPS = 2000, 600
_TURNS = {"fragments": 2, "delay": 1}  # given, so that results do not depend on the clock
PLAIN = "every step"


def variants() -> dict[str, quality.Variant]:
    """The ways to train: a mean of gradients in every step, and outer synchronization of several periods."""
    return {PLAIN: quality.Variant(), **{f"every {every}": _outer(every) for every in PERIODS}}


def docstring_variants() -> dict[str, quality.Variant]:
    """As `variants`; and with the momentum of papers, as plain means, and with a delay of half a period."""
    found = {PLAIN: quality.Variant()}
    for every in PERIODS[:2]:
        found[f"every {every}"] = _outer(every)
        found[f"every {every}, momentum=0.9"] = _outer(every, fragments=1, momentum=0.9)
        found[f"every {every}, plain mean"] = _outer(every, fragments=1, lr=1.0, momentum=0.0, delay=0)
        found[f"every {every}, delay={every // 2}"] = _outer(every, fragments=1, delay=every // 2)
    return found


def _outer(every: int, **settings: Any) -> quality.Variant:
    return quality.Variant(config={"outer": {"every": every, **_TURNS, **settings}})


def measure_quality(how: Run) -> list[Row]:
    """Returns a row for each variant, number of ranks and seed."""
    num_steps, seeds = (40, quality.SEEDS[:1]) if how.is_quick else (_NUM_STEPS, quality.SEEDS)
    return quality.measure_runs(how, NAME, dict.fromkeys(quality.RANKS, variants()), seeds, quality.modules(num_steps))


def measure_docstrings(how: Run) -> list[Row]:
    """As `measure_quality`, with two replicas on the shorter task."""
    num_steps, seeds = (40, quality.SEEDS[:1]) if how.is_quick else (_NUM_DOCSTRING_STEPS, quality.SEEDS)
    return quality.measure_runs(how, DOCSTRINGS, {2: docstring_variants()}, seeds, quality.docstrings(num_steps))


def table(rows: Sequence[Row]) -> Table:
    """Returns losses on held-out text, in percent above a mean in every step: means over seeds, with their range."""
    above = quality.percent_above(rows, PLAIN)
    ranks = sorted({row["ranks"] for row in rows})
    lines = [["exchange", *(f"{number} replicas, %" for number in ranks)]]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        if variant != PLAIN:
            lines.append([variant, *(quality.with_range(above[variant, number]) for number in ranks)])
    return lines


PARTS = (
    Part(
        name=NAME,
        title=f"Outer synchronization: loss after {_NUM_STEPS} steps of a GPT over bytes on Python's modules",
        measure=measure_quality,
        table=table,
    ),
    Part(
        name=DOCSTRINGS,
        title=f"Outer synchronization: loss after {_NUM_DOCSTRING_STEPS} steps of a GPT over bytes on docstrings",
        measure=measure_docstrings,
        table=table,
    ),
)
