"""The part of the benchmark that times the choice of a plan."""

from benchmarks.planner import judge, measure


def test_every_case_has_a_time_and_a_plan() -> None:
    rows = measure(True, lambda _: None)
    assert all(row["planning_ms"] > 0 and row["num_buckets"] >= 1 for row in rows)
    assert len(judge(rows)) == len(rows)
