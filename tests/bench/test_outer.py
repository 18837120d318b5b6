"""How outer synchronization changes the loss: figures from rows, and a run that takes a moment."""

from pathlib import Path

import pytest
from benchmarks import outer, quality
from benchmarks.ranks import run_ranks

pytestmark = pytest.mark.bench


def test_losses_are_judged_by_the_mean_over_seeds() -> None:
    rows = [
        {"variant": name, "ranks": ranks, "seed": seed, "validation_loss": 2.0 + 0.05 * seed * (name == "every 30")}
        for ranks in quality.RANKS
        for name in outer.variants()
        for seed in quality.SEEDS
    ]
    judged = {it.name: (it.measured_text, it.verdict) for it in outer.judge_quality(rows)}
    assert judged["2 replicas, every 30: loss above every step"] == ("2.50 %", "NO")
    assert judged["4 replicas, every 100: loss above every step"] == ("0.00 %", "-")


def test_the_shorter_task_is_judged_by_its_shorter_interval() -> None:
    rows = [
        {"variant": name, "ranks": 2, "seed": seed, "validation_loss": 2.0 + 0.05 * (name == "every 10")}
        for name in outer.docstring_variants()
        for seed in quality.SEEDS
    ]
    judged = {it.name: (it.measured_text, it.verdict) for it in outer.judge_docstrings(rows)}
    assert judged["2 replicas, every 10: loss above every step"] == ("2.50 %", "NO")
    assert judged["2 replicas, every 10, momentum=0.9: loss above every step"] == ("0.00 %", "-")


@pytest.mark.usefixtures("forked")
def test_a_variant_learns_and_is_evaluated_with_the_global_parameters() -> None:
    losses = run_ranks(quality.measure_rank, 2, outer.variants()["every 10"], 0, 30)
    assert 3.0 < losses["validation_loss"] < 4.7  # ln 256, that of a guess, is 5.5


def test_the_study_goes_on_with_the_runs_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(quality, "run_ranks", lambda *_: {"train_loss": 2.0, "validation_loss": 2.0})
    rows = outer.measure_quality(tmp_path, False, True, told.append)
    assert outer.measure_quality(tmp_path, True, True, told.append) == rows
    assert len(told) == len(rows) == 8
