"""Lowered schedules are right, and each fault that one line of a schedule can have is found."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import refusal
from support.schedules import schedule_from_text
from support.strategies import LOWERINGS
from support.verify import verify
from undertow.schedule import (
    DDP,
    HYBRID,
    ZERO1,
    ZERO2,
    lower_accumulation,
    lower_data_parallel,
    strategy_named,
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
SHARDED = {"of": lower_data_parallel(2, ZERO1).to_text(), "strategy": ZERO1}  # 10 steps, 11 and 12 gather, 13 and 14 use
# The last collective has its own edge to the end of backward, so that a fault of its pack is only that.
APART = STEP.replace("grad[b1]  05", "grad[b1]  04 05")


def read(*lines: str, of: str = STEP) -> Any:
    """The schedule of a text with `lines` in place of those of the same ids, or behind the last."""
    return schedule_from_text("\n".join({line.split()[0]: line for line in (*of.splitlines(), *lines)}.values()))


def crossing(buffer: str) -> str:
    return f"the ops on {buffer} do not carry each gradient across once."


def outside(op: str) -> str:
    return f"op {op} may run before its gradients are there or after the step."


def at_once(first: str, second: str, buffer: str) -> str:
    return f"ops {first} and {second} may touch {buffer} at once."


def ends(kind: str, count: int) -> str:
    return f"the schedule has {count} ops of kind {kind}, expected 1."


def leaves_early(op: str) -> str:
    return f"op {op} may leave before backward ends."


def gathered_early(op: str) -> str:
    return f"op {op} may run before the step."


@pytest.mark.parametrize(
    ("lines", "how", "fault"),
    [
        pytest.param(
            ["02  compute  pack  b0  grad[b0]  grad[b0]  01"],
            {},
            crossing("grad[b0]"),
            id="not sent",
        ),
        pytest.param(
            ["02  comm.dp  all_reduce  b0  grad[b0]  grad[b0]  -"],
            {},
            outside("02 (all_reduce b0)"),
            id="sent before it is filled",
        ),
        pytest.param(
            ["08  compute  bind  b0  grad[b0]  -  01 07"],
            {"of": APART},
            at_once("02 (all_reduce b0)", "08 (bind b0)", "grad[b0]"),
            id="bound in flight",
        ),
        pytest.param(
            [],
            {"of": STEP[: STEP.index("11  ")]},
            at_once("10 (step *)", "12 (fill b0)", "grad[b0]"),
            id="the next step comes too early",
        ),
        pytest.param(["04  compute  join  *  -  -  00 03"], {}, ends("end", 0), id="backward never ends"),
        pytest.param(
            ["05  compute  pack  b1  grad[b1]  grad[b1]  03"],
            {},
            leaves_early("06 (all_reduce b1)"),
            id="the last one leaves in backward",
        ),
        pytest.param(
            ["12  compute  use  b0  param[b0]  -  10"],
            SHARDED,
            "the ops on param[b0] do not bring each parameter to every rank once.",
            id="not gathered",
        ),
        pytest.param(
            ["11  comm.dp  all_gather  b1  own[b1]  param[b1]  07"],
            SHARDED,
            gathered_early("11 (all_gather b1)"),
            id="gathered before the step",
        ),
        pytest.param(
            ["12  compute  step  *  grad[*]  param[*]  10"],
            {},
            "the steps do not update each parameter once.",
            id="stepped twice",
        ),
    ],
)
def test_a_fault_is_found(lines: list[str], how: dict[str, Any], fault: str) -> None:
    given = {"of": STEP, "strategy": DDP, "num_buckets": 2, **how}
    schedule = read(*lines, of=given["of"])
    assert refusal(lambda: verify(schedule, given["strategy"], num_buckets=given["num_buckets"])).partition("\n")[0] == fault


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
