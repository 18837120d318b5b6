"""Every schedule that a run can have is right, and strategies have names."""

from hypothesis import given
from hypothesis import strategies as st

from support.strategies import LOWERINGS
from support.verify import verify
from undertow.schedule import DDP, HYBRID, ZERO1, ZERO2, lower_accumulation, lower_data_parallel, strategy_named


@given(st.integers(1, 40))
def test_lowered_schedules_are_right(num_buckets: int) -> None:
    for strategy, schedules in {
        DDP: [lower(num_buckets) for lower in LOWERINGS],
        HYBRID: [
            *(lower_data_parallel(num_buckets, HYBRID, overlap=overlap) for overlap in (False, True)),
            lower_accumulation(num_buckets, HYBRID),
        ],
    }.items():
        assert [verify(schedule, strategy, num_buckets=num_buckets) for schedule in schedules] == schedules


def test_a_strategy_is_found_by_its_name() -> None:
    assert [strategy_named(name) for name in (None, "ddp", "zero1", "zero2", "hybrid")] == [DDP, DDP, ZERO1, ZERO2, HYBRID]
