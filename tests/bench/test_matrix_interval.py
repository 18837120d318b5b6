"""Ratios of two systems with their intervals, of turns that are drawn."""

from typing import Any

import numpy as np
import pytest
from benchmarks.matrix.catalog import SYSTEMS
from benchmarks.matrix.interval import LEAST_TURNS, Ratio, ratio_of
from benchmarks.matrix.rows import rows_of_cell

from bench.cells import played, rank_result


def row(*turns_ms: float, runs: tuple[int, ...] = (0,)) -> dict[str, Any]:
    return {"step_ms": {"median": float(np.median(turns_ms))}, "turns_ms": list(turns_ms), "runs": list(runs)}


@pytest.mark.deep
@pytest.mark.parametrize("num_turns", [LEAST_TURNS, 8, 20])
@pytest.mark.parametrize("other_run", [0, 1], ids=["in turn", "in runs that do not differ"])
def test_most_intervals_contain_the_true_ratio(num_turns: int, other_run: int) -> None:
    generator, true, num_worlds = np.random.default_rng(1), 1.05, 300
    drift = np.linspace(1.0, 1.0 if other_run else 1.5, num_turns)  # both become slower
    covered = 0
    for _ in range(num_worlds):
        ours, theirs = (drift * time * generator.lognormal(sigma=0.02, size=num_turns) for time in (true * 100, 100))
        low, high = ratio_of(row(*ours), row(*theirs, runs=(other_run,))).interval or (np.inf, np.inf)
        covered += low <= true <= high
    # 95 % of the intervals, and less for few turns, whose range is narrow; three standard errors of 300 draws are 4 %.
    assert covered / num_worlds >= 0.87


def test_a_drift_that_slows_both_is_not_in_the_interval_of_pairs() -> None:
    slower = np.linspace(100, 200, 10)
    in_turn = ratio_of(row(*(1.05 * slower)), row(*slower))
    apart = ratio_of(row(*(1.05 * slower)), row(*slower, runs=(1,)))
    assert in_turn.interval == pytest.approx((1.05, 1.05))
    assert apart.interval is not None
    assert apart.interval[0] < 0.9
    assert (in_turn.verdict, apart.verdict, apart.remark) == ("lost", "undecided", "another run")


def test_turns_of_a_slow_system_are_paired_from_the_first() -> None:
    assert ratio_of(row(*[110] * 6, 500, 500), row(*[100] * 6)) == Ratio(value=1.1, interval=(1.1, 1.1))


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"),
    [
        (row(*[100] * 6), row(*[100] * 6), "1.00 (1.00 to 1.00) level"),
        (row(*[90] * 6), row(*[100] * 6), "0.90 (0.90 to 0.90) won"),
        (row(*[104] * 6), row(*[100] * 6, runs=(1,)), "1.04 (1.04 to 1.04, another run) lost"),
        (row(*[110] * 5), row(*[100] * 6), "1.10 (5 turns)"),
        ({"step_ms": {"median": 110.0}}, row(*[100] * 6), "1.10 (not in turn)"),
    ],
    ids=["no spread", "faster", "another run", "too few", "an older record"],
)
def test_a_ratio_is_shown_with_its_interval_and_verdict(ours: dict[str, Any], theirs: dict[str, Any], shown: str) -> None:
    assert str(ratio_of(ours, theirs)) == shown


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((1.031, 1.2), "lost"),
        ((1.03, 1.2), "undecided"),
        ((0.9, 1.031), "undecided"),
        ((0.9, 1.03), "level"),
        ((0.97, 0.98), "level"),
        ((0.9, 0.969), "won"),
    ],
)
def test_the_verdict_follows_from_the_interval_alone(interval: tuple[float, float], verdict: str) -> None:
    assert Ratio(value=1.5, interval=interval).verdict == verdict


def test_a_row_has_the_medians_of_its_turns_on_the_slowest_rank_and_its_run() -> None:
    def ranks(*steps_ms: float) -> list[dict[str, Any]]:
        of_ours = played([0.0] * 4, step_s=[ms / 1e3 for ms in steps_ms], cpu_s=[0.002] * 2)
        return [rank_result({"ours": of_ours}, 4), rank_result({"ours": {**of_ours, "step_s": [0.1] * 4}}, 4)]

    bare = [rank_result({}, 4)] * 2
    (found,) = rows_of_cell([SYSTEMS["ours"]], [bare, ranks(90, 110, 120, 130)], {}, {})
    assert (found["turns_ms"], found["runs"]) == ([105.0, 125.0], [1])
