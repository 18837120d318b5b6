"""How the loss figures of fewer bytes and of outer synchronization follow from rows of runs."""

import pytest
from benchmarks import figures, outer, quality

pytestmark = pytest.mark.bench


def test_losses_of_formats_are_judged_by_the_mean_over_seeds() -> None:
    rows = [
        {"variant": name, "ranks": ranks, "seed": seed, "validation_loss": 2.0 + 0.01 * seed * (name == "int8")}
        for name in quality.VARIANTS
        for ranks in quality.RANKS
        for seed in quality.SEEDS
    ]
    judged = {it.name: (it.measured_text, it.target_text, it.verdict) for it in quality.judge(rows)}
    assert judged["2 ranks, int8: loss above that of fp32"] == ("0.50 %", "≤ 0.30 %", "NO")
    assert judged["4 ranks, bfloat16: loss above that of fp32"] == ("0.00 %", "-", "-")
    (line,) = (line for line in figures._quality(rows) if line[0] == "int8")
    assert line == ["int8", *["2.0100", "+0.50 (+0.00 to +1.00)"] * 2]


def test_losses_of_intervals_are_judged_by_the_mean_over_seeds() -> None:
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
