"""The plan in force is told with its reasons, in a few lines."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.strategies import spec
from undertow.plan import Plan, plan_from_groups
from undertow.tune import Explanation, explanation

PARAMS = tuple(spec(f"p{i}", 250_000) for i in range(4))
WHY = "its steps were the fastest: 2 other plans tried in 40 steps"
TRIALS = ("2 buckets: 90.0 ms, 100.0 ms before, taken", "1 bucket: 95.0 ms, 90.0 ms before, not taken")


def plan_of(*groups: Sequence[int]) -> Plan:
    return plan_from_groups(PARAMS, groups, num_ranks=2)


def explained(plan: Plan, *, trials: Sequence[str] = TRIALS) -> Explanation:
    return explanation(plan, why=WHY, strategy="ddp", trials=trials)


def test_the_plan_its_reason_and_its_trials_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # narrower than the lines
    it = explained(plan_of((3, 2), (1, 0)))
    assert str(it) == (
        "The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n"
        f"  {WHY}\n"
        "    2 buckets: 90.0 ms, 100.0 ms before, taken\n"
        "    1 bucket: 95.0 ms, 90.0 ms before, not taken"
    )
    assert it.in_brief == f"The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n  {WHY}"
    assert json.loads(json.dumps(it.to_dict()))["trials"] == [*TRIALS]


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
    trials = [f"{num} buckets: not measured yet" for num in range(6)]
    it = explained(plan_of((3, 2), (1, 0)), trials=trials)
    assert len(str(it).splitlines()) == 8
    crowded = replace(it, owners="One owner for each parameter.", outer="Outer synchronization: 2 fragments")
    lines = str(crowded).splitlines()
    assert len(lines) == 8
    assert lines[5] == "    and 3 more in explain().trials"
    assert lines[6:] == ["  One owner for each parameter.", "Outer synchronization: 2 fragments"]


def test_many_buckets_fit_into_a_line() -> None:
    params = tuple(spec(f"p{i}", 250_000) for i in range(40))
    it = explained(plan_from_groups(params, [(index,) for index in range(40)], num_ranks=2))
    assert str(it).splitlines()[0] == (
        "The plan: 40 buckets of 1.00, 1.00, 1.00, 1.00, 1.00, 1.00, ..., 1.00, 1.00, 1.00, 1.00, 1.00, 1.00 MB, ddp, 2 ranks"
    )
