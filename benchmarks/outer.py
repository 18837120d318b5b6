"""How outer synchronization changes the loss: trains the demo's GPT, as the study `quality` does, with as many tokens for each
variant. Its steps are timed over shaped links (`benchmarks.shaped`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks import quality
from benchmarks.figure import Figure, Part, Relation, Row, Target, Tell

NAME = "outer-quality"
PERIODS = (10, 30, 100)
_NUM_STEPS = 2000
_RATES_OF = {2: 0.6, 4: 0.6}  # outer learning rates, by replicas (arXiv 2503.09799)
_MOST_LOSS = 2.0  # percent above a mean in every step, at most: two replicas, every 30 steps
PLAIN = "every step"


def part(out: Path, *, resumes: bool) -> Part:
    """The study; it keeps its finished runs in `out`."""
    return Part(
        name=NAME,
        title=f"Outer synchronization: loss after {_NUM_STEPS} steps of a GPT over bytes on Python's modules",
        measure=partial(measure_quality, out, resumes),
        judge=judge_quality,
    )


def variants(num_ranks: int) -> dict[str, quality.Variant]:
    """The ways to train: a mean of gradients in every step, and outer synchronization of several periods."""
    found = {PLAIN: quality.Variant()}
    for every in PERIODS:
        outer = {"every": every, "lr": _RATES_OF[num_ranks], "fragments": 2, "delay": 1}
        found[f"every {every}"] = quality.Variant(config={"outer": outer})
    return found


def measure_quality(out: Path, resumes: bool, is_quick: bool, tell: Tell) -> list[Row]:
    """A row for each variant, number of ranks and seed; finished runs are kept in a file."""
    num_steps, seeds = (40, quality.SEEDS[:1]) if is_quick else (_NUM_STEPS, quality.SEEDS)
    of_ranks = {ranks: variants(ranks) for ranks in quality.RANKS}
    return quality.measure_runs(out / f"{NAME}.jsonl", resumes, of_ranks, seeds, num_steps, tell)


def judge_quality(rows: Sequence[Row]) -> list[Figure]:
    """How far each variant's loss on held-out text is above a mean in every step, as a mean over seeds."""
    above = quality.percent_above(rows, PLAIN)
    figures = []
    for ranks in quality.RANKS:
        for name in variants(ranks):
            if name == PLAIN:
                continue
            is_judged = (ranks, name) == (2, "every 30")
            target = Target(relation=Relation.AT_MOST, bound=_MOST_LOSS) if is_judged else None
            title = f"{ranks} replicas, {name}: loss above {PLAIN}"
            figures.append(Figure(name=title, measured=mean(above[name, ranks]), unit="%", target=target))
    return figures
