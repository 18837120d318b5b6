"""Plans that are tried on real steps: which ones, in which order, and by which rule one is taken."""

import json
import random
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle, islice, pairwise, product
from statistics import median

import pytest

from support.levels import some
from support.project import ROOT
from undertow.engine.trying import NUM_FIRST_STEPS, NUM_STEPS_COUNTED
from undertow.plan import ParamSpec, Plan, plan_from_groups
from undertow.tune.trials import MOST_CANDIDATES, Trials, Verdict, verdict

RECORDINGS = ROOT / "tests" / "golden" / "step_times"  # README.md there says of what
PAGE = ROOT / "docs" / "design" / "tuning.md"  # has the results
NUM_DRAWS = 100
MIB = 2**20


def params(num: int, *, numel: int = 1000, dtype: str = "float32") -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(name=f"p{index}", shape=(numel,), dtype=dtype, itemsize=4) for index in range(num))


def trials_of(num_params: int, num_buckets: int, *, numel: int = 1000, wires: str | None = None, **settings: bool) -> Trials:
    """Trials that begin with equal buckets, of which the last one is whole."""
    sizes = [num_params // num_buckets] * num_buckets
    return trials_of_sizes(sizes, numel=numel, wires=wires, **settings)


def trials_of_sizes(sizes: Sequence[int], *, numel: int = 1000, wires: str | None = None, **settings: bool) -> Trials:
    """Trials that begin with buckets of so many parameters."""
    num_params = sum(sizes)
    groups = [range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]
    present = plan_from_groups(params(num_params, numel=numel), groups, num_ranks=2, wires=wires)
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
        ([100.0, 140.0] * 8 + [100.0], [95.0, 130.0] * 8, Verdict.GO_ON),
        ([100.0, 140.0] * 9 + [100.0], [95.0, 130.0] * 9, Verdict.KEPT),  # eighteen pairs are the most
    ],
)
def test_a_plan_is_taken_only_if_it_gains_more_than_its_spread(
    present: list[float], candidate: list[float], expected: Verdict
) -> None:
    assert verdict(present, candidate) is expected


def steps_from(name: str, seed: int) -> "cycle[float]":
    times = json.loads((RECORDINGS / f"{name}.json").read_text())
    begin = random.Random(seed).randrange(len(times))
    return cycle(times[begin:] + times[:begin])


def window(steps: "cycle[float]", factor: float = 1.0, *, num_left_out: int = 1) -> float:
    """The median of a window; the first steps do not count, nor does the one in which ranks receive the times."""
    _, counted, _ = [list(islice(steps, num)) for num in (num_left_out, NUM_STEPS_COUNTED, 1)]
    return median(counted) * factor


def num_moved(name: str, factor: float) -> int:
    """Of 100 runs over recorded steps, the number that leave the first plan, if every other plan is faster by `factor`."""
    moved = 0
    for seed in range(NUM_DRAWS):
        trials, steps = trials_of(64, 8), steps_from(name, seed)
        first = trials.present
        run(trials, lambda plan: window(steps, 1.0 if plan is first else factor))  # noqa: B023
        moved += trials.present is not first
    return moved


def printed(name: str, *, num_columns: int) -> list[str]:
    """The cells of a recording in the page's table with so many columns of results."""
    for line in PAGE.read_text().splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if first == name and len(cells) == num_columns:
            return cells
    raise LookupError(name)


# The limits of the results.
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
    moved = num_moved(name, factor)
    assert least <= moved <= most
    no_faster, tenth_faster, fifth_faster = printed(name, num_columns=3)
    assert str(moved) == {1.0: no_faster, 0.9: tenth_faster, 0.8: fifth_faster}[factor]


def num_steps(name: str, seed: int, *, tries_formats: bool) -> int:
    """The steps of trials over recorded steps, if no plan is faster than the first one. Its buckets grow and shrink."""
    trials, steps = trials_of_sizes([4, 6, 8, 12, 12, 10, 7, 5], tries_formats=tries_formats), steps_from(name, seed)
    num = 0
    while not trials.are_over:
        num_left_out = 1 + (NUM_FIRST_STEPS if trials.is_new and any(trials.plan.wires) else 0)
        trials.window_ends(window(steps, num_left_out=num_left_out))
        num += num_left_out + NUM_STEPS_COUNTED + 1
    return num


@pytest.mark.parametrize(("name", "tries_formats"), some(product(("quiet", "busy", "variable"), (False, True)), most=1))
def test_trials_without_a_better_plan_take_the_steps_that_the_page_says(name: str, tries_formats: bool) -> None:
    nums = sorted(num_steps(name, seed, tries_formats=tries_formats) for seed in range(NUM_DRAWS))
    assert f"{nums[0]}, {median(nums):.0f}, {nums[-1]}" == printed(name, num_columns=2)[tries_formats]


# The candidates


def test_half_the_buckets_come_first_then_double_then_another_last_one() -> None:
    trials = trials_of(64, 8)
    run(trials, lambda _: 100.0)
    assert sizes_tried(trials) == [(4, False), (16, False)]  # eight equal ones are the present plan
    for trial in trials.tried:
        *others, last = [len(bucket.params) for bucket in trial.plan.buckets]
        assert last == pytest.approx(0.25 * sum(others) / len(others), abs=0.5)


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
    assert trials.tried[0].failure == "rank 1 could not make its buckets"
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
    assert set(trials.tried[0].times_ms) == {180.0, 200.0}


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
