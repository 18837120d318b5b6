"""How the tables of losses, with fewer bytes and with outer synchronization, follow from rows of runs."""

import pytest
from benchmarks import outer, quality

pytestmark = pytest.mark.bench


def test_losses_of_formats_are_means_over_seeds() -> None:
    rows = [
        {"variant": name, "ranks": ranks, "seed": seed, "validation_loss": 2.0 + 0.01 * seed * (name == "int8")}
        for name in quality.VARIANTS
        for ranks in quality.RANKS
        for seed in quality.SEEDS
    ]
    lines = {line[0]: line[1:] for line in quality.table(rows)}
    assert lines["sent as"] == ["loss, 2 ranks", "above fp32, %", "loss, 4 ranks", "above fp32, %"]
    assert lines["int8"] == ["2.0100", "+0.50 (+0.00 to +1.00)"] * 2
    assert lines["bfloat16"] == ["2.0000", "+0.00 (+0.00 to +0.00)"] * 2


def test_losses_of_intervals_are_percents_above_a_mean_in_every_step() -> None:
    rows = [
        {"variant": name, "ranks": ranks, "seed": seed, "validation_loss": 2.0 + 0.05 * seed * (name == "every 30")}
        for ranks in quality.RANKS
        for name in outer.variants()
        for seed in quality.SEEDS
    ]
    assert outer.table(rows) == [
        ["exchange", "2 replicas, %", "4 replicas, %"],
        ["every 10", *["+0.00 (+0.00 to +0.00)"] * 2],
        ["every 30", *["+2.50 (+0.00 to +5.00)"] * 2],
        ["every 100", *["+0.00 (+0.00 to +0.00)"] * 2],
    ]
