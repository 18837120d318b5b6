"""Systems in turn over shaped links: which ones, what counts of their steps, the tables; with root, runs that take a moment."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks import figures
from benchmarks.shaped import __main__ as command
from benchmarks.shaped import part
from benchmarks.shaped.rounds import Course, Timed, run
from benchmarks.shaped.session import HERE
from benchmarks.shaped.systems import CONTENDERS, OUTER, chosen

pytestmark = pytest.mark.bench


def timed(name: str, *rounds: Sequence[Sequence[float]]) -> Timed:
    return Timed(contender=CONTENDERS[name], rounds_ms=[list(map(list, ranks)) for ranks in rounds], cpu_ms=[1.0] * len(rounds))


def course(names: str, **changes: object) -> Course:
    return replace(
        Course(
            workload="replay@0.01",
            link="1gbit",
            num_ranks=2,
            contenders=chosen(names, {}),
            num_rounds=2,
            num_steps=3,
            sources={"": HERE},
        ),
        **changes,
    )


def test_a_step_is_as_long_as_on_its_slowest_rank_and_the_median_round_counts() -> None:
    found = timed("ours", ([1, 2, 9], [3, 1, 1]), ([7, 7, 7], [6, 6, 6]), ([5, 5, 5], [0, 0, 0]))
    assert (found.of_rounds_ms, found.step_ms) == ([3, 7, 5], 5)


def test_steps_with_an_exchange_now_and_then_count_by_their_mean() -> None:
    assert timed(OUTER, ([1, 1, 10], [2, 2, 2])).step_ms == 4


def test_the_table_has_ratios_to_the_first_system_that_was_measured() -> None:
    failed = timed("bare")
    failed.error = "rank 1 has ended"
    one = timed("ours", ([100.0], [90.0]), ([110.0], [90.0]))
    other = timed("ddp", ([50.0], [40.0]), ([60.0], [40.0]))
    lines = [line.split() for line in command.table([failed, one, other]).splitlines()[1:]]
    assert lines == [
        ["bare", "failed"],
        ["ours", "105.0", *["100.0", "to", "110.0"], "1.0", "1.000", *["1.000", "to", "1.000"]],
        ["ddp", "55.0", *["50.0", "to", "60.0"], "1.0", "0.524", *["0.500", "to", "0.545"]],
    ]


def rows(workload: str = "gpt") -> list[dict[str, object]]:
    steps = {"ours": 120.0, "ours-untuned": 100.0, "ours-auto": 80.0, "ddp": 150.0, "ddp-1mb": 110.0, "ddp-4mb": 90.0}
    steps |= {"ddp-fp16": 70.0, "bare": 50.0}
    return part.rows_of(course("ours", workload=workload), [timed(name, ([step], [0.0])) for name, step in steps.items()])


def test_the_best_bucket_size_is_a_row_and_ratios_are_judged() -> None:
    (best,) = (row for row in rows() if row["system"] == "ddp-best")
    assert (best["variant"], best["step_ms"], best["title"]) == ("ddp-4mb", 90.0, "torch DDP, best of 2 bucket sizes")
    assert {row["source"] for row in rows()} == {"shaped"}
    assert [(it.name, it.measured_text, it.verdict) for it in part.judge(rows())] == [
        ("gpt, 1gbit: ours / ours-untuned", "1.20 x", "NO"),
        ("gpt, 1gbit: ours-auto / ours", "0.67 x", "yes"),
        ("gpt, 1gbit: ours / ddp-best", "1.33 x", "-"),
    ]


def test_the_first_row_of_the_readme_is_the_changed_import_alone_whatever_it_says() -> None:
    _, *lines = figures._readme(rows("replay"))
    assert lines == [
        ["24 timed layers, 1 Gb/s", "the import alone", "150", "90", "", "120", "1.33"],
        ["24 timed layers, 1 Gb/s", '`SyncConfig(wire="auto")`', "150", "90", "70 (fp16 hook)", "80", "0.89"],
    ]


# Over networks of namespaces.


@pytest.mark.root
@pytest.mark.usefixtures("needs_namespaces")
def test_systems_take_turns_and_one_that_fails_is_lost_alone() -> None:
    wrong = replace(CONTENDERS["ours-untuned"], name="wrong", module="tests.bench.bad_systems")
    told: list[str] = []
    contenders = (*chosen("ours-untuned,ddp-4mb", {}), replace(wrong, options={"how": "forgets to average"}))
    one, other, failed = run(course("ours", contenders=contenders), told.append)
    assert [[len(rank) for ranks in each.rounds_ms for rank in ranks] for each in (one, other)] == [[3, 3, 3, 3]] * 2
    assert one.told["explain"]
    assert "trains wrongly: blocks.0.params.0" in (failed.error or "")
    turns = [line.split(": ")[1] for line in told if " round " in line]
    assert turns == ["ours-untuned", "ddp-4mb", "ddp-4mb", "ours-untuned"]
