"""Plans that are tried on real steps: which ones, in which order, and by which rule one is taken."""

import json
import random
from collections.abc import Callable
from itertools import cycle
from statistics import median

import pytest

from support.levels import some
from support.project import ROOT
from undertow.engine.trying import NUM_STEPS_COUNTED
from undertow.plan import ParamSpec, Plan, plan_from_groups
from undertow.tune.trials import MOST_CANDIDATES, Trials, Verdict, verdict

RECORDINGS = ROOT / "tests" / "golden" / "step_times"  # README.md there says of what
NUM_DRAWS = 100
MIB = 2**20


def params(num: int, *, numel: int = 1000, dtype: str = "float32") -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(name=f"p{index}", shape=(numel,), dtype=dtype, itemsize=4) for index in range(num))


def trials_of(num_params: int, num_buckets: int, *, numel: int = 1000, wires: str | None = None, **settings: bool) -> Trials:
    """Trials that begin with equal buckets, of which the last one is whole."""
    specs, size = params(num_params, numel=numel), num_params // num_buckets
    groups = [range(begin, begin + size) for begin in range(0, num_params, size)]
    present = plan_from_groups(specs, groups, num_ranks=2, wires=wires)
    return Trials(present, range(num_params), **settings)


def run(trials: Trials, time_of: Callable[[Plan], float], *, most_windows: int = 1000) -> int:
    """Runs windows until trials are over; returns how many."""
    num_windows = 0
    while not trials.are_over and num_windows < most_windows:
        trials.window_ends(time_of(trials.plan))
        num_windows += 1
    return num_windows


def sizes_tried(trials: Trials) -> list[tuple[int, bool]]:
    """Of each candidate, the number of buckets, and whether it was taken."""
    return [(len(trial.plan.buckets), trial.verdict is Verdict.TAKEN) for trial in trials.tried]


# The rule


@pytest.mark.parametrize(
    ("present", "candidate", "expected"),
    [
        ([100.0], [], Verdict.GO_ON),
        ([100.0], [111.0], Verdict.KEPT),  # hopeless
        ([100.0], [109.0], Verdict.GO_ON),
        ([100.0, 100.0], [90.0], Verdict.GO_ON),  # one pair has no spread
        ([100.0] * 4, [90.0] * 3, Verdict.GO_ON),  # nor do three show much
        ([100.0] * 5, [90.0] * 4, Verdict.TAKEN),
        ([100.0] * 5, [90.0] * 5, Verdict.GO_ON),  # the last pair lacks a neighbor
        ([100.0] * 3, [98.5] * 2, Verdict.KEPT),  # 1.5 % is too little
        ([100.0] * 5, [97.0] * 4, Verdict.GO_ON),
        ([100.0] * 6, [97.0] * 5, Verdict.TAKEN),
        ([100.0, 130.0, 160.0, 190.0, 220.0], [92.0, 116.0, 140.0, 164.0], Verdict.TAKEN),  # a machine that becomes slower
        ([100.0, 140.0, 100.0, 140.0], [108.0, 108.0, 90.0], Verdict.GO_ON),  # too wild to know
        ([100.0, 140.0] * 8 + [100.0], [95.0, 130.0] * 8, Verdict.KEPT),  # sixteen pairs are the most
    ],
)
def test_the_rule(present: list[float], candidate: list[float], expected: Verdict) -> None:
    assert verdict(present, candidate) is expected


def steps_from(name: str, seed: int) -> "cycle[float]":
    times = json.loads((RECORDINGS / f"{name}.json").read_text())
    begin = random.Random(seed).randrange(len(times))
    return cycle(times[begin:] + times[:begin])


def window(steps: "cycle[float]", factor: float) -> float:
    next(steps)  # the one that ends with the first round under a plan does not count
    return median(next(steps) for _ in range(NUM_STEPS_COUNTED)) * factor


def num_moved(name: str, factor: float) -> int:
    """Of 100 runs over recorded steps, the number that leave the first plan, if every other plan is faster by `factor`."""
    moved = 0
    for seed in range(NUM_DRAWS):
        trials, steps = trials_of(64, 8), steps_from(name, seed)
        first = trials.present
        run(trials, lambda plan: window(steps, 1.0 if plan is first else factor))  # noqa: B023
        moved += trials.present is not first
    return moved


# The table of docs/design/tuning.md.
RECORDED = {
    ("quiet", 1.0): (0, 1),
    ("busy", 1.0): (0, 1),
    ("variable", 1.0): (0, 1),
    ("quiet", 0.9): (90, 100),
    ("busy", 0.9): (50, 100),
    ("quiet", 0.8): (95, 100),
    ("busy", 0.8): (80, 100),
}


@pytest.mark.parametrize(("name", "factor"), some(RECORDED, most=1))
def test_on_recorded_steps_a_faster_plan_is_taken_and_one_that_is_no_faster_is_not(name: str, factor: float) -> None:
    least, most = RECORDED[name, factor]
    assert least <= num_moved(name, factor) <= most


# The candidates


def test_half_the_buckets_come_first_then_double_then_another_last_one() -> None:
    trials = trials_of(64, 8)
    run(trials, lambda _: 100.0)
    assert sizes_tried(trials) == [(4, False), (16, False)]  # eight equal ones are the present plan
    assert [trial.label for trial in trials.tried] == [
        "4 buckets, the last one 0.25 of the others",
        "16 buckets, the last one 0.25 of the others",
    ]


@pytest.mark.parametrize(
    ("time_of", "tried"),
    [
        (lambda num: 100.0 + 10 * num, [(4, True), (2, True), (1, True)]),
        (lambda num: 200.0 - num, [(4, False), (16, True), (32, True), (63, True), (64, False), (63, False)]),
        (lambda num: 100.0 + 20 * abs(num - 4), [(4, True), (2, False), (4, False)]),
    ],
    ids=["the fewer the better", "the more the better", "four are best"],
)
def test_a_direction_is_followed_while_it_helps(time_of: Callable[[int], float], tried: list[tuple[int, bool]]) -> None:
    trials = trials_of(64, 8)
    run(trials, lambda plan: time_of(len(plan.buckets)))
    assert sizes_tried(trials) == tried
    assert trials.present is next(trial.plan for trial in reversed(trials.tried) if trial.verdict is Verdict.TAKEN)


def test_a_plan_without_a_better_neighbor_costs_few_windows() -> None:
    trials = trials_of(64, 8)
    num_windows = run(trials, lambda plan: 100.0 if len(plan.buckets) == 8 else 120.0)
    assert num_windows == 4  # one of each candidate, and one before each
    assert trials.present is trials.plan


@pytest.mark.deep
def test_no_more_candidates_than_six_are_tried() -> None:
    trials = trials_of(4096, 1, numel=8)
    run(trials, lambda plan: 1000.0 * 0.8 ** len(plan.buckets).bit_length())
    assert len(trials.tried) == MOST_CANDIDATES
    assert len(trials.present.buckets) == 64


def test_buckets_are_not_larger_than_memory_allows() -> None:
    trials = trials_of(40, 2, numel=MIB)  # 160 MiB of gradients: buckets of 80, then of 25 at most
    run(trials, lambda plan: 100.0 * len(plan.buckets))
    assert 1 not in [num for num, _ in sizes_tried(trials)]


def test_a_single_parameter_has_no_other_plan() -> None:
    trials = trials_of(1, 1)
    assert trials.are_over
    assert trials.plan is trials.present


def test_a_candidate_that_cannot_be_made_is_left_out() -> None:
    trials = trials_of(64, 8)
    trials.window_ends(100.0)
    trials.fail("rank 1 could not make its buckets")
    assert trials.plan is trials.present
    assert str(trials.tried[0]) == "4 buckets, the last one 0.25 of the others: rank 1 could not make its buckets"
    run(trials, lambda _: 100.0)
    assert sizes_tried(trials) == [(4, False), (16, False)]


def test_a_trial_that_is_dropped_begins_again() -> None:
    trials = trials_of(64, 8)
    trials.window_ends(100.0)
    assert trials.is_new
    trials.window_ends(99.0)
    trials.window_ends(100.0)
    trials.drop()  # steps take twice as long from now on
    assert trials.plan is trials.present
    run(trials, lambda plan: 200.0 if len(plan.buckets) == 8 else 180.0, most_windows=9)
    assert sizes_tried(trials)[0] == (4, True)
    assert str(trials.tried[0]).endswith("4 buckets, the last one 0.25 of the others: 180.0 ms, 200.0 ms before, taken")


def test_trials_that_are_stopped_keep_the_present_plan() -> None:
    trials = trials_of(64, 8)
    trials.window_ends(100.0)
    trials.stop("a reason")
    assert (trials.are_over, trials.is_new, trials.stopped) == (True, False, "a reason")
    assert trials.plan is trials.present


def test_a_window_of_the_present_plan_counts_for_the_next_trial() -> None:
    trials, run_under = trials_of(64, 8), []
    while not trials.are_over:
        run_under.append(len(trials.plan.buckets))
        trials.window_ends(100.0 if len(trials.plan.buckets) == 8 else 99.0)
    assert run_under == [8, 4, 8, 4, 8, 16, 8, 16, 8]


# Formats


def test_auto_tries_all_in_int8_then_the_last_ones_then_sizes() -> None:
    trials = trials_of(64, 8, tries_formats=True)
    run(trials, lambda _: 100.0)
    tried = [(len(trial.plan.buckets), sum(wire == "int8" for wire in trial.plan.wires)) for trial in trials.tried]
    assert tried == [(8, 8), (8, 2), (4, 0), (16, 0)]
    assert trials.tried[0].label == "the same buckets, all in int8"
    assert trials.tried[1].label == "the same buckets, 2 of them in int8"
    assert set(trials.present.wires) == {None}  # ties go to full width


@pytest.mark.parametrize(("num_fastest", "wires"), [(8, {"int8"}), (2, {None, "int8"}), (0, {None})])
def test_auto_keeps_the_fastest_formats_also_in_other_sizes(num_fastest: int, wires: set[str | None]) -> None:
    trials = trials_of(64, 8, tries_formats=True)

    def time_of(plan: Plan) -> float:
        num_narrow = sum(wire == "int8" for wire in plan.wires)
        share = num_narrow / len(plan.buckets)
        return 100.0 + 40 * abs(share - num_fastest / 8) + len(plan.buckets)

    run(trials, time_of)
    assert set(trials.present.wires) == wires


def test_with_given_buckets_only_formats_are_tried() -> None:
    trials = trials_of(64, 8, tries_formats=True, keeps_buckets=True)
    run(trials, lambda plan: 90.0 if any(plan.wires) else 100.0)
    assert {len(trial.plan.buckets) for trial in trials.tried} == {8}


def test_a_format_that_was_asked_for_stays() -> None:
    trials = trials_of(64, 8, wires="bfloat16")
    run(trials, lambda plan: 100.0 + len(plan.buckets))
    assert {wire for trial in trials.tried for wire in trial.plan.wires} == {"bfloat16"}
    assert len(trials.present.buckets) < 8


def test_every_rank_goes_the_same_way() -> None:
    draws = random.Random(0)
    times = [draws.uniform(80, 120) for _ in range(1000)]
    ways = []
    for _ in range(2):
        trials, drawn = trials_of(64, 8, tries_formats=True), iter(times)
        run(trials, lambda _: next(drawn))  # noqa: B023
        ways.append((list(map(str, trials.tried)), trials.present))
    assert ways[0] == ways[1]


def test_a_trial_is_told_with_its_medians() -> None:
    trials = trials_of(64, 8)
    (trial,) = trials.tried
    assert str(trial) == "4 buckets, the last one 0.25 of the others: not measured yet"
    trials.window_ends(100.0)
    trials.window_ends(104.0)
    assert str(trial) == "4 buckets, the last one 0.25 of the others: 104.0 ms, 100.0 ms before, so far"
    trials.window_ends(101.0)
    trials.window_ends(106.0)
    trials.window_ends(101.0)
    assert str(trial) == "4 buckets, the last one 0.25 of the others: 105.0 ms, 101.0 ms before, not taken"
