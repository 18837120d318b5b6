from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import text_of
from support.strategies import LOWERINGS, lowerings
from undertow.errors import ConfigError
from undertow.schedule import (
    HYBRID,
    ZERO1,
    ZERO2,
    Schedule,
    lower_accumulation,
    lower_data_parallel,
    lower_eager,
    schedule_from_text,
    verify,
)

STEP = """\
id  lane     kind        bucket  reads     writes    after
00  compute  fill        b0      -         grad[b0]  -
01  compute  pack        b0      grad[b0]  grad[b0]  00
02  comm.dp  all_reduce  b0      grad[b0]  grad[b0]  01
03  compute  fill        b1      -         grad[b1]  -
04  compute  end         *       -         -         00 03
05  compute  pack        b1      grad[b1]  grad[b1]  04
06  comm.dp  all_reduce  b1      grad[b1]  grad[b1]  05
07  compute  join        *       -         -         04
08  compute  bind        b0      grad[b0]  -         02 07
09  compute  bind        b1      grad[b1]  -         06 07
10  compute  step        *       grad[*]   param[*]  08 09
11  compute  use         *       param[*]  -         10
"""
CROSSING_REMEDY = "A step fills every bucket once and sends it once; an accumulation sends nothing, or shards."


def with_lines(*lines: str, of: str = STEP) -> str:
    """A schedule's text with `lines` in place of those of the same ids, or behind the last."""
    by_id = {line.split()[0]: line for line in (*of.splitlines(), *lines)}
    return "\n".join(by_id.values())


def fault_in(text: str, *, num_buckets: int = 2) -> str:
    return text_of(ConfigError, lambda: verify(schedule_from_text(text), num_buckets=num_buckets))


@given(lowerings, st.integers(1, 40))
def test_lowered_schedules_are_right(lower: Callable[[int], Schedule], num_buckets: int) -> None:
    schedule = lower(num_buckets)
    assert verify(schedule, num_buckets=num_buckets) is schedule


def test_the_schedule_that_the_faults_below_are_made_of_is_right() -> None:
    verify(schedule_from_text(STEP), num_buckets=2)


@pytest.mark.parametrize("lower", LOWERINGS)
def test_three_thousand_buckets_are_no_problem(lower: Callable[[int], Schedule]) -> None:
    verify(lower(3000), num_buckets=3000)


def test_a_collective_is_after_all_earlier_ones_of_its_lane() -> None:
    verify(schedule_from_text(with_lines("08  compute  bind  b0  grad[b0]  -  06 07")), num_buckets=2)


@pytest.mark.parametrize(
    ("text", "num_buckets", "buffer", "counts"),
    [
        (
            with_lines("02  compute  pack  b0  grad[b0]  grad[b0]  01"),
            2,
            "grad[b0]",
            "fills: expected 1, got 1; all_reduces: expected 1, got 0",
        ),
        (
            with_lines("05  comm.dp  all_reduce  b1  grad[b1]  grad[b1]  04"),
            2,
            "grad[b1]",
            "fills: expected 1, got 1; all_reduces: expected 1, got 2",
        ),
        (
            with_lines("01  compute  fill  b0  -  grad[b0]  00"),
            2,
            "grad[b0]",
            "fills: expected 1, got 2; all_reduces: expected 1, got 1",
        ),
        (STEP, 1, "grad[b1]", "fills: expected 0, got 1; all_reduces: expected 0, got 1"),
        (STEP, 3, "grad[b2]", "fills: expected 1, got 0; all_reduces: expected 1, got 0"),
        (
            with_lines("12  comm.dp  all_reduce  *  grad[*]  grad[*]  11"),
            2,
            "grad[*]",
            "fills: expected 0, got 0; all_reduces: expected 0, got 1",
        ),
        (
            with_lines("05  comm.dp  all_reduce  b0  grad[b0]  grad[b0]  04", of=lower_accumulation(1).to_text()),
            1,
            "grad[b0]",
            "fills: expected 1, got 1; all_reduces: expected 0, got 1",
        ),
    ],
    ids=["missing", "double", "filled twice", "foreign bucket", "no such bucket", "all buckets", "accumulation"],
)
def test_gradients_that_do_not_cross_once_are_found(text: str, num_buckets: int, buffer: str, counts: str) -> None:
    assert fault_in(text, num_buckets=num_buckets) == (
        f"the ops on {buffer} do not carry each gradient across once.\n"
        f"  {counts}; the plan has {num_buckets} buckets\n  {CROSSING_REMEDY}"
    )


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            "02  comm.dp  all_reduce  b0  grad[b0]  grad[b0]  -",
            "op 02 (all_reduce b0) may run before its gradients are there or after the step.\n  fill is op 00, step is op 10",
        ),
        (
            "09  compute  bind  b1  grad[b1]  -  07",
            "op 06 (all_reduce b1) may run before its gradients are there or after the step.\n  fill is op 03, step is op 10",
        ),
    ],
    ids=["before the fill", "after the step"],
)
def test_a_collective_outside_its_time_is_found(line: str, fault: str) -> None:
    assert fault_in(with_lines(line)) == f"{fault}\n  Order the collective after the fill and before the step."


@pytest.mark.parametrize(
    ("line", "first", "second", "buffer"),
    [
        ("08  compute  bind  b0  grad[b0]  -  01 07", "02 (all_reduce b0)", "08 (bind b0)", "grad[b0]"),
        ("02  comm.dp  all_reduce  b0  grad[b0]  grad[b0]  00", "01 (pack b0)", "02 (all_reduce b0)", "grad[b0]"),
        ("05  compute  pack  b1  grad[b1]  grad[b1]  -", "03 (fill b1)", "05 (pack b1)", "grad[b1]"),
        ("11  compute  use  *  param[*]  -  -", "10 (step *)", "11 (use *)", "param[*]"),
        ("12  compute  pack  b1  grad[b1]  grad[b1]  06", "09 (bind b1)", "12 (pack b1)", "grad[b1]"),
        ("12  compute  use  b0  param[b0]  -  09", "10 (step *)", "12 (use b0)", "param[b0]"),
    ],
    ids=["bind in flight", "pack in flight", "pack while filling", "use in the step", "pack of a bound", "use of one bucket"],
)
def test_two_ops_on_a_buffer_of_which_one_writes_must_be_ordered(line: str, first: str, second: str, buffer: str) -> None:
    # Here the last collective has its own edge to the end of backward, so that a fault of its pack is only that.
    step = with_lines("06  comm.dp  all_reduce  b1  grad[b1]  grad[b1]  04 05")
    assert fault_in(with_lines(line, of=step)) == (
        f"ops {first} and {second} may touch {buffer} at once.\n"
        f"  one writes it, and nothing orders {second[:2]} after {first[:2]}\n"
        "  Let the later op come after the earlier one."
    )


@pytest.mark.parametrize(
    ("line", "kind", "count"),
    [
        ("04  compute  join  *  -  -  00 03", "end", 0),
        ("07  compute  end  *  -  -  04", "end", 2),
        ("07  compute  use  *  -  -  04", "join", 0),
        ("12  compute  join  *  -  -  04", "join", 2),
    ],
)
def test_backward_ends_once_and_is_joined_once(line: str, kind: str, count: int) -> None:
    text = with_lines(line)
    assert fault_in(text) == (
        f"the schedule has {count} ops of kind {kind}, expected 1.\n"
        f"  schedule of {len(text.splitlines()) - 1} ops\n  Backward ends once in a step, and its engines join once."
    )


def test_the_last_collective_must_wait_for_the_end_of_backward() -> None:
    assert fault_in(with_lines("05  compute  pack  b1  grad[b1]  grad[b1]  03")) == (
        "op 06 (all_reduce b1) may leave before backward is over.\n"
        "  it is the last reduction; backward ends with op 04\n"
        "  The last bucket leaves after backward: its trailer carries what a rank knows only then."
    )


def sharded(*lines: str, num_buckets: int = 2) -> str:
    """What is wrong with a ZeRO-1 step of which some lines were exchanged."""
    text = with_lines(*lines, of=lower_data_parallel(2, ZERO1).to_text())
    return text_of(ConfigError, lambda: verify(schedule_from_text(text), ZERO1, num_buckets=num_buckets))


# Ops 00 to 09 are like those above, 10 is the step, 11 and 12 gather b1 and b0, 13 and 14 use them.
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            "12  compute  use  b0  param[b0]  -  10",
            "the ops on param[b0] do not bring each parameter to every rank once.\n"
            "  all_gathers: expected 1, got 0; the plan has 2 buckets\n"
            "  Where the optimizer is sharded, every bucket is gathered once after the step; elsewhere never.",
        ),
        (
            "11  comm.dp  all_gather  b1  own[b1]  param[b1]  07",
            "op 11 (all_gather b1) may run before the step.\n  step is op 10\n  Order the gather after the step.",
        ),
        (
            "13  compute  use  b1  param[b1]  -  10",
            "ops 11 (all_gather b1) and 13 (use b1) may touch param[b1] at once.\n"
            "  one writes it, and nothing orders 13 after 11\n"
            "  Let the later op come after the earlier one.",
        ),
    ],
    ids=["missing", "before the step", "used in flight"],
)
def test_gathers_in_the_wrong_place_are_found(line: str, fault: str) -> None:
    assert sharded(line) == fault


def test_a_strategy_is_held_to_its_reduction() -> None:
    text = text_of(ConfigError, lambda: verify(lower_data_parallel(1), ZERO1, num_buckets=1))
    assert text.splitlines()[1] == "  fills: expected 1, got 1; reduce_scatters: expected 1, got 0; the plan has 1 buckets"
    text = text_of(ConfigError, lambda: verify(lower_data_parallel(1, ZERO1), num_buckets=1))
    assert text.splitlines()[1] == "  fills: expected 1, got 1; all_reduces: expected 1, got 0; the plan has 1 buckets"
    text = text_of(ConfigError, lambda: verify(lower_accumulation(1, ZERO2), ZERO1, num_buckets=1))
    assert text.splitlines()[1] == "  fills: expected 1, got 1; reduce_scatters: expected 0, got 1; the plan has 1 buckets"


def test_the_next_step_must_not_come_too_early() -> None:
    without_use = "\n".join(STEP.splitlines()[:-1])
    assert fault_in(without_use) == (
        "ops 10 (step *) and 12 (fill b0) may touch grad[b0] at once.\n"
        "  one writes it, and nothing orders 12 after 10\n"
        "  Let the later op come after the earlier one."
    )


MESH = lower_data_parallel(2, HYBRID).to_text()


def fault_on_a_mesh(*lines: str) -> str:
    text = with_lines(*lines, of=MESH)
    return text_of(ConfigError, lambda: verify(schedule_from_text(text), HYBRID, num_buckets=2))


def test_every_bucket_crosses_both_axes_of_a_mesh() -> None:
    assert fault_on_a_mesh("03  compute  pack  b0  shard[b0]  shard[b0]  02") == (
        "the ops on grad[b0] do not carry each gradient across once.\n"
        f"  reduce_scatters: expected 1, got 1; all_reduces: expected 1, got 0; the plan has 2 buckets\n  {CROSSING_REMEDY}"
    )


@pytest.mark.parametrize(
    "lines",
    [
        ["03  comm.across  all_reduce  b0  shard[b0]  shard[b0]  01"],
        ["10  compute  bind  b0  shard[b0]  -  02 09", "11  compute  bind  b1  shard[b1]  -  07 09"],
    ],
    ids=["before the inner axis", "after the step"],
)
def test_the_outer_axis_comes_behind_the_inner_one_and_before_the_step(lines: list[str]) -> None:
    assert fault_on_a_mesh(*lines) == (
        "op 03 (all_reduce b0) may run before its gradients are there or after the step.\n"
        "  reduce_scatter is op 02, step is op 12\n  Order the collective after the fill and before the step."
    )


@given(st.integers(1, 40))
def test_lowered_schedules_of_a_mesh_are_right(num_buckets: int) -> None:
    for overlap in (False, True):
        verify(lower_data_parallel(num_buckets, HYBRID, overlap=overlap), HYBRID, num_buckets=num_buckets)
    verify(lower_eager(num_buckets, HYBRID), HYBRID, num_buckets=num_buckets)
    verify(lower_accumulation(num_buckets, HYBRID), HYBRID, num_buckets=num_buckets)


def test_the_last_trailer_leaves_after_backward_on_both_axes() -> None:
    fault = fault_on_a_mesh(
        "06  compute  pack  b1  grad[b1]  grad[b1]  04", "08  comm.across  all_reduce  b1  shard[b1]  shard[b1]  05 07"
    )
    assert fault.startswith("op 07 (reduce_scatter b1) may leave before backward is over.")
