from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import refusal
from support.strategies import lowerings
from undertow.schedule import Buffer, Schedule, lower_data_parallel, schedule_from_text

HEADER = "id lane kind bucket reads writes after"


def parsing_error(text: str) -> str:
    return refusal(lambda: schedule_from_text(text))


@given(lowerings, st.integers(1, 150))
def test_text_round_trip(lower: Callable[[int], Schedule], num_buckets: int) -> None:
    schedule = lower(num_buckets)
    assert schedule_from_text(schedule.to_text()) == schedule


def test_blank_lines_and_indentation_do_not_matter() -> None:
    schedule = lower_data_parallel(2)
    assert schedule_from_text("".join(f"\n    {line}   \n" for line in schedule.to_text().splitlines())) == schedule


@pytest.mark.parametrize(
    ("other", "overlaps"),
    [(Buffer("grad", 1), True), (Buffer("grad", None), True), (Buffer("grad", 2), False), (Buffer("param", 1), False)],
)
def test_buffers_overlap_in_one_bucket_or_in_all(other: Buffer, overlaps: bool) -> None:
    assert Buffer("grad", 1).overlaps(other) == other.overlaps(Buffer("grad", 1)) == overlaps


@pytest.mark.parametrize("text", ["", "\n\n", "00  compute  fill  b0  -  grad[b0]  -", "id lane kind"])
def test_text_without_its_header_is_no_schedule(text: str) -> None:
    assert parsing_error(text) == f"this is no schedule: the first line is not its header.\n  Expected: {HEADER}"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("00  compute  fill  b0", "it has 4 columns, expected 7"),
        ("00 compute fill b0 - grad[b0] -", "it has 1 columns, expected 7"),
        ("00  compute  fill  b0  -  grad[b0]  -  -", "it has 8 columns, expected 7"),
        ("no  compute  fill  b0  -  grad[b0]  -", "invalid literal for int() with base 10: 'no'"),
        ("00  compute  pour  b0  -  grad[b0]  -", "'pour' is not a valid OpKind"),
        ("00  compute  fill  7  -  grad[b0]  -", "'7' is no bucket"),
        ("00  compute  fill  b0  -  grad  -", "'grad' is no buffer"),
        ("00  compute  fill  b0  -  grad[0]  -", "'grad[0]' is no buffer"),
        ("00  compute  fill  b0  -  grad[b0]  first", "invalid literal for int() with base 10: 'first'"),
    ],
)
def test_a_line_that_is_no_op_is_named(line: str, reason: str) -> None:
    assert parsing_error(f"{HEADER}\n{line}") == (
        f"this line is no op: {line!r}.\n  {reason}\n"
        "  Columns are two spaces apart, items of one column one space; an empty column is '-'."
    )


@pytest.mark.parametrize(
    ("op_id", "after"), [(1, "-"), (0, "0"), (0, "3"), (0, "-1")], ids=["number", "itself", "later", "negative"]
)
def test_ops_out_of_order_are_refused(op_id: int, after: str) -> None:
    ids = [] if after == "-" else [int(after)]
    assert parsing_error(f"{HEADER}\n{op_id:02d}  compute  fill  b0  -  grad[b0]  {after}") == (
        f"op {op_id} (fill b0) stands at position 0 and comes after {ids}.\n  schedule\n"
        "  Number ops from 0 in order; an op may only come after ops with smaller ids."
    )
