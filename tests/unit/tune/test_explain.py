"""The plan in force is told with its reasons, in a few lines."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.strategies import spec
from undertow.plan import Plan, plan_from_groups
from undertow.tune import Explanation, Trial, Trials, Verdict, explanation, progress_text, trial_text

PARAMS = tuple(spec(f"p{i}", 250_000) for i in range(4))
WHY = "its steps were the fastest: 2 other plans tried in 40 steps"


def plan_of(*groups: Sequence[int]) -> Plan:
    return plan_from_groups(PARAMS, groups, num_ranks=2)


TRIALS = (
    Trial(plan_of((3, 2), (1, 0)), [100.0, 90.0], Verdict.TAKEN),
    Trial(plan_of((3, 2, 1, 0)), [90.0, 95.0], Verdict.KEPT),
)
TOLD = (
    "2 buckets, the last one of 2.00 MB: 90.0 ms, 100.0 ms before, taken",
    "1 bucket: 95.0 ms, 90.0 ms before, not taken",
)


def explained(plan: Plan, *, trials: Sequence[Trial] = TRIALS) -> Explanation:
    return explanation(plan, why=WHY, strategy="ddp", trials=trials)


def test_the_plan_its_reason_and_its_trials_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # narrower than the lines
    it = explained(plan_of((3, 2), (1, 0)))
    assert str(it) == (f"The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n  {WHY}\n    {TOLD[0]}\n    {TOLD[1]}")
    assert it.in_brief == f"The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n  {WHY}"
    assert json.loads(json.dumps(it.to_dict()))["trials"] == [*TOLD]


def test_the_plan_of_one_rank_is_of_one_rank() -> None:
    it = explained(plan_from_groups(PARAMS, [(3, 2, 1, 0)], num_ranks=1))
    assert it.in_brief.splitlines()[0] == "The plan: 1 bucket of 4.00 MB, ddp, 1 rank"


@pytest.mark.parametrize(
    ("num_ranks", "told"),
    [(2, "1.33 x the mean in bytes, 1.33 x the mean in work of updates"), (9, "3.00 x the mean in bytes, 3.00 x the mean in")],
)
def test_owners_and_their_balance_are_told(num_ranks: int, told: str) -> None:
    params = [replace(spec, is_whole=spec.name != PARAMS[3].name) for spec in PARAMS]
    it = explained(plan_from_groups(params, ((3,), (2, 1, 0)), num_ranks=num_ranks))
    assert f"  One owner for each parameter. The largest share of a rank: {told}" in str(it)
    assert explained(plan_of((3, 2), (1, 0))).owners == ""


@pytest.mark.parametrize(
    ("wires", "told"),
    [
        (("int8", None), "2 buckets of 2.00 (int8), 2.00 MB, ddp"),
        (("int8", "int8"), "2 buckets of 2.00, 2.00 MB, all in int8, ddp"),
    ],
)
def test_the_format_of_each_bucket_is_told(wires: tuple[str | None, ...], told: str) -> None:
    it = explained(plan_from_groups(PARAMS, ((3, 2), (1, 0)), num_ranks=2, wires=wires))
    assert (it.wires, told in str(it)) == (wires, True)


def test_eight_lines_are_the_most() -> None:
    trials = [Trial(plan_of((3, 2), (1, 0)))] * 6
    it = explained(plan_of((3, 2), (1, 0)), trials=trials)
    assert len(str(it).splitlines()) == 8
    crowded = replace(it, owners="One owner for each parameter.", outer="Outer synchronization: 2 fragments")
    lines = str(crowded).splitlines()
    assert len(lines) == 8
    assert lines[5] == "    and 3 more in explain().trials"
    assert lines[6:] == ["  One owner for each parameter.", "Outer synchronization: 2 fragments"]


def test_eight_lines_are_the_most_with_experts_too() -> None:
    one = explained(plan_of((3, 2, 1, 0)))
    crowded = replace(
        explained(plan_of((3, 2), (1, 0)), trials=[Trial(plan_of((3, 2), (1, 0)))] * 6),
        owners="One owner for each parameter.",
        outer="Outer synchronization: 2 fragments",
        experts={f"'*.experts.{number}.*', ranks 0, 1": one for number in range(5)},
    )
    lines = str(crowded).splitlines()
    assert len(lines) == 8
    assert lines[2] == "    and 6 more in explain().trials"
    assert lines[5:] == [
        f"Experts '*.experts.0.*', ranks 0, 1: 1 bucket of 4.00 MB, ddp, 2 ranks; {WHY}",
        f"Experts '*.experts.1.*', ranks 0, 1: 1 bucket of 4.00 MB, ddp, 2 ranks; {WHY}",
        "    and 3 more in explain().experts",
    ]


def test_many_buckets_fit_into_a_line() -> None:
    params = tuple(spec(f"p{i}", 250_000) for i in range(40))
    it = explained(plan_from_groups(params, [(index,) for index in range(40)], num_ranks=2))
    assert str(it).splitlines()[0] == (
        "The plan: 40 buckets of 1.00, 1.00, 1.00, 1.00, 1.00, 1.00, ..., 1.00, 1.00, 1.00, 1.00, 1.00, 1.00 MB, ddp, 2 ranks"
    )


def test_a_trial_is_told_with_its_medians() -> None:
    trial = Trial(plan_of((3, 2, 1), (0,)))
    assert trial_text(trial) == "2 buckets, the last one of 1.00 MB: not measured yet"
    trial.times_ms += [100.0, 104.0]
    assert trial_text(trial) == "2 buckets, the last one of 1.00 MB: 104.0 ms, 100.0 ms before, so far"
    trial.times_ms += [101.0, 106.0, 101.0]
    trial.verdict = Verdict.KEPT
    assert trial_text(trial) == "2 buckets, the last one of 1.00 MB: 105.0 ms, 101.0 ms before, not taken"


@pytest.mark.parametrize(
    ("wires", "told"),
    [
        (("int8", "int8"), "2 buckets, the last one of 2.00 MB, all in int8: not measured yet"),
        ((None, "int8"), "2 buckets, the last one of 2.00 MB, 1 of them in int8: not measured yet"),
    ],
)
def test_a_trial_is_told_with_its_formats(wires: tuple[str | None, ...], told: str) -> None:
    assert trial_text(Trial(plan_from_groups(PARAMS, ((3, 2), (1, 0)), num_ranks=2, wires=wires))) == told


def test_a_trial_that_failed_is_told_with_the_reason() -> None:
    trial = Trial(plan_of((3, 2, 1, 0)), [100.0, math.inf], failure="rank 1 could not make its buckets")
    assert trial_text(trial) == "1 bucket: rank 1 could not make its buckets"


def test_the_progress_of_trials_is_told() -> None:
    trials = Trials(plan_of((3, 2), (1, 0)), (3, 2, 1, 0))
    assert progress_text(trials, num_steps=7) == "trials are under way: 7 steps, 1 other plan so far"
    while not trials.are_over:
        trials.window_ends(100.0)
    assert progress_text(trials, num_steps=90) == "2 other plans tried in 90 steps, none 2 % faster"
    trials.tried[0].verdict = Verdict.TAKEN
    assert progress_text(trials, num_steps=90) == "its steps were the fastest: 2 other plans tried in 90 steps"
    trials.stop("the parameters have changed")
    assert progress_text(trials, num_steps=91) == "trials have ended after 91 steps: the parameters have changed"


def test_a_plan_without_others_is_told() -> None:
    trials = Trials(plan_from_groups(PARAMS[:1], ((0,),), num_ranks=2), (0,))
    assert progress_text(trials, num_steps=7) == "no other plan is worth a trial"
