"""How outer synchronization changes the loss.

`outer-quality` trains the demo's GPT, as the study `quality` does, with as many tokens for each variant. `outer-docstrings` is
a shorter task, whose learning rate is as high as plain data parallelism bears: there it shows what an outer momentum and a
delay do. Steps are timed over shaped links (`benchmarks.shaped`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import quality
from benchmarks.figure import Figure, Part, Row, Tell

NAME, DOCSTRINGS = "outer-quality", "outer-docstrings"
PERIODS = (10, 30, 100)
_NUM_STEPS, _NUM_DOCSTRING_STEPS = 2000, 600
_TURNS = {"fragments": 2, "delay": 1}  # given, so that results do not depend on the clock
_MOST_LOSS = 2.0  # percent above a mean in every step, at most, with two replicas
PLAIN = "every step"


def parts(out: Path, *, resumes: bool) -> tuple[Part, Part]:
    """The studies; they keep their finished runs in `out`."""
    study = Part(
        name=NAME,
        title=f"Outer synchronization: loss after {_NUM_STEPS} steps of a GPT over bytes on Python's modules",
        measure=partial(measure_quality, out, resumes),
        judge=judge_quality,
    )
    short = Part(
        name=DOCSTRINGS,
        title=f"Outer synchronization: loss after {_NUM_DOCSTRING_STEPS} steps of a GPT over bytes on docstrings",
        measure=partial(measure_docstrings, out, resumes),
        judge=judge_docstrings,
    )
    return study, short


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


def measure_quality(out: Path, resumes: bool, is_quick: bool, tell: Tell) -> list[Row]:
    """A row for each variant, number of ranks and seed; finished runs are kept in a file."""
    num_steps, seeds = (40, quality.SEEDS[:1]) if is_quick else (_NUM_STEPS, quality.SEEDS)
    of_ranks = dict.fromkeys(quality.RANKS, variants())
    return quality.measure_runs(out / f"{NAME}.jsonl", resumes, of_ranks, seeds, quality.modules(num_steps), tell)


def measure_docstrings(out: Path, resumes: bool, is_quick: bool, tell: Tell) -> list[Row]:
    """As `measure_quality`, with two replicas on the shorter task."""
    num_steps, seeds = (40, quality.SEEDS[:1]) if is_quick else (_NUM_DOCSTRING_STEPS, quality.SEEDS)
    of_ranks = {2: docstring_variants()}
    kept = out / f"{DOCSTRINGS}.jsonl"
    return quality.measure_runs(kept, resumes, of_ranks, seeds, quality.docstrings(num_steps), tell)


def judge_quality(rows: Sequence[Row]) -> list[Figure]:
    """How far each variant's loss on held-out text is above a mean in every step, as a mean over seeds."""
    return _judged(rows, dict.fromkeys(quality.RANKS, variants()), bounded=("every 30",))


def judge_docstrings(rows: Sequence[Row]) -> list[Figure]:
    """As `judge_quality`."""
    return _judged(rows, {2: docstring_variants()}, bounded=("every 10",))


def _judged(rows: Sequence[Row], of_ranks: Mapping[int, Mapping[str, Any]], *, bounded: Sequence[str]) -> list[Figure]:
    above = quality.percent_above(rows, PLAIN)
    figures = []
    for ranks, names in of_ranks.items():
        for name in names:
            if name == PLAIN:
                continue
            is_judged = ranks == 2 and name in bounded
            most = _MOST_LOSS if is_judged else None
            title = f"{ranks} replicas, {name}: loss above {PLAIN}"
            figures.append(Figure(name=title, measured=mean(above[name, ranks]), unit="%", at_most=most))
    return figures
