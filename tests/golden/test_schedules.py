"""The text files beside this one are the schedules we promise; a refactoring leaves them unchanged."""

from pathlib import Path

import pytest

from support.schedules import schedule_from_text
from support.verify import verify
from undertow.schedule import (
    DDP,
    HYBRID,
    ZERO1,
    ZERO2,
    Schedule,
    Strategy,
    lower_accumulation,
    lower_data_parallel,
)

GOLDEN = Path(__file__).parent
SCHEDULES = [
    ("data_parallel_1_bucket", lower_data_parallel(1), DDP, 1),
    ("data_parallel_1_bucket", lower_data_parallel(1, overlap=False), DDP, 1),
    ("data_parallel_3_buckets", lower_data_parallel(3), DDP, 3),
    ("data_parallel_3_buckets_no_overlap", lower_data_parallel(3, overlap=False), DDP, 3),
    ("accumulation_1_bucket", lower_accumulation(1), DDP, 1),
    ("accumulation_3_buckets", lower_accumulation(3), DDP, 3),
    ("zero1_1_bucket", lower_data_parallel(1, ZERO1), ZERO1, 1),
    ("zero1_3_buckets", lower_data_parallel(3, ZERO1), ZERO1, 3),
    ("zero1_3_buckets", lower_data_parallel(3, ZERO2), ZERO2, 3),
    ("zero1_3_buckets_no_overlap", lower_data_parallel(3, ZERO1, overlap=False), ZERO1, 3),
    ("accumulation_3_buckets", lower_accumulation(3, ZERO1), ZERO1, 3),
    ("zero2_accumulation_3_buckets", lower_accumulation(3, ZERO2), ZERO2, 3),
    ("hybrid_2_buckets", lower_data_parallel(2, HYBRID), HYBRID, 2),
    ("accumulation_3_buckets", lower_accumulation(3, HYBRID), HYBRID, 3),
]


@pytest.mark.parametrize(("name", "schedule", "strategy", "num_buckets"), SCHEDULES)
def test_lowering_gives_the_golden_text_which_parses_to_what_was_lowered(
    name: str, schedule: Schedule, strategy: Strategy, num_buckets: int
) -> None:
    golden = (GOLDEN / f"{name}.txt").read_text()
    assert (verify(schedule, strategy, num_buckets=num_buckets).to_text(), schedule_from_text(golden)) == (golden, schedule)


def test_every_golden_file_has_its_test() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {name for name, *_ in SCHEDULES}
