"""How fewer bytes change the loss: rows, figures and tables; a run of each variant that takes a moment."""

from pathlib import Path

import pytest
from benchmarks import figures, quality
from benchmarks.ranks import run_ranks

pytestmark = pytest.mark.bench


def test_losses_are_judged_by_the_mean_over_seeds() -> None:
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


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", ["int8, gathers int8 (zero1)", "PowerSGD, rank 4"])
def test_every_variant_learns(name: str) -> None:
    losses = run_ranks(quality.measure_rank, 2, quality.VARIANTS[name], 0, 20)
    assert 3.0 < losses["validation_loss"] < 4.5  # ln 256, that of a guess, is 5.5


def test_the_study_goes_on_with_the_runs_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(quality, "run_ranks", lambda *_: {"train_loss": 2.0, "validation_loss": 2.0})
    rows = quality.measure(tmp_path, False, True, told.append)
    (tmp_path / "quality.jsonl").write_text("".join((tmp_path / "quality.jsonl").read_text().splitlines(keepends=True)[1:]))
    assert quality.measure(tmp_path, True, True, told.append) == rows
    assert told[len(rows) :] == [told[0]]
