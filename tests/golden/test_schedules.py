"""The text files beside this one are the schedules we promise; a refactoring leaves them unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from undertow.schedule import Schedule, lower_accumulation, lower_data_parallel, schedule_from_text, verify

GOLDEN = Path(__file__).parent
SCHEDULES = [
    ("data_parallel_1_bucket", lower_data_parallel(1), 1),
    ("data_parallel_1_bucket", lower_data_parallel(1, overlap=False), 1),
    ("data_parallel_3_buckets", lower_data_parallel(3), 3),
    ("data_parallel_3_buckets_no_overlap", lower_data_parallel(3, overlap=False), 3),
    ("accumulation_1_bucket", lower_accumulation(1), 1),
    ("accumulation_3_buckets", lower_accumulation(3), 3),
]


def golden(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize(("name", "schedule", "num_buckets"), SCHEDULES)
def test_lowering_gives_the_golden_text(name: str, schedule: Schedule, num_buckets: int) -> None:
    assert verify(schedule, num_buckets=num_buckets).to_text() == golden(name)


@pytest.mark.parametrize(("name", "schedule", "num_buckets"), SCHEDULES)
def test_golden_text_parses_to_what_was_lowered(name: str, schedule: Schedule, num_buckets: int) -> None:
    assert schedule_from_text(golden(name)) == schedule


def test_every_golden_file_has_its_test() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {name for name, _, _ in SCHEDULES}
